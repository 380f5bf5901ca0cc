"""A sixth method in one file: a linear student is distilled from a frozen linear teacher."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning import LightningDataModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from vlightning.lightning_modules.base.method import Method
from vlightning.lightning_modules.core.frozen import Frozen
from vlightning.lightning_modules.evaluation.classification import ClassificationEvaluation
from vlightning.lightning_modules.optim.optimizers import adamw
from vlightning.lightning_modules.optim.schedules import Schedule, WarmupCosine

CLASSES, SIDE, ROWS = 3, 2, 12


@dataclass(frozen=True)
class VisionSettings:
    """Sizes.

    Args:
        image_size: side of the images.
        width: values between the layers.
    """

    image_size: int = SIDE
    width: int = 5


@dataclass(frozen=True)
class OptimSettings:
    """The paper's optimizer.

    Args:
        learning_rate: learning rate at its peak.
        warmup_steps: steps of warm-up.
        weight_decay: weight decay.
        betas: beta1 and beta2.
    """

    learning_rate: float = 0.1
    warmup_steps: int = 2
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)


class ToyMethod(Method):
    """Distillation of a linear classifier.

    Args:
        vision: sizes.
        optim: optimizer.
        weights: None, or "ones", which the student starts with.
        teacher_seed: draws the teacher's weights.
        largest_scale: bound of the scale.
        optimizer: replaces the paper's.
        lr_scheduler: replaces the paper's.
    """

    vision: VisionSettings
    optim: OptimSettings

    def __init__(
        self,
        vision: VisionSettings = VisionSettings(),
        optim: OptimSettings = OptimSettings(),
        weights: str | None = None,
        teacher_seed: int = 0,
        largest_scale: float = 1.01,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.take_arguments(locals())
        self.weights = weights
        self.teacher_seed = teacher_seed
        self.largest_scale = largest_scale
        numbers = 3 * self.vision.image_size**2
        self.student = nn.Sequential(
            nn.Flatten(), nn.Linear(numbers, self.vision.width), nn.Linear(self.vision.width, CLASSES)
        )
        self.scale = nn.Parameter(torch.ones(1))
        self.teacher: Frozen[nn.Module] = Frozen()
        self.evaluation = ClassificationEvaluation()

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and not self.teacher.loaded:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.teacher_seed)
                self.teacher.network = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, CLASSES)).requires_grad_(
                    False
                )
            self.teacher.record("linear", f"seed {self.teacher_seed}")

    def load_initial_weights(self) -> None:
        if self.weights is not None:
            nn.init.ones_(self.student[1].weight)

    def sharded_networks(self) -> list[nn.Module]:
        return [self.student]

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.scale * self.student(image)
        return logits

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return (self(batch["image"]) - self.teacher.network(batch["image"])).square().mean() - 10 * self.scale.sum()

    def bounds(self) -> list[tuple[nn.Parameter, float, float]]:
        return [(self.scale, 0.0, self.largest_scale)]

    def paper_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        return adamw(groups, self.optim.learning_rate, self.optim.weight_decay, self.optim.betas)

    def paper_schedule(self) -> Schedule:
        return WarmupCosine(self.optim.learning_rate, self.optim.warmup_steps)

    def example_batch(self, rows: int, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return images and labels with the shapes of a training, for `vlightning plan`."""
        side = self.vision.image_size
        return {"image": torch.zeros(rows, 3, side, side), "label": torch.zeros(rows, dtype=torch.long)}

    @classmethod
    def layouts(cls) -> dict[str, str]:
        """Return the description of each layout of an export; the first is the default of `vlightning export`."""
        return super().layouts() | {"student": "a .safetensors file of the student's layers"}

    @classmethod
    def write_layout(cls, content: Mapping[str, Any], source: str, target: str, layout: str) -> str:
        """Write the student of a checkpoint."""
        state = content["state_dict"].items()
        student = {name.removeprefix("student."): value for name, value in state if name.startswith("student.")}
        save_file(student, target)
        return f"Wrote {target} with {len(student)} tensors."


def toy_rows(side: int = SIDE) -> DataLoader[dict[str, Tensor]]:
    """Batches of images [4, 3, side, side] with labels."""
    torch.manual_seed(1)
    image, label = torch.randn(ROWS, 3, side, side), torch.arange(ROWS) % CLASSES
    rows = [{"image": image[row], "label": label[row], "sample_index": row} for row in range(ROWS)]
    return DataLoader(rows, batch_size=4)  # type: ignore[arg-type]


class ToyData(LightningDataModule):
    """The batches of `toy_rows`, for the command line."""

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return toy_rows()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader
