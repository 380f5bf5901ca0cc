"""Dataset reinforcement: what large models say of each pair, stored once and read by any number of trainings.

(Reinforcement: Faghri et al., ICCV 2023, arXiv 2303.08983; of pairs: MobileCLIP, arXiv 2311.17049, section 3.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from open_clip.transformer import QuickGELU
from PIL import Image
from torch import Tensor, nn

from ...callbacks import LeftOut, Reinforced, ReinforcementWriter, missing_callbacks
from ..base.checkpoints import CheckpointModule
from ..base.frozen import FrozenTeacher
from ..networks.precision import unit
from ..networks.published_clip import PublishedCLIP, load_published
from .captioner import Captioner

_LOOK = ("image_size", "interpolation", "mean", "std", "resize_mode")
NO_SYNTHETIC, NOT_FINITE = "no synthetic caption", "embedding not finite"


@dataclass
class Teacher:
    """A model whose embeddings are stored.

    Attributes:
        weights: a tag of open_clip's; a folder that open_clip loads; or a file, also a checkpoint of a training here.
        model: its name, one of open_clip's or MobileCLIP's; not used where `weights` is a folder, which tells it.
        scale: what its cosines are multiplied by when a student learns from them, as a note for that training; by
            default what it was trained with.
    """

    weights: str
    model: str | None = None
    scale: float | None = None


class ReinforcementModule(CheckpointModule):
    """Captions images and embeds pairs; for `predict`, over a :class:`ReinforcementDataModule`.

    Every teacher sees the same augmentations, each in its own size and normalisation. Its embeddings of images,
    captions and synthetic captions are scaled to unit length and stored one teacher after another.

    The forward passes run in the trainer's precision; "bf16-true" is the fastest, since attention has a fused path
    where nothing is cast on the way. (The released data was made in float32; that it is stored in bfloat16 makes no
    difference, paper.)

    Args:
        teachers: the teachers in the order of their embeddings.
        captioner: makes synthetic captions; None takes those that the data brings.
        forward_batch: augmented images, or texts, in one pass through a teacher.
        checked_samples: how many of the written samples are embedded again at the end.

    Raises:
        ValueError: if there is no teacher.
    """

    def __init__(
        self,
        teachers: list[Teacher],
        captioner: Captioner | None = None,
        forward_batch: int = 256,
        checked_samples: int = 16,
    ) -> None:
        super().__init__()
        if not teachers:
            raise ValueError("There is no teacher to embed the pairs: name some as model.teachers.")
        if forward_batch < 1:
            raise ValueError(f"forward_batch is {forward_batch}: give a number of at least 1.")
        self.teachers = teachers
        self.captioner = captioner
        self.forward_batch = forward_batch
        self.checked_samples = checked_samples
        self.loaded: list[PublishedCLIP] = []
        self.scales: list[float] = []
        self.networks = nn.ModuleList()

    def configure_callbacks(self) -> list[Callback]:
        """Supply the writer, unless the user's own is there."""
        return missing_callbacks(self.trainer.callbacks, ReinforcementWriter(self.checked_samples))  # type: ignore[attr-defined]

    def setup(self, stage: str) -> None:
        """Load the captioner and the teachers.

        Raises:
            FileNotFoundError: if weights are missing.
            ValueError: if they are of other models, or there are no synthetic captions and nothing that makes them.
            RuntimeError: if they cannot be read or downloaded.
        """
        brings = getattr(getattr(self.trainer, "datamodule", None), "has_synthetic", False)
        if brings == (self.captioner is not None):
            raise ValueError(
                "Found synthetic captions in the data and a captioner too: leave out model.captioner or "
                "data.synthetic_column."
                if brings
                else "Found neither a captioner nor synthetic captions in the data: give model.captioner, or name a "
                "column as data.synthetic_column."
            )
        self.load()

    def load(self) -> None:
        """Load the captioner and the teachers, unless that is done."""
        if self.loaded:
            return
        if self.captioner is not None:
            self.captioner.load()
            self.captioner.requires_grad_(False).eval()
        self.loaded = [load_published(teacher.model, teacher.weights) for teacher in self.teachers]
        # Now, in float32: the trainer may turn all weights into half precision.
        self.scales = [
            float(outside.network.logit_scale.exp()) if teacher.scale is None else teacher.scale
            for teacher, outside in zip(self.teachers, self.loaded, strict=True)
        ]
        self.networks.extend(FrozenTeacher(outside.network) for outside in self.loaded)

    @property
    def views(self) -> list[tuple[int, str]]:
        """Sizes and interpolations that the teachers want augmented images in, each once."""
        return list(dict.fromkeys(_view(outside) for outside in self.loaded))

    @property
    def whole(self) -> Callable[[Image.Image], Tensor] | None:
        """What makes the captioner's input of an image."""
        return None if self.captioner is None else self.captioner.transform

    @property
    def widths(self) -> list[int]:
        """Of each teacher's embeddings."""
        return [_width(outside) for outside in self.loaded]

    @property
    def captions(self) -> int | None:
        """Synthetic captions of an image; None where the data brings them."""
        return None if self.captioner is None else self.captioner.captions

    def settings(self) -> dict[str, Any]:
        """What decides the embeddings and captions, plain data for the manifest."""
        return {
            "teachers": [
                {
                    "model": outside.model,
                    "weights": outside.weights,
                    "sha256": outside.sha256,
                    "quick_gelu": any(isinstance(part, QuickGELU) for part in outside.network.modules()),
                    "width": width,
                    "scale": scale,
                    "temperature": 1 / scale,
                    **{name: getattr(outside.preprocessing, name) for name in _LOOK},
                }
                for outside, width, scale in zip(self.loaded, self.widths, self.scales, strict=True)
            ],
            "captioner": None if self.captioner is None else self.captioner.description(),
        }

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Reinforced:
        """Caption and embed the pairs of a batch.

        Args:
            batch: as :class:`ReinforcementCollate` makes it.
            batch_idx: not used.

        Returns:
            The samples to write by their rows, and the rows of which there is nothing to write.
        """
        originals = batch["originals"]
        left_out = [LeftOut(row, *fault) for row, fault in originals.faults]
        if not originals.pairs:
            return Reinforced({}, left_out)
        synthetic = self._captions(batch)
        image = self._image_embeddings(batch["views"])
        texts = [text for pair, made in zip(originals.pairs, synthetic, strict=True) for text in (pair.caption, *made)]
        text = self._text_embeddings(texts).split([1 + len(made) for made in synthetic])
        records, faults = {}, []
        for pair, made, images, captions in zip(originals.pairs, synthetic, image, text, strict=True):
            if not made:
                faults.append(LeftOut(pair.row, NO_SYNTHETIC, pair.name))
            elif not bool(images.isfinite().all() and captions.isfinite().all()):
                faults.append(LeftOut(pair.row, NOT_FINITE, pair.name))
            else:
                records[pair.row] = pair.reinforced(made, images, captions[:1], captions[1:])
        self._account(faults)
        return Reinforced(records, left_out + faults)

    def _account(self, faults: list[LeftOut]) -> None:
        """Count what the loader could not see among its unusable samples: too many of them end the run."""
        data: Any = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "account"):
            data.account("predict").update(0, [(fault.cause, fault.name) for fault in faults])

    def _captions(self, batch: dict[str, Any]) -> list[list[str]]:
        """The data's own synthetic captions, else the captioner's, less those without content."""
        pairs = batch["originals"].pairs
        if all(pair.synthetic for pair in pairs):
            return [pair.synthetic for pair in pairs]
        assert self.captioner is not None  # setup has checked it
        made = self.captioner(batch["whole"], batch["caption_seed"].tolist())
        return [[text for text in texts if text.strip()] for texts in made]

    def _image_embeddings(self, views: list[Tensor]) -> Tensor:
        """Embeddings [N, A, D] in float32 on the CPU, of 8-bit images [N, A, S, S, 3] for each of `views`."""
        parts = []
        for outside in self.loaded:
            images = views[self.views.index(_view(outside))]
            flat = images.flatten(0, 1)
            features = [outside.network.encode_image(_normalised(part, outside)) for part in self._parts(flat)]
            parts.append(unit(torch.cat(features)).float().unflatten(0, images.shape[:2]))
        return torch.cat(parts, -1).cpu()

    def _text_embeddings(self, texts: list[str]) -> Tensor:
        """Embeddings [T, D] in float32 on the CPU."""
        parts = []
        for outside in self.loaded:
            ids = outside.tokenizer(texts).to(self.device)
            parts.append(unit(torch.cat([outside.network.encode_text(part) for part in self._parts(ids)])).float())
        return torch.cat(parts, -1).cpu()

    def _parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(self.forward_batch)


def _view(outside: PublishedCLIP) -> tuple[int, str]:
    return outside.preprocessing.image_size, outside.preprocessing.interpolation


def _normalised(images: Tensor, outside: PublishedCLIP) -> Tensor:
    """8-bit images [B, S, S, 3] as a teacher wants them, [B, 3, S, S] in the precision of its weights."""
    look = outside.preprocessing
    mean, std = (images.new_tensor(part, dtype=torch.float32) for part in (look.mean, look.std))
    seen = ((images.float() / 255 - mean) / std).permute(0, 3, 1, 2)
    return seen.to(next(outside.network.parameters()).dtype)


def _width(outside: PublishedCLIP) -> int:
    """Of a model's features, told from what it says of a word."""
    device = next(outside.network.parameters()).device
    with torch.no_grad():
        features: Tensor = outside.network.encode_text(outside.tokenizer(["a"]).to(device))
    return features.shape[-1]
