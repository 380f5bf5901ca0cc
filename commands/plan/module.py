"""The module of a parsed configuration without weights, and batches of its shapes."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...common.errors import UserError
from ...lightning_modules.core.frozen import without_weights

METHODS = (
    *("ALBEFModule", "CLIPModule", "CoCoRDModule", "MMLGModule", "MobileCLIPModule", "SHReModule"),
    *("EntailmentModule", "NLVR2Module", "TextAssignmentModule", "VQAModule"),
)
"""Names of the classes, and with them of their subclasses, which are not imported here."""
LONGEST = 40
"""Tokens of a text that its datamodule does not truncate: 30 words, of which some are several tokens."""
ANSWERS, ANSWER, PREDICTED = 3, 5, 3
"""Distinct answers of a question (ten people give about three), tokens of the longest, and predicted tokens of each."""
_HALF = (0.5, 0.5, 0.5)


def pretend_run(module: Any) -> None:
    """Let a module find a Trainer in the middle of a run, and log nothing."""
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(total_batch_idx=1))
    module.pretended_run = SimpleNamespace(  # referred to here, since Lightning keeps a weak reference
        datamodule=SimpleNamespace(preprocessing={"mean": _HALF, "std": _HALF}),
        callbacks=[],
        strategy=SimpleNamespace(restore_checkpoint_after_setup=False),
        num_training_batches=1,
        fit_loop=loop,
        global_step=1,
        max_steps=2,
        estimated_stepping_batches=2,
        world_size=1,
        is_global_zero=True,
        sanity_checking=False,
    )
    module.trainer = module.pretended_run
    module.log = module.log_dict = lambda *_, **__: None


def method_of(module: Any) -> str | None:
    """Return the name in `METHODS` of a module's class; None for another class."""
    return next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in METHODS), None)


def start(module: Any) -> None:
    """Build what a fit builds, without weights.

    Args:
        module: a module of a class in `METHODS`.

    Raises:
        UserError: If its sizes depend on the data.
    """
    baselines = getattr(module, "baselines", None)
    if baselines is not None and baselines.crd is not None:
        raise UserError(
            f"Expected sizes that do not depend on the data, got the banks of model.kd.crd_weight "
            f"{module.kd.crd_weight}: set it to 0."
        )
    pretend_run(module)
    with without_weights():
        module.setup("fit")
    module.configure_model()
    module.train()


def batch_of(module: Any, data: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    """Return a batch of a method's shapes.

    Args:
        module: the module.
        data: arguments of the datamodule; sizes that they do not give are the module's.
        rows: rows of the batch.
    """
    side = data.get("image_size") or module.expected_image_size() or (32 if data.get("preset") == "cifar" else 224)
    ids = torch.zeros(rows, dtype=torch.long)
    method = method_of(module)
    names = ["image_left", "image_right"] if method == "NLVR2Module" else getattr(module, "views", ["image"])
    image = {name: torch.zeros(rows, 3, side, side) for name in names}
    found = image | {"image_id": ids, "label": ids.clone(), "sample_index": ids.clone()}
    if method == "CoCoRDModule":
        return found
    length = data.get("max_tokens") or getattr(getattr(module, "text", None), "max_tokens", None) or module.max_tokens
    if method in ("EntailmentModule", "NLVR2Module"):
        length = min(length, LONGEST)
    if method == "VQAModule":
        return image | _questions(rows, data.get("questions_per_image") or 1, length)
    words = torch.zeros(rows, length, dtype=torch.long)
    found |= {"input_ids": words, "attention_mask": words.clone()}
    if method == "MobileCLIPModule":
        texts = ["real", "synthetic"] if module.captions == "both" else [module.captions]
        if "synthetic" in texts:
            found["synthetic_input_ids"] = words.clone()
        if module.teacher.distillation_weight > 0 and not module.teacher.models:
            width = sum(module.teachers.dims)
            found |= {name: torch.zeros(rows, width) for name in ("teacher_image", "teacher_text", "teacher_synthetic")}
    return found


def _questions(images: int, per_image: int, length: int) -> dict[str, Tensor]:
    """Return what a batch of VQA has beside images: questions, and `ANSWERS` of each."""
    asked = torch.zeros(images * per_image, length, dtype=torch.long)
    answers = torch.zeros(len(asked) * ANSWERS, ANSWER, dtype=torch.long)
    owner = torch.arange(len(asked))
    found = {
        "input_ids": asked,
        "attention_mask": asked.clone(),
        "sample_index": owner,
        "answer_ids": answers,
        "answer_mask": torch.ones_like(answers),
        "answer_index": owner.repeat_interleave(ANSWERS),
        "answer_weight": torch.ones(len(answers)),
        "answer_places": torch.arange(len(answers) * PREDICTED),
    }
    return found if per_image == 1 else found | {"image_index": owner // per_image}
