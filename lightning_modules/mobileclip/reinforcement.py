"""Dataset reinforcement: captions and embeddings of large models, stored once for any number of trainings.

(Reinforcement: Faghri et al., ICCV 2023, arXiv 2303.08983; of pairs: MobileCLIP, arXiv 2311.17049, section 3.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from lightning.pytorch.callbacks import Callback
from PIL import Image
from torch import Tensor

from ...callbacks.modules import missing_callbacks
from ...callbacks.writers.reinforced import LeftOut, Reinforced
from ...callbacks.writers.reinforcement import ReinforcementWriter
from ...common.errors import UserError
from ...common.ranges import COUNT, NOT_NEGATIVE
from ..base.method import Method
from ..core.trainers import callbacks_of
from ..evaluation.protocol import Batch, Stage
from .captioner import Captioner, SeveralCaptioners
from .ensemble import Teacher, TeacherEnsemble, View

NO_SYNTHETIC = "no synthetic caption"
NOT_FINITE = "embedding not finite"


class ReinforcementModule(Method):
    """Caption images and embed pairs, for `predict` over a `ReinforcementDataModule`.

    Every teacher embeds the same augmentations, each in its own size and normalization. Its embeddings of images,
    captions and synthetic captions are scaled to unit length and stored one teacher after another.

    The forward passes run in the trainer's precision; "bf16-true" is the fastest, since attention has a fused kernel
    without casts. (The released data was computed in float32; storing it in bfloat16 makes no difference, paper.)

    Args:
        teachers: the teachers in the order of their embeddings.
        captioner: generates synthetic captions; of several in a list, the captions are stored one captioner after
            another, and all are recorded in the manifest. None takes those in the data.
        forward_batch: augmented images, or texts, in one forward pass of a teacher.
        checked_samples: number of written samples that are embedded again at the end.

    Raises:
        UserError: If there is no teacher, or an empty list of captioners.
    """

    trains = False

    def __init__(
        self,
        teachers: list[Teacher],
        captioner: Captioner | list[Captioner] | None = None,
        forward_batch: Annotated[int, COUNT] = 256,
        checked_samples: Annotated[int, NOT_NEGATIVE] = 16,
    ) -> None:
        super().__init__()
        if not teachers:
            raise UserError("Expected at least one teacher to embed the pairs, got none: name some as model.teachers.")
        if isinstance(captioner, list) and not captioner:
            raise UserError("Expected captioners in the list model.captioner, got none: name some, or set it to null.")
        self.captioner = SeveralCaptioners(captioner) if isinstance(captioner, list) else captioner
        self.checked_samples = checked_samples
        self.ensemble = TeacherEnsemble(teachers, forward_batch)
        self.evaluation = Reinforcement()

    def configure_callbacks(self) -> list[Callback]:
        """Add the writer, if it is missing."""
        return missing_callbacks(callbacks_of(self), ReinforcementWriter(self.checked_samples))

    def setup(self, stage: str) -> None:
        """Load the captioner and the teachers.

        Raises:
            UserError: If weights cannot be loaded, or there is not exactly one source of synthetic captions.
        """
        super().setup(stage)
        in_data = getattr(self.datamodule, "has_synthetic", False)
        if in_data == (self.captioner is not None):
            raise UserError(
                "Expected one source of synthetic captions, got a captioner beside those in the data: leave out "
                "model.captioner or data.synthetic_column."
                if in_data
                else "Expected a source of synthetic captions, got neither a captioner nor captions in the data: give "
                "model.captioner, or name a column as data.synthetic_column."
            )
        self.load()

    def load(self) -> None:
        """Load the captioner and the teachers on the first call."""
        if self.captioner is not None and not self.ensemble.loaded:
            self.captioner.load()
            self.captioner.requires_grad_(False).eval()
        self.ensemble.load()

    @property
    def views(self) -> list[View]:
        """Distinct image sizes and interpolations of augmented images that the teachers take."""
        return self.ensemble.views

    @property
    def caption_transform(self) -> Callable[[Image.Image], Tensor | list[Tensor]] | None:
        """Transform from an image to the captioner's input, or to the list of the inputs of several."""
        return None if self.captioner is None else self.captioner.transform

    @property
    def widths(self) -> list[int]:
        """Embedding dimension of each teacher."""
        return self.ensemble.widths

    @property
    def captions(self) -> int | None:
        """Number of synthetic captions of an image; None if they come with the data."""
        return None if self.captioner is None else self.captioner.captions

    def settings(self) -> dict[str, Any]:
        """Return the settings of teachers and captioner, as plain data for the manifest."""
        captioner = None if self.captioner is None else self.captioner.description()
        return {"teachers": self.ensemble.description(), "captioner": captioner}


class Reinforcement:
    """The prediction of a `ReinforcementModule`, as a component."""

    def start(self) -> None:
        """Do nothing: batches are independent."""

    def step(self, module: Any, batch: Batch, stage: Stage) -> None:
        """Refuse to evaluate.

        Raises:
            UserError: Always.
        """
        raise UserError("Expected vlightning predict with a ReinforcementModule, got another subcommand: use predict.")

    def predict(self, module: Any, batch: Batch) -> Any:
        """Caption and embed the pairs of a batch.

        Args:
            module: a `ReinforcementModule`, with captioner and teachers.
            batch: a batch of `ReinforcementCollate`.

        Returns:
            `Reinforced`: the samples by their rows, and the rows without one.
        """
        originals = batch["originals"]
        left_out = [LeftOut(row, *fault) for row, fault in originals.faults]
        if not originals.pairs:
            return Reinforced({}, left_out)
        synthetic = _synthetic_captions(module.captioner, batch)
        image = module.ensemble.embed_images(batch["views"])
        texts = [
            text
            for pair, captions in zip(originals.pairs, synthetic, strict=True)
            for text in (pair.caption, *captions)
        ]
        text = module.ensemble.embed_texts(texts, module.device).split([1 + len(captions) for captions in synthetic])
        records = {}
        faults = []
        for pair, captions, images, embeddings in zip(originals.pairs, synthetic, image, text, strict=True):
            if not captions:
                faults.append(LeftOut(pair.row, NO_SYNTHETIC, pair.name))
            elif not bool(images.isfinite().all() and embeddings.isfinite().all()):
                faults.append(LeftOut(pair.row, NOT_FINITE, pair.name))
            else:
                records[pair.row] = pair.reinforced(captions, images, embeddings[:1], embeddings[1:])
        account: Any = getattr(module.datamodule, "account", None)
        if account is not None:  # ends the run if too many samples are bad
            account("predict").update(0, [(fault.cause, fault.name) for fault in faults])
        return Reinforced(records, left_out + faults)

    def finish(self, module: Any, stage: Stage) -> None:
        """Do nothing: batches are independent."""


def _synthetic_captions(captioner: Captioner | SeveralCaptioners | None, batch: Batch) -> list[list[str]]:
    """Return the synthetic captions of the data, else those of the captioner that are not blank."""
    pairs = batch["originals"].pairs
    if all(pair.synthetic for pair in pairs):
        return [pair.synthetic for pair in pairs]
    assert captioner is not None  # setup has checked it
    captions = captioner(batch["caption_images"], batch["caption_seed"].tolist())
    return [[text for text in texts if text.strip()] for texts in captions]
