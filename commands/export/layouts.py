"""Export of a training's checkpoint in a layout of the class that it names.

The layouts are those that `layouts()` of the class names; the first is its default.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import lightning_modules
from ...callbacks import AtomicCheckpointIO
from ...common.errors import UserError
from ...common.files import check_free, run_folder_of
from ...common.preprocessing import described, recorded_preprocessing
from ...common.tokenizers import saved_tokenizer
from ...lightning_modules.base.example_batch import image_batch
from ...lightning_modules.base.exported import FOLDER, LAYOUT, rebuild
from ...lightning_modules.base.method import Method
from ...lightning_modules.base.model_card import Training, expected_tokenizer_of
from ...lightning_modules.core.checkpoints import ORDERS_KEY, class_of, is_checkpoint, saved_settings
from ...lightning_modules.core.programs import described_half, example_images
from ...lightning_modules.core.towers import Space
from ..cli.saved_run import resolved


def exported_classes() -> dict[str, type[Method]]:
    """Return the methods that can be exported, by the name of the class."""
    classes = lightning_modules.method_classes()
    return {name: cls for name, cls in classes.items() if issubclass(cls, Method) and cls.trains}


def described_layouts() -> str:
    """Return a text about all layouts, for the help of `vlightning export`."""
    sentences = [f"Of every module: {FOLDER}: {LAYOUT}."]
    for name, cls in exported_classes().items():
        others = "; ".join(f"{layout}: {text}" for layout, text in cls.layouts().items() if layout != FOLDER)
        if others:
            sentences.append(f"Of {name}, by default {next(iter(cls.layouts()))}: {others}.")
    return " ".join(sentences)


def export(checkpoint: str, target: str, layout: str | None = None, dtype: str | None = None) -> str:
    """Write the model of a training checkpoint, and return a sentence about what was written.

    Args:
        checkpoint: A checkpoint file, the folder of a sharded one, or that of a run, for its best checkpoint.
        target: The file or folder to write.
        layout: One of those of the checkpoint's class; None takes its first.
        dtype: Precision of the weights, such as "float16"; None for that of the checkpoint, or float32 of programs.

    Raises:
        UserError: If the checkpoint does not exist, is not of a module that can be exported, or not in this layout or
            precision; or the target exists.
        RuntimeError: If the checkpoint cannot be read.
    """
    path = Path(checkpoint).expanduser()
    if not path.exists():
        raise UserError(
            f"Expected a .ckpt file of a training or a run's folder, got {checkpoint!r}, which does not exist: correct "
            "the path."
        )
    checkpoint = str(resolved(path))
    if not is_checkpoint(checkpoint) and Path(checkpoint).is_dir():
        raise UserError(
            f"Expected a .ckpt file, the folder of a sharded checkpoint or of a run, got {checkpoint!r}: correct the "
            "path."
        )
    check_free(Path(target))
    content = AtomicCheckpointIO().load_checkpoint(checkpoint)
    cls = _class_of(content, checkpoint)
    layouts = cls.layouts()
    if layout not in (None, *layouts):
        raise UserError(
            f"Expected {' or '.join(layouts)} as the layout of {cls.__name__}, the class of {checkpoint!r}, got "
            f"{layout!r}: correct it."
        )
    layout = layout or next(iter(layouts))
    halves = cls.half_precisions()
    if dtype not in (None, "float32", *halves.get(layout, ())):
        others = [f"{name} ({' or '.join(kinds)})" for name, kinds in halves.items()]
        raise UserError(
            f"Expected float32 in the layout {layout} of {cls.__name__}, got {dtype}: leave --dtype out"
            f"{f', or choose {_any_of(others)}' if others else ''}."
        )
    precision = None if dtype is None else getattr(torch, dtype)
    if layout == FOLDER:
        return _write_folder(cls, content, Path(checkpoint), target, precision)
    options: Any = {} if dtype in (None, "float32") else {"dtype": precision}  # few layouts take one
    return cls.write_layout(content, f"the checkpoint {checkpoint!r}", target, layout, **options)


def _any_of(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " or " * (len(names) > 1) + names[-1]


def _write_folder(
    cls: type[Method], content: Mapping[str, Any], checkpoint: Path, target: str, dtype: torch.dtype | None
) -> str:
    """Write the folder that `from_pretrained` reads, and return a sentence about it."""
    module = rebuild(cls, content["hyper_parameters"], content["state_dict"], f"the checkpoint {str(checkpoint)!r}")
    module.find_networks(content)
    preprocessing = recorded_preprocessing(content)
    module.adopt_preprocessing(preprocessing)
    module.adopt_retrieval_orders(content.get(ORDERS_KEY))
    module.space = Space.of(content)
    tokenizer, note = saved_tokenizer(content, expected_tokenizer_of(module))
    error = ""
    if dtype is not None:
        error = f" {_rounded(module, dtype, content)}" * (dtype != torch.float32)
        module.to(dtype)
    module.save_pretrained(target, tokenizer, Training.of_checkpoint(content, run_folder_of(checkpoint)))
    order = module.retrieval_order()
    return (
        f"Wrote {target} {note}; {cls.__name__}.from_pretrained({target!r}) reads it; "
        f"{described(preprocessing)}.{f' {order}' if order else ''}{error}"
    )


@torch.no_grad()
def _rounded(module: Method, dtype: torch.dtype, content: Mapping[str, Any]) -> str:
    """Return a sentence about how far features of images in a half precision are from those in float32.

    Raises:
        UserError: If they are not finite: weights or activations are too large for float16.
    """
    batch = image_batch(module, 1, content.get("datamodule_hyper_parameters") or {})
    images = example_images(batch["image"].shape[-1])

    def features(kind: torch.dtype) -> Tensor:
        rounded: Any = copy.deepcopy(module).eval().to(kind)
        outputs = (
            rounded.encode_images(images.to(kind)) if hasattr(rounded, "encode_images") else rounded(images.to(kind))
        )
        return (outputs[0] if isinstance(outputs, tuple) else outputs).float()

    return described_half({"images": (features(dtype), features(torch.float32))}, dtype)


def _class_of(content: Mapping[str, Any], checkpoint: str) -> type[Method]:
    """Return the class of a checkpoint.

    Raises:
        UserError: If the checkpoint is not of a method that can be exported.
    """
    if not isinstance(content.get("hyper_parameters"), Mapping) or not isinstance(content.get("state_dict"), Mapping):
        raise UserError(
            f"Expected a checkpoint that `vlightning fit` or a Trainer wrote, got {checkpoint!r} without "
            "hyper_parameters beside a state_dict: give another."
        )
    name = class_of(saved_settings(content))
    classes = exported_classes()
    if name not in classes:
        raise UserError(
            f"Expected a checkpoint of {' or '.join(classes)}, got one of {name or 'an unknown class'} in "
            f"{checkpoint!r}: give another."
        )
    return classes[name]
