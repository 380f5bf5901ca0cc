"""Metrics are those that clip_benchmark 1.6.2 printed for the same files and weights.

`tests/golden/clip_benchmark.json` was made by this file and that package:

    python -c "import sys; sys.path[:0] = ['tests', 'tests/commands/evaluate']
    from test_clip_benchmark import write_files; write_files('files')"
    PYTHON_WITH_CLIP_BENCHMARK benchmarks/evaluate_clip_benchmark.py --model local-dir:files/model files/sets/*
"""

import json
from pathlib import Path

import open_clip
import pytest
import torch

from support.data.evaluation_sets import COLORS, write_image_set, write_retrieval
from support.methods.mobileclip import fill
from vlightning.commands.evaluate.encoding import Loading
from vlightning.commands.evaluate.model import load_model
from vlightning.commands.evaluate.run import Settings, evaluate
from vlightning.commands.evaluate.tasks import TASKS

GOLDEN = Path(__file__).resolve().parents[2] / "golden/clip_benchmark.json"
SETS = ("cifar10", "vtab/pets", "vtab/pcam", "retrieval/flickr_1k_test_image_text_retrieval")
CONFIG = {
    "embed_dim": 24,
    "vision_cfg": {"layers": 2, "width": 48, "head_width": 16, "patch_size": 4, "image_size": 16},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


def write_files(folder):
    """Write a model whose weights follow from their names, and four sets, one of two classes."""
    (Path(folder) / "model").mkdir(parents=True)
    network = open_clip.CLIP(**CONFIG)
    weights = {key: fill(key, value.shape) for key, value in network.state_dict().items()}
    torch.save(weights, Path(folder) / "model/open_clip_pytorch_model.bin")
    (Path(folder) / "model/open_clip_config.json").write_text(json.dumps({"model_cfg": CONFIG, "preprocess_cfg": {}}))
    root = Path(folder) / "sets"
    colors, names = [number % 6 for number in range(90)], [*COLORS, "cat", "dog", "tree", "long brick house"]
    for key, step in zip(SETS[:2], (1, 7), strict=True):
        write_image_set(
            root, TASKS[key], [(number // 6 + number * step) % 10 for number in range(90)], colors, names=names
        )
    write_image_set(root, TASKS["vtab/pcam"], [number // 2 % 2 for number in range(90)], colors, names=["a", "tree"])
    shown = [color for color in COLORS for _ in range(4)]
    write_retrieval(root, TASKS[SETS[3]], shown, ("{n} {} squares", "number {n} of {} things"))
    return root


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    root = write_files(folder)
    model = load_model(f"local-dir:{folder}/model")
    tasks = [TASKS[key] for key in SETS]
    return {r.key: r for r in evaluate(model, tasks, Settings(root, Loading(16, 0)), folder / "results.jsonl")}


@pytest.mark.parametrize("key", SETS)
def test_metrics_are_clip_benchmarks(results, key):
    theirs = json.loads(GOLDEN.read_text())[TASKS[key].folder]["metrics"]
    assert theirs == {name: pytest.approx(results[key].metrics.get(name), abs=1e-6) for name in theirs}
