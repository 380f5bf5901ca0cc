"""What `python -m vlightning.export` writes of a MobileCLIP checkpoint: the network that was evaluated."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..lightning_modules.mobileclip.pretrained import Pretrained, rebuild, save_open_clip, save_vendor
from ..lightning_modules.mobileclip.towers import export_towers

LAYOUTS = {
    "torch_export": "a folder with image.pt2 and text.pt2, fused, for torch.export.load",
    "onnx": "a folder with image.onnx and text.onnx, fused; needs the extra 'onnx'",
    "open_clip": "a folder that open_clip.create_model_and_transforms('local-dir:<folder>') loads",
    "vendor": "a .pt file as the vendor's code and model.weights load it, of MobileCLIP-S0, -S1, -S2 and -B",
}
"""What each layout is; the first is the default."""


def export(content: Mapping[str, Any], source: str, target: str, layout: str) -> str:
    """Write the network of a checkpoint: the moving average where there is one, else the student.

    Args:
        content: the checkpoint.
        source: where it is from, for messages.
        target: what to write; there is nothing of that name, or an empty folder.
        layout: one of `LAYOUTS`.

    Returns:
        What was written.

    Raises:
        FileExistsError: if the target is a folder where a file is to be.
        ValueError: if the checkpoint does not fit its own arguments, or its model has no such layout.
        RuntimeError: if what was written gives other features than the network.
        OSError: if it cannot be written.
    """
    trained, kind = _trained(content, source)
    name = content["hyper_parameters"]["model"]
    if layout == "vendor":
        if Path(target).is_dir():
            raise FileExistsError(f"Found a folder {target!r}, expected the name of a new file, such as student.pt.")
        save_vendor(trained.model, target)
    elif layout == "open_clip":
        save_open_clip(trained.model, name, trained.preprocessing, target)
    else:
        size, look = trained.preprocessing.image_size, vars(trained.preprocessing)
        export_towers(trained.model, target, layout, size, preprocessing=look)  # type: ignore[arg-type]
    return f"Wrote {target} with the {kind} of {name} in the layout {layout!r}."


def _trained(content: Mapping[str, Any], source: str) -> tuple[Pretrained, str]:
    """The network, and whether it is the average or the student."""
    state = content["state_dict"]
    kind = "average" if any(key.startswith("average.") for key in state) else "student"
    network = {key.removeprefix(f"{kind}."): value for key, value in state.items() if key.startswith(f"{kind}.")}
    arguments = content["hyper_parameters"]
    missing = [name for name in ("model", "image_size", "max_tokens", "image_mean") if name not in arguments]
    if missing:
        raise ValueError(
            f"Found no {' and no '.join(missing)} among the hyper_parameters of {source}, expected those of "
            "MobileCLIPModule: it is of another class, or of another version of vlightning."
        )
    return rebuild(arguments, network, source), kind
