"""Classification by a module's class logits."""

from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor
from typing_extensions import override

from ...common.errors import UserError
from ..modules import features_of
from .image_classification import ImageClassification


class OwnClassification(ImageClassification):
    """Classify the labeled images of another datamodule by the module's own class logits, and log accuracies.

    Measurement, metrics and data are as in `ZeroShotClassification`: after validation, in percent, "val/<name>_top1",
    "val/<name>_top5" where there are more than five classes, and "val/<name>_class_recall"; after test the same with
    "test/". No texts are used.

    The module has `classify_images(image)`, which returns logits [B, C]; the number of a logit is the label that it
    stands for. It runs without gradient, in eval mode and in the trainer's precision.

    This is not zero-shot classification. A module without labels has its class logits from a teacher, and if that
    teacher was trained on the labels of `data` (an ImageNet classifier's student on ImageNet), the metrics measure how
    well the student follows the teacher. Hence the default name.

    Several of these need a `name` each. A `ModelCheckpoint` that monitors one takes the same `every_n_epochs`.

    Args:
        data: Datamodule whose batches are dicts with `image` [B, 3, H, W] and `label`, long [B]. Validation reads its
            validation split and test its test split, or the only one it has. This callback sets it up; it is not part
            of the Trainer. If it has `class_names`, there are as many as logits.
        name: Name of the metrics.
        every_n_epochs: Epochs of training between two measurements in validation.
        transform: "trainer" prepares the images by `eval_transform` of the trainer's datamodule, if it has one, since
            a model must see images as those that it was trained on; "own" leaves that to `data`.

    Raises:
        UserError: If an argument is invalid, labels or classes are not those of the logits, the data has no images,
            or the module has no class logits.
    """

    module_needs = ("classify_images",)
    module_does = "classifies images by class logits"

    def __init__(
        self,
        data: LightningDataModule,
        name: str = "supervised_teacher",
        every_n_epochs: int = 1,
        transform: Literal["trainer", "own"] = "trainer",
    ) -> None:
        super().__init__(data, name, every_n_epochs, transform)

    @override
    def scorer(self, trainer: Trainer, pl_module: Any) -> Callable[[Tensor], Tensor]:
        return lambda image: features_of(trainer, pl_module.classify_images, image)

    @override
    def advice_on_labels(self, classes: int) -> str:
        return f"give data that is labeled with the {classes} classes that the module has logits of."

    @override
    def count(self, trainer: Trainer, scores: Callable[[Tensor], Tensor]) -> Tensor:
        counts = super().count(trainer, scores)
        data: Any = self.data
        # Data without class names only knows the labels that occur, which need not be all classes.
        if names := getattr(data, "class_names", None):
            data_classes = getattr(data, "num_classes", len(names))
            if data_classes != counts.shape[1]:
                raise UserError(
                    f"Expected {counts.shape[1]} classes, one for each logit of the module, in the data of {self}, got "
                    f"{data_classes} from {type(data).__name__}: give data that is labeled with the module's classes."
                )
        return counts
