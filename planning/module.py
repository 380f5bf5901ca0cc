"""The module of a parsed configuration without weights, and batches of its shapes."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import open_clip
import torch
from open_clip import SimpleTokenizer
from torch import Tensor, nn

from ..common.errors import UserError
from ..lightning_modules import ALBEFModule, CoCoRDModule, MMLGModule, MobileCLIPModule, SHReModule
from ..lightning_modules.base.frozen import Frozen
from ..lightning_modules.cocord import module as cocord_code
from ..lightning_modules.mmlg import teacher as mmlg_code
from ..lightning_modules.mobileclip.models import build_model
from ..lightning_modules.mobileclip.shapes import resolved
from ..lightning_modules.networks.clip_preprocessing import Preprocessing
from ..lightning_modules.networks.file_readers import PublishedCLIP
from ..lightning_modules.shre import teacher as shre_code
from ..lightning_modules.shre.teacher_encoder import build_class_token

METHODS = (ALBEFModule, CoCoRDModule, MMLGModule, MobileCLIPModule, SHReModule)
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


@contextmanager
def without_weights() -> Iterator[None]:
    """Let methods build their frozen networks without weights."""

    def record(frozen: Frozen[Any], name: str, source: str | None, *_: Any) -> None:
        frozen.origin = {"name": name, "weights": str(source), "sha256": ""}

    def class_token(frozen: Frozen[Any], name: str, source: str | None, width: int) -> None:
        frozen.network = build_class_token(name, width).requires_grad_(False)
        record(frozen, name, source)

    with ExitStack() as stack:
        stack.enter_context(patch.object(cocord_code, "load_frozen", record))
        stack.enter_context(patch.object(shre_code, "load_frozen", record))
        stack.enter_context(patch.object(shre_code, "load_class_token", class_token))
        stack.enter_context(patch.object(mmlg_code, "load_published", _published))
        stack.enter_context(patch.object(mmlg_code, "check_teacher", lambda *_: None))
        stack.enter_context(patch.object(Frozen, "fingerprint", lambda frozen: ""))
        yield


def _published(model: str | None, weights: str) -> PublishedCLIP:
    if model is None:
        raise UserError(
            f"Expected model.teacher.model, whose shape is needed, got none beside the weights {weights!r}: set it."
        )
    network: Any = open_clip.create_model(model) if model in open_clip.list_models() else build_model(resolved(model))
    network.logit_scale = nn.Parameter(torch.zeros(1, device="cpu"))
    images = Preprocessing(224, _HALF, _HALF, "bicubic")
    return PublishedCLIP(network.eval(), images, SimpleTokenizer(), model, weights, "")


def start(module: Any) -> list[str]:
    """Build what a fit builds, without weights, and return the names of what is left out.

    Raises:
        UserError: If the module is of another class than `METHODS`, or its sizes depend on the data.
    """
    if not isinstance(module, METHODS):
        names = ", ".join(method.__name__ for method in METHODS)
        raise UserError(f"Expected one of {names} to plan for, got {type(module).__name__}: choose one of them.")
    if isinstance(module, CoCoRDModule) and module.baselines is not None and module.baselines.crd is not None:
        raise UserError(
            f"Expected sizes that do not depend on the data, got the banks of model.kd.crd_weight "
            f"{module.kd.crd_weight}: set it to 0."
        )
    left_out: list[str] = []
    if isinstance(module, MobileCLIPModule) and module.online.given:
        left_out = [f"the teacher {teacher.model or teacher.weights}" for teacher in module.online.given]
        module.online.given = []
    pretend_run(module)
    with without_weights():
        module.setup("fit")
    module.configure_model()
    module.train()
    return left_out


def batch_of(module: Any, data: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    """Return a batch of a method's shapes.

    Args:
        module: the module.
        data: arguments of the datamodule; sizes that they do not give are the module's.
        rows: rows of the batch.
    """
    side = data.get("image_size") or module.expected_image_size() or (32 if data.get("preset") == "cifar" else 224)
    ids = torch.zeros(rows, dtype=torch.long)
    image = {name: torch.zeros(rows, 3, side, side) for name in getattr(module, "views", ["image"])}
    found = image | {"image_id": ids, "label": ids.clone(), "sample_index": ids.clone()}
    if isinstance(module, CoCoRDModule):
        return found
    length = data.get("max_tokens") or getattr(getattr(module, "text", None), "max_tokens", None) or module.max_tokens
    words = torch.zeros(rows, length, dtype=torch.long)
    found |= {"input_ids": words, "attention_mask": words.clone()}
    if isinstance(module, MobileCLIPModule):
        width = sum(module.teachers.dims)
        texts = ["real", "synthetic"] if module.captions == "both" else [module.captions]
        if "synthetic" in texts:
            found["synthetic_input_ids"] = words.clone()
        if module.teacher.distillation_weight > 0:
            found |= {name: torch.zeros(rows, width) for name in ("teacher_image", "teacher_text", "teacher_synthetic")}
    return found
