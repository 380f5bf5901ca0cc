"""Every complete command in a shipped config's first lines takes two optimizer steps and validates.

Commands are parsed unchanged and read files of the layouts that they name. Replaced settings are
in `REPLACED`: sizes, devices, weights to download; two processes stand for those of `ddp`.
"""

import math
import os
import shutil
from pathlib import Path

import pytest

from support.methods.mmlg import trained_checkpoint
from support.runs.distributed import run_distributed
from support.runs.recipe_files import write_coco_embeddings, write_files
from support.runs.recipes import ROOT, Ran, commands_of, in_order, is_distributed, length_of, ran, ran_together

METHODS = ("albef", "clip", "cocord", "mmlg", "mobileclip", "shre")
TRAINER = {
    *("accelerator", "devices", "num_nodes", "strategy", "max_steps", "limit_train_batches", "val_check_interval"),
    *("num_sanity_val_steps", "enable_progress_bar", "enable_model_summary"),
}
MODEL = {
    *("width", "heads", "patch_size", "layers", "image_layers", "text_layers", "fusion_layers", "embed_dim"),
    *(f"vision.{name}" for name in ("image_size", "patch_size", "width", "depth", "heads", "weights")),
    *(f"text.{name}" for name in ("width", "heads", "ffn_width", "depth", "fusion_depth", "max_tokens")),
    *("contrast.embed_dim", "contrast.queue_size", "rerank.k", "answers.candidates"),
    *("head_hidden", "predictor_hidden", "prefix_length", "clip_length", "mapper_layers", "mapper_heads"),
    *("queue_size", "rerank_k", "max_new_tokens", "max_tokens", "image_size", "teacher.dims", "vision.image_size"),
    *("model.image.name", "model.image.weights", "model.text.name"),
    *("model", "weights", "teacher", "teacher_weights", "vision_weights", "image_weights"),
    *(f"towers.{name}" for name in ("width", "heads", "depth", "embed_dim")),
    *(f"vision.{name}" for name in ("image_size", "patch_size", "width", "heads", "depth")),
    *(f"mapper.{name}" for name in ("width", "prefix_length", "clip_length", "depth", "heads")),
    *("text.max_tokens", "teacher.model", "teacher.weights", "generation.max_new_tokens"),
    *(f"heads.{name}" for name in ("embed_dim", "hidden", "predictor_hidden")),
    *("teacher.name", "teacher.queue_size", "num_classes", "text.weights"),
}
DATA = {
    *(
        "batch_size",
        "global_batch_size",
        "eval_batch_size",
        "num_workers",
        "cache_dir",
        "samples_per_epoch",
        "augmentations",
    ),
    *("length", "eval_length", "image_size", "max_tokens", "held_out"),
}
REPLACED = {
    *(f"trainer.{name}" for name in TRAINER),
    *(f"model.init_args.{name}" for name in MODEL),
    *(f"data.init_args.{name}" for name in DATA),
    *(f"data.init_args.{part}_transform.init_args.size" for part in ("train", "eval")),
    # Data and texts of the classes that are told apart.
    *(f"trainer.callbacks.{number}.init_args.data.init_args.{name}" for number in (0, 1) for name in DATA),
    *(f"trainer.callbacks.{number}.init_args.templates" for number in (0, 1)),
    # The networks that reinforce a data set.
    *(f"model.init_args.teachers.{number}.{name}" for number in (0, 1) for name in ("model", "weights")),
    *(f"model.init_args.captioner.init_args.{name}" for name in ("model", "weights", "length")),
}
"""Settings that may differ from a command."""
SCALED = {"trainer.precision", "trainer.plugins"}
"""And where it says 16-mixed, as a CPU knows the scaler of the gradients only if it is named."""

EXTRACTION = {"val/zero_shot_top1", "val/paper/image_to_text_r1", "val/paper/text_to_image_r1"}
"""Metrics by which the paper checks an extraction."""


def commands(method):
    return in_order(
        [line for path in sorted((ROOT / "configs" / method).rglob("*.yaml")) for line in commands_of(path)]
    )


def test_every_config_of_a_method_has_a_complete_command():
    for method in METHODS:
        for path in sorted((ROOT / "configs" / method).rglob("*.yaml")):
            own = str(path.relative_to(ROOT))
            assert any(own in command for command in commands_of(path)), own


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    write_files(folder / "files")
    return folder


def _results(method, folder):
    """Run the commands of a method in one folder, and return their results."""
    shutil.copytree(folder / "files", folder / method, symlinks=True, copy_function=os.link)
    write_coco_embeddings(folder / method)
    os.chdir(folder / method)
    found: dict[str, Ran] = {}
    waiting = commands(method)
    if method == "mmlg":  # whatever its depth, the classifier starts from a descendant
        trained_checkpoint(Path(), student="plain", depth=8, width=16, heads=2, embed_dim=12, image_size=16)
        Path("last.ckpt").rename("activated.ckpt")
    while waiting:
        together = [command for command in waiting if is_distributed(command)]
        if is_distributed(waiting[0]):
            first = run_distributed(ran_together, together, timeout=600)[0]
            found |= {command: Ran(**one) for command, one in zip(together, first, strict=True)}
            waiting = [command for command in waiting if command not in together]
            continue
        command = waiting.pop(0)
        shutil.rmtree("reinforced", ignore_errors=True)
        found[command] = ran(command)
        for name, source in (("ALBEF.pth", "albef/base"), ("shre.ckpt", "shre_distill")):
            trained = Path("runs", source, "version_0/checkpoints/last.ckpt")
            if trained.exists() and not Path(name).exists():
                shutil.copy(trained, name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_command_takes_two_steps_and_validates(method, files, monkeypatch):
    monkeypatch.chdir(files)
    for command, result in _results(method, files).items():
        assert result.status == 0, f"{command}\n{result.error}"
        configs = [(ROOT / word).read_text() for word in command.split() if word.startswith("configs/")]
        assert result.dropped == [], command
        scaled = _last(configs, "precision") == "16-mixed"
        assert set(result.replaced) <= REPLACED | (SCALED if scaled else set()), command
        assert result.trainer["processes"] == (2 if is_distributed(command) else 1), command
        if "mmlg/extract_check.yaml" in command:
            assert set(result.metrics) >= EXTRACTION, result.metrics
        if " fit " not in command:
            continue
        assert (result.steps, result.trainer["global_step"]) == (2, 2), command
        if "TextAssignmentModule" in "".join(configs):  # a stage without validation
            continue
        assert result.trainer["validations"] > 0, command
        seen = {name: value for name, value in result.metrics.items() if name.startswith(("val/", "train/"))}
        assert any(name.startswith("val/") for name in seen), command
        # After two steps at a rate of 0.1 the running statistics of 50 layers do not fit their weights.
        behind = "pairs/imagenet_resnet101_resnet50.yaml" in command
        measured = {name: value for name, value in seen.items() if not (behind and name.startswith("val/"))}
        assert all(map(math.isfinite, measured.values())), (command, seen)
        clip = _last(configs, "gradient_clip_val")
        assert result.trainer["clip"] == (None if clip in (None, "null") else float(clip)), command
        assert result.trainer["accumulate"] == 1, command
        assert result.trainer["precision"] == (_last(configs, "precision") or "32-true"), command
        assert result.trainer["scaler"] == scaled, command
        if result.optimizer["class"] == "AdamW":
            assert result.optimizer["fused"], command
        if not any(own in command for own in ("quickstart", "my_data", "configs/clip/")):  # else the user's data
            _leads_where_the_paper_says(command, result.planned)


LENGTHS = {
    "albef/pretrain_4m": (298_800, 512, 2_000, 0.1),  # the authors' rates
    "albef/pretrain_14m": (890_610, 512, 2_000, 0.1),
    "albef/ablation": (298_800, 512, 2_000, 0.1),
    "albef/grounding": (2_345, 256, 0, 0.1),
    "albef/official": (298_800, 512, 2_000, 0.1),  # their staircase
    "albef/retrieval_flickr30k": (5_660, 256, 0, 0.1),
    "albef/retrieval_coco": (11_065, 256, 0, 0.1),
    "albef/entailment": (10_340, 256, 100, 0.05),
    "albef/official_tasks": (10_340, 256, 100, 0.05),
    "albef/assignment": (9_960, 512, 100, 0.5),
    "albef/nlvr": (6_740, 128, 100, 0.05),
    "albef/vqa": (43_280, 256, 400, 0.05),
    "albef/official_retrieval": (5_660, 256, 0, 0.1),
    "cocord": (187_440, 64, 0, 1e-3),  # CRD's benchmark: 240 epochs
    "cocord/pairs/imagenet": (500_400, 256, 0, 1e-3),  # PyTorch's 100 epochs
    "cocord/imagenet": (500_400, 256, 0, 1e-3),
    "cocord/probe_stl10": (9_360, 64, 0, 1e-3),
    "cocord/probe_tinyimagenet": (187_440, 64, 0, 1e-3),
    "mmlg/extract": (803_744, 512, 10_000, 0),
    "mmlg/activate": (2_511, 512, 250, 0),  # a tenth of the pairs, one epoch
    "mmlg/pt_ft": (803_744, 512, 10_000, 0),
    "mmlg/retrieval_flickr30k": (28_300, 256, 10_000, 0),
    "mmlg/retrieval_coco": (110_650, 256, 10_000, 0),
    "mmlg/retrieval_scratch": (28_300, 256, 10_000, 0),
    "mmlg/caption_coco": (22_130, 256, 5_000, 0),
    "mmlg/classify_cifar100": (97_500, 256, 5_000, 0),
    "mmlg/classify_food101": (147_500, 256, 5_000, 0),
    "mmlg/classify_pets": (7_000, 256, 5_000, 0),
    "mobileclip/base": (45_000, 8_192, 2_000, 1e-3),
    "mobileclip/paper": (200_000, 65_536, 2_000, 1e-3),
    "mobileclip/paper_b_lt": (600_000, 65_536, 2_000, 1e-3),
    "mobileclip/mobileclip2": (200_000, 65_536, 10_000, 1e-3),
    "mobileclip/mobileclip2_s4": (114_286, 114_688, 2_000, 0),
    "mobileclip/released_script": (30_000, 8_192, 1_000, 0),
    "shre/distill": (89_273, 256, 8_927, 0),
    "shre/self_supervised_teacher": (44_632, 512, 4_463, 0),
    "shre/memory_bank": (44_632, 512, 4_463, 0),
    "shre/retrieval_finetune": (2_765, 1_024, 276, 0),
    "shre/probe": (75_060, 256, 7_506, 0),
    "shre/finetune": (75_060, 256, 7_506, 0),
    "shre/probe_cifar10": (2_925, 256, 292, 0),
    "shre/probe_cifar100": (2_925, 256, 292, 0),
}
"""Steps, global batch, steps of warm-up, and last learning rate as a share of the peak, from papers or authors' code.

A name stands for all configs that start with it and have no entry of their own."""


def _leads_where_the_paper_says(command, planned):
    """The `schedule` of the config, the parsed recipe and its learning rates have the numbers of the paper."""
    name = [word for word in command.split() if word.startswith("configs/")][-1].removeprefix("configs/")[:-5]
    steps, batch, warmup, end = LENGTHS[max((key for key in LENGTHS if name.startswith(key)), key=len)]
    stated = length_of(command)
    assert stated is not None, command
    assert (stated.steps, stated.batch, planned["batch"]) == (steps, batch, batch), command
    if planned["steps"] > 0:
        assert planned["steps"] == steps, command
        assert stated.epochs == pytest.approx(steps * batch / stated.rows, abs=0.05), command
    else:
        assert planned["epochs"] * (stated.rows // batch) == steps, command
        assert stated.epochs == planned["epochs"], command
    assert planned["rows"] in (None, stated.rows), command
    assert planned["samples"] in (None, "captions" if stated.unit == "captions" else "images"), command
    assert stated.warmup_steps == warmup, command
    assert planned["peak"] == pytest.approx(1, rel=1e-3), command
    assert planned["end"] == pytest.approx(end, abs=1e-9), command
    if warmup:
        assert planned["start"] <= 0.5, command


def _last(configs, name):
    """What the last config that sets an option of the Trainer sets it to."""
    lines = [line.split() for text in configs for line in text.splitlines()]
    values = [words[1] for words in lines if len(words) > 1 and words[0] == f"{name}:"]
    return values[-1] if values else None
