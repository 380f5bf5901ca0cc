"""Linear probe and fine-tuning of an image encoder for classification (SHRe's thesis, listing 1)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from timm.models import group_parameters
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.optim import Optimizer
from torchvision.transforms import v2

from ...callbacks import AtomicCheckpointIO, ClassPredictionWriter, StepSeedCallback, missing_callbacks
from ...common.errors import UserError
from ...common.ranges import COUNT
from ..base.method import Method
from ..core.fitting import load_fitting
from ..core.precision import at_least_float32
from ..core.trainers import callbacks_of
from ..evaluation.classification import ClassificationEvaluation, check_classes
from ..networks.attention import set_vit_attention
from ..optim.configure import LRSchedulerCallable, OptimizerCallable
from ..optim.optimizers import adamw, layer_decay_groups
from ..optim.schedules import WarmupCosine
from .network import image_encoder, timm_transformer
from .settings import MixSettings, ProbeOptimSettings, ViTSettings

Batch = dict[str, Tensor]
PRETRAINED = "pretrained"
"""Name of timm's own weights."""
_PREFIXES = ("encoder.", "student.image_encoder.")  # in checkpoints of `SHReImageClassifierModule` and of `SHReModule`
_NOT_IN_WEIGHTS = ("heads", "post_norm")  # settings on which no shape depends


class SHReImageClassifierModule(Method):
    """Train a classification head on an image encoder, alone or together with the encoder.

    In a linear probe the encoder has no gradient and is always in eval mode; in fine-tuning its lower layers have lower
    learning rates. Training batches are mixed by mixup or CutMix with torch's random numbers, which the
    `StepSeedCallback` seeds.

    Shapes: B images of S pixels a side, C classes.

    Args:
        num_classes: number of classes C. The command line sets it from the data.
        encoder: vision transformer of timm with one class token. Of `vision` it uses `image_size` only. None: SHRe's
            image encoder, built from `vision`.
        weights: checkpoint, file or folder, of `SHReModule` or of this class, whose encoder is the initial one;
            "pretrained": timm's weights, for an encoder of timm. None: random. The head is always random.
        linear_probe: train the head only.
        vision: the encoder.
        mix: mixup, CutMix and label smoothing.
        optim: AdamW and its schedule.
        optimizer: replaces AdamW.
        lr_scheduler: replaces the schedule.

    Raises:
        UserError: For an encoder that does not exist, or without exactly one class token; for sizes that do not fit
            together; for a setting outside its range; for timm's weights without timm's encoder.
    """

    vision: ViTSettings
    mix: MixSettings
    optim: ProbeOptimSettings

    def __init__(
        self,
        num_classes: Annotated[int, COUNT] = 1000,
        encoder: str | None = None,
        weights: str | None = None,
        linear_probe: bool = True,
        vision: ViTSettings = ViTSettings(),
        mix: MixSettings = MixSettings(),
        optim: ProbeOptimSettings = ProbeOptimSettings(),
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.take_arguments(locals())
        self.num_classes = num_classes
        self.weights = weights
        self.encoder_name = encoder
        self.linear_probe = linear_probe
        if encoder is None and weights == PRETRAINED:
            raise UserError(
                f"Expected a checkpoint of SHRe in model.weights, got {PRETRAINED!r} without an encoder of timm: give "
                "one, or set model.encoder to the name of timm's model."
            )
        size = self.vision.image_size
        self.encoder = image_encoder(self.vision) if encoder is None else timm_encoder(encoder, size)
        if linear_probe:
            self.encoder.requires_grad_(False)
        self.probe = ClassificationHead(self.encoder.num_features, num_classes)
        self.evaluation = ClassificationEvaluation()
        transforms = ((v2.CutMix, self.mix.cutmix), (v2.MixUp, self.mix.mixup))
        self._mixers = [transform(alpha=alpha, num_classes=num_classes) for transform, alpha in transforms if alpha]
        self.train()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the cross entropy of mixed images with smoothed labels."""
        image, target = self.mix_batch(batch["image"], batch["label"])
        logits = at_least_float32(self(image))
        target = target.to(logits.dtype) if target.is_floating_point() else target
        loss = F.cross_entropy(logits, target, label_smoothing=self.mix.label_smoothing)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def mix_batch(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Mix each image of a batch with the one before it, with probability `mix.probability`.

        Args:
            image: images [B, 3, S, S].
            label: classes, long [B].

        Returns:
            Mixed images and shares of the classes [B, C]; or the arguments.
        """
        mixed, cut = torch.rand(2).tolist()
        if not self._mixers or mixed >= self.mix.probability:
            return image, label
        return self._mixers[0 if cut < self.mix.switch_probability else -1](image, label)

    def forward(self, image: Tensor) -> Tensor:
        """Map images [B, 3, S, S] to logits [B, C]."""
        if isinstance(self.encoder, VisionTransformer):
            set_vit_attention(self.encoder, image)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.linear_probe):
            tokens = self.encoder(image)
        logits: Tensor = self.probe(tokens)
        return logits

    def train(self, mode: bool = True) -> SHReImageClassifierModule:
        """Set the mode; the encoder of a linear probe stays in eval mode."""
        super().train(mode)
        if self.linear_probe:
            self.encoder.eval()
        return self

    def by_process(self) -> list[str]:
        """Return a clause on the mixing of images, if they are mixed."""
        return ["images are mixed within the batch of each process"] if self._mixers else []

    def configure_callbacks(self) -> list[Callback]:
        """Return the callbacks that the method needs and the user did not give."""
        return missing_callbacks(callbacks_of(self), StepSeedCallback(), ClassPredictionWriter())

    def sharded_networks(self) -> list[nn.Module]:
        """Return the encoder."""
        return [self.encoder]

    def evaluates_initial_weights(self) -> bool:
        """Return False: the head is random."""
        return False

    def load_initial_weights(self) -> None:
        """Load the encoder's weights, and log their source."""
        if self.weights is None:
            rank_zero_info("The image encoder starts at random.")
        elif self.weights == PRETRAINED and self.encoder_name is not None:
            pretrained = timm_encoder(self.encoder_name, self.vision.image_size, pretrained=True)
            self.encoder.load_state_dict(pretrained.state_dict())
            rank_zero_info(f"The image encoder starts from timm's weights of {self.encoder_name!r}.")
        else:
            load_encoder(self.encoder, self.weights, self.vision if self.encoder_name is None else None)
            rank_zero_info(f"The image encoder starts from {self.weights!r}.")

    def on_fit_start(self) -> None:
        """Load initial weights, and check the number of classes."""
        super().on_fit_start()
        check_classes(self, self.num_classes)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the head, and in fine-tuning the encoder with a learning rate that decays from layer to layer."""
        if self.linear_probe:
            return super().parameter_groups()
        return layer_decay_groups(self, self.optim.layer_decay, self.no_weight_decay())

    def no_weight_decay(self) -> list[str]:
        """Return the names of the class token and of positions, if they train."""
        names = self.encoder.no_weight_decay()
        parameters = self.encoder.named_parameters()
        return [f"encoder.{name}" for name, parameter in parameters if name in names and parameter.requires_grad]

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """Return the layer of a parameter by its name: 0 the embeddings, then the blocks, last the head."""
        # timm assigns the norm behind the last block to that block.
        layers = group_parameters(self.encoder, self.encoder.group_matcher(coarse=coarse), reverse=True)
        layer_of = {f"encoder.{name}": layer for name, layer in layers.items()}
        head = max(layers.values()) + 1
        return lambda name: layer_of.get(name, head)

    def paper_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return AdamW."""
        return adamw(groups, self.optim.learning_rate, self.optim.weight_decay, self.optim.betas, self.optim.eps)

    def paper_schedule(self) -> WarmupCosine:
        """Return a warm-up from 0 and half a cosine to 0."""
        return WarmupCosine(self.optim.learning_rate, warmup_start=0.0, warmup_share=self.optim.warmup_share)


class ClassificationHead(nn.Module):
    """Average all tokens but the first, normalize, and classify with a linear layer (SHRe's thesis, listing 1).

    Args:
        width: width D of a token.
        num_classes: number of classes C.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.linear = nn.Linear(width, num_classes)
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        nn.init.zeros_(self.linear.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [B, T, D], the class token first, to logits [B, C].

        Raises:
            UserError: If there is no token beside the class token.
        """
        if tokens.dim() != 3 or tokens.shape[1] < 2:
            raise UserError(
                f"Expected tokens [B, T, D] of a class token and at least one patch, got {list(tokens.shape)}: use an "
                "image encoder that does not pool its tokens."
            )
        logits: Tensor = self.linear(self.norm(tokens[:, 1:].mean(1)))
        return logits


def timm_encoder(name: str, image_size: int, pretrained: bool = False) -> Any:
    """Build a vision transformer of timm that outputs its tokens.

    Args:
        name: name of timm's model.
        image_size: image size in pixels.
        pretrained: download timm's weights; positions are resampled for the image size.

    Raises:
        UserError: If there is no such model, or it does not have exactly one token before the patches.
    """
    return timm_transformer(name, "model.encoder", pretrained=pretrained, global_pool="", img_size=image_size)


def load_encoder(encoder: nn.Module, source: str, vision: ViTSettings | None = None) -> None:
    """Load an image encoder from a checkpoint.

    Args:
        encoder: encoder to fill.
        source: checkpoint, file or folder, of `SHReModule` or of `SHReImageClassifierModule`.
        vision: settings of the encoder, to compare those on which no shape depends; None for an encoder of timm.

    Raises:
        UserError: If there is no such checkpoint, or it has no such encoder, or one with other settings. Nothing is
            loaded then.
        RuntimeError: If the checkpoint cannot be read.
    """
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(f"Expected a checkpoint in {source!r}, got no file: correct model.weights.")
    content = AtomicCheckpointIO().load_checkpoint(path)
    saved = content.get("hyper_parameters", {}).get("vision", {})
    for name in _NOT_IN_WEIGHTS if vision is not None else ():
        value = getattr(vision, name)
        if saved.get(name, value) != value:
            raise UserError(
                f"Expected an image encoder with {name} {value} in {source!r}, got {saved[name]}: set "
                f"model.vision.{name} to that."
            )
    tensors = content.get("state_dict", {}).items()
    for prefix in _PREFIXES:
        state = {name.removeprefix(prefix): tensor for name, tensor in tensors if name.startswith(prefix)}
        if state:
            load_fitting(encoder, state, f"the image encoder from {source!r}")
            return
    raise UserError(
        f"Expected a checkpoint of SHReModule or SHReImageClassifierModule in {source!r}, got one without an image "
        "encoder: correct model.weights."
    )
