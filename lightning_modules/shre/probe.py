"""Linear probe and fine-tuning of an image encoder for classification (SHRe's thesis, listing 1)."""

from __future__ import annotations

from collections.abc import Callable
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

from ...callbacks import ClassPredictionWriter, StepSeedCallback, missing_callbacks
from ...common.errors import UserError
from ...common.ranges import COUNT
from ..base.method import Method
from ..core.precision import at_least_float32
from ..core.settings import settings
from ..core.trainers import callbacks_of
from ..evaluation.classification import ClassificationEvaluation, check_classes
from ..networks.attention import set_vit_attention
from ..networks.vit import LinearProbe
from ..optim.adamw import adamw
from ..optim.configure import LRSchedulerCallable, OptimizerCallable
from ..optim.parameter_groups import layer_decay_groups
from ..optim.schedules import WarmupShareCosine
from .encoder import PRETRAINED, load_encoder, timm_encoder
from .network import image_encoder
from .settings import MixSettings, ProbeOptimSettings, ViTSettings

Batch = dict[str, Tensor]


class ImageProbeModule(Method):
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
        self.vision = vision = settings(ViTSettings, vision)
        self.mix = mix = settings(MixSettings, mix)
        self.optim = optim = settings(ProbeOptimSettings, optim)
        self.save_settings()
        self.num_classes, self.weights = num_classes, weights
        self.encoder_name, self.linear_probe = encoder, linear_probe
        if encoder is None and weights == PRETRAINED:
            raise UserError(
                f"Expected a checkpoint of SHRe in model.weights, got {PRETRAINED!r} without an encoder of timm: give "
                "one, or set model.encoder to the name of timm's model."
            )
        self.encoder = image_encoder(vision) if encoder is None else timm_encoder(encoder, vision.image_size)
        if linear_probe:
            self.encoder.requires_grad_(False)
        self.probe = LinearProbe(self.encoder.num_features, num_classes)
        self.evaluation = ClassificationEvaluation()
        kinds = ((v2.CutMix, mix.cutmix), (v2.MixUp, mix.mixup))
        self._mixers = [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in kinds if alpha]
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

    def train(self, mode: bool = True) -> ImageProbeModule:
        """Set the mode; the encoder of a linear probe stays in eval mode."""
        super().train(mode)
        if self.linear_probe:
            self.encoder.eval()
        return self

    def by_process(self) -> list[str]:
        """Return that images are mixed within the batch of a process, if they are."""
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
            trained = timm_encoder(self.encoder_name, self.vision.image_size, pretrained=True)
            self.encoder.load_state_dict(trained.state_dict())
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
        spared = self.encoder.no_weight_decay()
        named = self.encoder.named_parameters()
        return [f"encoder.{name}" for name, parameter in named if name in spared and parameter.requires_grad]

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """Return the layer of a parameter by its name: 0 the embeddings, then the blocks, last the head."""
        # timm assigns the norm behind the last block to that block.
        layers = group_parameters(self.encoder, self.encoder.group_matcher(coarse=coarse), reverse=True)
        numbers = {f"encoder.{name}": layer for name, layer in layers.items()}
        head = max(layers.values()) + 1
        return lambda name: numbers.get(name, head)

    def paper_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return AdamW."""
        return adamw(groups, self.optim.learning_rate, self.optim.weight_decay, self.optim.betas, self.optim.eps)

    def paper_schedule(self) -> WarmupShareCosine:
        """Return a warm-up from 0 and half a cosine to 0."""
        return WarmupShareCosine(self.optim.learning_rate, self.optim.warmup_share)
