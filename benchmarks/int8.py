"""Recall and size of exported towers in float32 and with int8 weights (ONNX Runtime), on drawn shapes.

    python benchmarks/int8.py runs/mobileclip_quickstart/version_0/checkpoints/last.ckpt

The checkpoint is one of `CLIPModule`, `MMLGModule` or `MobileCLIPModule` that was trained on `ShapesDataModule` or
`ReinforcedShapesDataModule` with CLIP's tokenizer. Needs the extra `onnx`.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from vlightning.commands.export.layouts import export
from vlightning.common.preprocessing import Preprocessing
from vlightning.datamodules import ShapesDataModule
from vlightning.metrics.retrieval import Matches, recalls, retrieval_ranks

LAYOUTS = ("onnx", "onnx_int8")


def encoded(folder: Path, images: int) -> tuple[np.ndarray, np.ndarray]:
    """Return features [N, E] of test images and of their captions, by the programs of a folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    record = Preprocessing.from_dict(config["preprocessing"], str(folder))
    options = {"image_size": record.image_size, "tokenizer": "clip", "vocab_size": 49408}
    data = ShapesDataModule(**options, max_tokens=config["context_length"], eval_length=images, num_workers=0)
    data.setup("test")
    session = {name: onnxruntime.InferenceSession(folder / f"{name}.onnx") for name in ("image", "text")}
    found: dict[str, list[np.ndarray]] = {"image": [], "text": []}
    for batch in data.test_dataloader():
        found["image"].append(session["image"].run(None, {"image": batch["image"].numpy()})[0])
        found["text"].append(session["text"].run(None, {"input_ids": batch["input_ids"].numpy()})[0])
    return np.concatenate(found["image"]), np.concatenate(found["text"])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--images", type=int, default=1000)
    typed = parser.parse_args()
    print("| weights | image tower | text tower | mean recall | lowest cosine |\n|---|---|---|---|---|")
    first = None
    with tempfile.TemporaryDirectory() as place:
        for layout in LAYOUTS:
            folder = Path(place) / layout
            export(typed.checkpoint, str(folder), layout)
            features = [torch.from_numpy(part) for part in encoded(folder, typed.images)]
            first = features if first is None else first
            cosine = min(float((a * b).sum(1).min()) for a, b in zip(features, first, strict=True))
            sizes = [f"{(folder / f'{name}.onnx').stat().st_size / 2**20:.2f} MiB" for name in ("image", "text")]
            own = torch.arange(len(features[0]))
            recall = recalls(*retrieval_ranks(*features, Matches(own, own)))["recall_mean"]
            print(f"| {layout} | {' | '.join(sizes)} | {recall:.2f} | {cosine:.4f} |")


if __name__ == "__main__":
    main()
