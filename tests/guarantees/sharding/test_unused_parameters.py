"""Every trainable parameter has a gradient in every step with any loss disabled, as DDP requires."""

from pathlib import Path

import pytest
import torch
from lightning import Callback

from support.methods.captioning import caption_data, caption_module, write_data
from support.methods.classifier import tiny_classifier
from support.methods.probe import shape_classes, tiny_probe
from support.methods.random_batches import rows_loader, small
from support.methods.tiny_modules import trainer
from support.runs.distributed import rank_trainer, run_distributed

SWITCHES = [
    ("albef", {"mlm": False}),
    ("albef", {"momentum": {"alpha": 0.0}}),
    ("albef", {"contrast": {"positives": "diagonal"}}),
    ("albef", {"contrast": {"key_columns": "local"}}),
    (
        "albef",
        {
            "momentum": {"teacher_dropout": True},
            "contrast": {"queue_start": "random"},
            "optim": {"decay_temperature": True},
        },
    ),
    ("albef", {"memory": {"micro_batch_size": 2, "activation_checkpointing": True}, "mlm": False}),
    ("cocord", {"class_weight": 0.0}),
    ("cocord", {"contrast": {"weight": 0.0}, "class_weight": 0.0}),
    ("cocord", {"prediction": {"weight": 0.0}, "class_weight": 0.0}),
    (
        "cocord",
        {"contrast": {"weight": 0.0}, "prediction": {"weight": 0.0}, "class_weight": 0.0, "kd": {"weight": 1.0}},
    ),
    ("cocord", {"contrast": {"weight": 0.0}, "prediction": {"weight": 0.0}}),
    ("cocord", {"prediction": {"weight": 0.0}}),
    ("cocord", {"contrast": {"weight": 0.0}}),
    ("cocord", {"kd": {"attention_weight": 1.0, "hint_weight": 1.0}}),
    ("cocord", {"prediction": {"symmetric": False, "encoder": "teacher"}, "class_weight": 0.0}),
    ("cocord", {"contrast": {"encoder": "slow_student"}, "class_weight": 0.0}),
    ("mmlg", {"distillation_weight": 0.0}),
    ("mmlg", {"student": "TLEG"}),
    ("mmlg", {"student": "plain"}),
    ("mobileclip", {"captions": "real"}),
    ("mobileclip", {"captions": "synthetic"}),
    ("mobileclip", {"distillation_weight": 0.0}),
    ("mobileclip", {"vision": {"range_augment": [40.0, 20.0]}}),
    ("mobileclip", {"distillation_weight": 1.0, "momentum": {"momentum": None}}),
    ("shre", {"kl": {"weight": 0.0}}),
    ("shre", {"kl": {"weight": 0.0}, "contrast": {"layers": ["h2"]}}),
    ("shre", {"kl": {"weight": 0.0}, "contrast": {"layers": ["h1"]}}),
    ("shre", {"kl": {"weight": 0.0}, "contrast": {"layers": ["h3"]}}),
    (
        "shre",
        {
            "kl": {"weight": 0.0},
            "contrast": {"layers": ["h1"]},
            "shared": "mlp_in_order",
            "evaluation": {"features": "h1"},
        },
    ),
    ("shre", {"kl": {"weight": 0.0}, "shared": "transformer"}),
    ("shre", {"contrast": {"weight": 0.0}, "shared": "transformer"}),
    ("shre", {"contrast": {"weight": 0.0}}),
    ("shre", {"shared": "s_smke"}),
    ("shre", {"kl": {"weight": 0.0}, "shared": "s_smke", "contrast": {"layers": ["h2"]}}),
    ("shre", {"kl": {"weight": 0.0}, "shared": "s_smke", "contrast": {"layers": ["h1"]}}),
    ("shre", {"kl": {"image_share": 0.0}}),
    ("shre", {"kl": {"image_share": 1.0}}),
]
OFF = [("shre", {"kl": {"weight": 0.0}}), ("cocord", {"class_weight": 0.0})]


class Reached(Callback):
    """Records the trainable parameters without a gradient after a backward pass."""

    def __init__(self):
        self.missed = None

    def on_after_backward(self, trainer, pl_module):
        self.missed = [name for name, p in pl_module.named_parameters() if p.requires_grad and p.grad is None]


def missed(module, data, folder):
    reached = Reached()
    trainer(reached, max_steps=1, limit_val_batches=0, default_root_dir=folder).fit(module, data)
    return reached.missed


@pytest.mark.parametrize(("method", "changes"), SWITCHES, ids=str)
def test_every_trainable_parameter_is_reached(method, changes, tmp_path):
    module = small(method, tmp_path, **changes)
    assert missed(module, rows_loader(method, 4, 4), tmp_path) == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"linear_probe": False},
        {"linear_probe": False, "vision": {"post_norm": False}},
        {"encoder": "test_vit", "linear_probe": False},
    ],
    ids=str,
)
def test_every_trainable_parameter_of_a_probe_is_reached(options, tmp_path):
    assert missed(tiny_probe(**options), shape_classes(num_workers=0), tmp_path) == []


def test_every_trainable_parameter_of_classifier_and_captioner_is_reached(tmp_path):
    assert missed(tiny_classifier(0), shape_classes(num_workers=0), tmp_path) == []
    arguments = write_data(tmp_path / "captions")
    assert missed(caption_module(arguments), caption_data(arguments, num_workers=0), tmp_path) == []


def _fit(folder):
    steps = []
    for method, changes in OFF:
        own = Path(folder, f"{torch.distributed.get_rank()}")  # where no other process writes a teacher
        own.mkdir(exist_ok=True)
        module = small(method, own, **changes)
        fitted = rank_trainer("ddp", {}, max_steps=3, max_epochs=-1, limit_val_batches=0, default_root_dir=folder)
        fitted.fit(module, rows_loader(method, 16, 4))
        steps.append(fitted.global_step)
    return steps


def test_disabled_losses_train_under_ddp(tmp_path):
    assert run_distributed(_fit, str(tmp_path)) == [[3] * len(OFF)] * 2
