"""Checks of CoCoRD's settings and batches."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ...common.errors import UserError
from .settings import ContrastSettings, KDSettings, PredictionSettings


def loss_weights(
    class_weight: float, kd: KDSettings, contrast: ContrastSettings, prediction: PredictionSettings
) -> dict[str, float]:
    """Return the weights of the losses by name.

    Raises:
        UserError: If no loss trains the classifier's last layers.
    """
    weights = {"class": class_weight, "kd": kd.weight, "contrast": contrast.weight, "prediction": prediction.weight}
    options = {name: "class_weight" if name == "class" else f"{name}.weight" for name in weights}
    weights |= {"crd": kd.crd_weight, "attention": kd.attention_weight, "hint": kd.hint_weight}
    options |= {name: f"kd.{name}_weight" for name in ("crd", "attention", "hint")}
    if not any(weights.values()):
        raise UserError(f"Expected a loss, got 0 for {', '.join(options.values())}: raise class_weight.")
    if (kd.attention_weight or kd.hint_weight) and not (class_weight or kd.weight):
        raise UserError(
            "Expected a loss of the logits beside kd.attention_weight or kd.hint_weight, which train earlier layers, "
            "got class_weight 0 and kd.weight 0: raise class_weight."
        )
    return weights


def check_views(batch: Mapping[str, Tensor], views: Sequence[str]) -> None:
    """Check that a training batch holds all views and labels.

    Raises:
        UserError: If an entry is missing.
    """
    missing = [view for view in (*views, "label") if view not in batch]
    if missing:
        raise UserError(
            f"Expected {', '.join((*views, 'label'))} in the training batch, got no {', '.join(missing)}: set "
            f"data.views to {list(views)}, or leave it out."
        )
