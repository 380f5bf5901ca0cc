"""Time of a zero-shot evaluation beside its parts, decoding and the forward pass, and beside clip_benchmark.

    python benchmarks/evaluate.py --model MobileCLIP-S0 --images 512
    python benchmarks/evaluate.py --model ViT-B-32 --images 512 --workers 2 --clip_benchmark path/to/python

The set is written first: random JPEG images in DataComp's layout. Each round takes, one after the other:

- decoding: reading, decoding and preprocessing of all images by the loader workers;
- forward: the image tower on as many batches of random numbers;
- engine: `vlightning evaluate`'s pass over the set, prompts of the classes and metrics included;
- clip_benchmark: that package on the same files, by the Python of its environment (`--clip_benchmark`), without the
  loading of the model.

Weights are random, which no time depends on. One thread; the median of the rounds.
"""

import argparse
import io
import json
import statistics
import subprocess
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
from latency import device_name
from PIL import Image
from timing import seconds as taken

from vlightning.evaluate.classification import classification_metrics
from vlightning.evaluate.encoding import Loading, batches, encode_classes, encode_images
from vlightning.evaluate.image_sets import ImageSet, read_prompts
from vlightning.evaluate.model import ImageTextModel
from vlightning.evaluate.tasks import TASKS
from vlightning.lightning_modules.base.frozen import Frozen
from vlightning.lightning_modules.networks.clip.models import build_model
from vlightning.lightning_modules.networks.clip.preprocessing import preprocessing_of
from vlightning.metrics.zero_shot import zero_shot_scores

TASK = TASKS["cifar10"]
CLIP_BENCHMARK = """
import json, sys, time, torch, open_clip
from clip_benchmark.datasets.builder import build_dataset, get_dataset_collate_fn
from clip_benchmark.metrics import zeroshot_classification as zero_shot
folder, model, batch, workers = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
network, _, transform = open_clip.create_model_and_transforms(model)
tokenizer = open_clip.get_tokenizer(model)
network.eval()
options = {"split": "test", "download": False, "task": "zeroshot_classification"}
data = build_dataset("wds/cifar10", root=folder, transform=transform, **options)
loader = torch.utils.data.DataLoader(data.batched(batch), batch_size=None, shuffle=False, num_workers=workers)
began = time.perf_counter()
zero_shot.evaluate(network, loader, tokenizer, data.classes, data.templates, "cpu", amp=False)
print(json.dumps(time.perf_counter() - began))
"""


def write_set(root: Path, images: int, side: int, classes: int) -> Path:
    """Write random JPEG images with smooth contents, which compress as photographs do."""
    folder = root / TASK.folder
    (folder / "test").mkdir(parents=True)
    (folder / "classnames.txt").write_text("\n".join(f"thing {number}" for number in range(classes)) + "\n")
    (folder / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\nan image of {c}.\n")
    (folder / "test/nshards.txt").write_text("1\n")
    draws = np.random.default_rng(0)
    with tarfile.open(folder / "test/0.tar", "w") as tar:
        for number in range(images):
            coarse = Image.fromarray(draws.integers(0, 256, (12, 16, 3), dtype=np.uint8))
            content = io.BytesIO()
            coarse.resize((side * 4 // 3, side), Image.Resampling.BICUBIC).save(content, "JPEG", quality=90)
            for kind, data in (("cls", str(number % classes).encode()), ("jpg", content.getvalue())):
                info = tarfile.TarInfo(f"s{number:07}.{kind}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return folder


def build(name: str) -> ImageTextModel:
    """Build a model with random weights."""
    import open_clip

    torch.manual_seed(0)
    network = build_model(name).eval()
    tokenizer = open_clip.get_tokenizer("", network.context_length)
    transform = preprocessing_of(name).transform()
    return ImageTextModel(
        name,
        network,
        network.encode_image,
        lambda texts: network.encode_text(tokenizer(list(texts))),
        transform,
        Frozen(network).fingerprint(),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="MobileCLIP-S0")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--side", type=int, default=375, help="shorter side of the images in pixels")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clip_benchmark", help="the Python of an environment with clip_benchmark")
    typed = parser.parse_args()
    torch.set_num_threads(1)
    model = build(typed.model)
    loading = Loading(typed.batch_size, typed.workers)
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as root:
        folder = write_set(Path(root), typed.images, typed.side, typed.classes)
        prompts = read_prompts(folder)
        samples = ImageSet(folder, "test", model.transform, len(prompts.names))
        size = samples[0].image.shape
        random = [torch.randn(typed.batch_size, *size)] * (typed.images // typed.batch_size)

        def decode() -> None:
            for _ in batches(samples, loading):
                pass

        def forward() -> None:
            for batch in random:
                model.encode_images(batch)

        def engine() -> None:
            found = encode_images(model, ImageSet(folder, "test", model.transform, len(prompts.names)), loading)
            classes = encode_classes(model, prompts.names, prompts.templates)
            classification_metrics(TASK, zero_shot_scores(found.features, classes), found)

        for _ in range(typed.rounds):
            for name, action in (("decoding", decode), ("forward", forward), ("engine", engine)):
                seconds.setdefault(name, []).append(taken(action))
            if typed.clip_benchmark:
                words = [
                    typed.clip_benchmark,
                    "-c",
                    CLIP_BENCHMARK,
                    str(folder),
                    typed.model,
                    str(typed.batch_size),
                    str(typed.workers),
                ]
                ran = subprocess.run(words, capture_output=True, text=True, check=True)
                seconds.setdefault("clip_benchmark", []).append(json.loads(ran.stdout.splitlines()[-1]))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    device = device_name(torch.device("cpu"))
    print(f"{device}, {typed.model}, {typed.images} images, {typed.workers} workers, one thread\n")
    print("| part | s | images/s | of decoding + forward |\n|---|---:|---:|---:|")
    both = median["decoding"] + median["forward"]
    for name, value in median.items():
        print(f"| {name} | {value:.2f} | {typed.images / value:,.1f} | {value / both:.2f} |")


if __name__ == "__main__":
    main()
