"""Linear probe and fine-tuning of an image encoder for classification, by the recipe of SHRe's thesis."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from timm.models import group_parameters
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.transforms import v2

from ...callbacks import AtomicCheckpointIO, ClassPredictionWriter, StepSeedCallback, missing_callbacks
from ..base.fitting import load_fitting
from ..base.initial_weights import InitialWeights
from ..base.sharding import shard
from ..evaluation.classification import Accuracy, Batch, ClassifierModule
from ..networks.attention import set_vit_attention
from ..networks.linear_probe import LinearProbe
from ..networks.precision import at_least_float32
from ..optim.adamw import WarmupShareModule
from ..optim.groups import layer_decay_groups
from .network import image_encoder

_ENCODERS = ("encoder.", "student.image_encoder.")  # in a checkpoint of this class, and of SHRe's training
_PRETRAINED = "pretrained"
_UNSEEN = ("heads", "post_norm")  # arguments of which the weights say nothing


class ImageProbeModule(WarmupShareModule, InitialWeights, ClassifierModule):
    """An image encoder with a `LinearProbe`, which trains alone, or together with the encoder.

    In a linear probe the encoder has no gradient, is in eval mode always, and stays bit for bit what it was; in
    fine-tuning its lower layers learn more slowly. Nothing of SHRe but its image encoder takes part.

    A training batch is mixed by mixup or CutMix, whose draws are torch's and so those of the `StepSeedCallback`.

    Shapes: B images of S pixels a side, C classes, L blocks, width D.

    Args:
        num_classes: number of classes C. The command line sets it from the data's, where that is given.
        encoder: name of a vision transformer of timm's with one class token, as it is there but for the size of its
            images; None: SHRe's image encoder, by the sizes that follow.
        image_size: side S of the square images, pixels (thesis). The command line sets it from the data's.
        patch_size: side of a patch, pixels (thesis). This and the next four are of SHRe's encoder only.
        width: values of a token, D (thesis).
        layers: number of blocks L (thesis).
        heads: number of attention heads (thesis).
        post_norm: normalise after attention and MLP, as Data2Vec2 does (thesis), and not before them.
        weights: a checkpoint, file or folder, to take the encoder from: of a training of SHRe's, or of this class;
            "pretrained": timm's own, for an encoder of timm's; None: random. The head is new in any case.
        linear_probe: train the head alone.
        learning_rate: learning rate of the head at its peak (thesis).
        warmup_share: share of the run's optimizer steps in which the learning rate rises from 0 (thesis).
        weight_decay: weight decay of AdamW (thesis); vectors, the class token and positions are spared.
        betas: beta1 and beta2 of AdamW (thesis).
        eps: epsilon of AdamW (thesis).
        layer_decay: factor of the learning rate from each block to the one below it, in fine-tuning; the embeddings
            have the head's rate times its power L + 1 (thesis: 0.81 on ImageNet, 0.75 on CIFAR). 1 is none.
        mixup: alpha of mixup (thesis), 0 for none.
        cutmix: alpha of CutMix (thesis), 0 for none.
        mix_probability: probability with which a batch is mixed (thesis).
        switch_probability: probability with which a mixed batch is mixed by CutMix, where there are both (thesis).
        label_smoothing: share of a label that all classes have alike (thesis).

    Raises:
        ValueError: for an encoder that does not exist, that has no class token or several, or whose sizes do not fit
            together; for a share or probability outside 0 to 1; for timm's weights without timm's encoder.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        encoder: str | None = None,
        image_size: int = 224,
        patch_size: int = 16,
        width: int = 768,
        layers: int = 6,
        heads: int = 12,
        post_norm: bool = True,
        weights: str | None = None,
        linear_probe: bool = True,
        learning_rate: float = 1e-3,
        warmup_share: float = 0.1,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        layer_decay: float = 0.81,
        mixup: float = 0.8,
        cutmix: float = 1.0,
        mix_probability: float = 0.9,
        switch_probability: float = 0.5,
        label_smoothing: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        for name in ("warmup_share", "layer_decay", "mix_probability", "switch_probability", "label_smoothing"):
            if not 0 <= self.hparams[name] <= 1:
                raise ValueError(f"Found {name}={self.hparams[name]}, expected a number from 0 to 1: correct it.")
        if min(mixup, cutmix) < 0:
            raise ValueError(f"Found mixup={mixup} and cutmix={cutmix}, expected 0 or more: correct them.")
        if encoder is None and weights == _PRETRAINED:
            raise ValueError(
                f"Found weights {_PRETRAINED!r} without an encoder of timm's, expected a checkpoint of SHRe's: set "
                "model.weights to one, or model.encoder to the name of timm's model."
            )
        if encoder is None:
            if width % heads:
                raise ValueError(f"A width of {width} does not divide into {heads} heads: change one of them.")
            if image_size % patch_size:
                raise ValueError(
                    f"Images of {image_size} pixels do not divide into patches of {patch_size}: change one."
                )
            self.encoder = image_encoder(image_size, patch_size, width, layers, heads, post_norm)
        else:
            self.encoder = timm_encoder(encoder, image_size)
        if linear_probe:
            self.encoder.requires_grad_(False)
        self.probe = LinearProbe(self.encoder.num_features, num_classes)
        self.accuracy = Accuracy()
        kinds = ((v2.CutMix, cutmix), (v2.MixUp, mixup))
        self._mixers = [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in kinds if alpha]
        self.train()

    def train(self, mode: bool = True) -> "ImageProbeModule":
        """Set the mode; in a linear probe the encoder stays in eval mode, whatever Lightning calls."""
        super().train(mode)
        if self.hparams["linear_probe"]:
            self.encoder.eval()
        return self

    def configure_callbacks(self) -> list[Callback]:
        """Supply what seeds the steps and what writes predictions, unless the user's own are there."""
        present = self.trainer.callbacks  # type: ignore[attr-defined]
        return missing_callbacks(present, StepSeedCallback(), ClassPredictionWriter())

    def evaluates_initial_weights(self) -> bool:
        """Never: the head would be random."""
        return False

    def load_initial_weights(self) -> None:
        """Start the encoder from `weights`; what was done is logged."""
        source, name = self.hparams["weights"], self.hparams["encoder"]
        if source is None:
            rank_zero_info("The image encoder starts at random.")
        elif source == _PRETRAINED:
            self.encoder.load_state_dict(timm_encoder(name, self.hparams["image_size"], pretrained=True).state_dict())
            rank_zero_info(f"The image encoder starts from timm's weights of {name!r}.")
        else:
            unseen = {} if name is not None else {argument: self.hparams[argument] for argument in _UNSEEN}
            rank_zero_info(load_encoder(self.encoder, source, unseen))

    def configure_model(self) -> None:
        """Shard the encoder where the strategy shards."""
        shard(self, [self.encoder])

    def on_fit_start(self) -> None:
        """Load the initial weights, and compare class counts.

        Raises:
            ValueError: if the data has another number of classes.
        """
        super().on_fit_start()
        self.check_classes()

    def forward(self, image: Tensor) -> Tensor:
        """Images [B, 3, S, S] to logits [B, C]."""
        if isinstance(self.encoder, VisionTransformer):
            set_vit_attention(self.encoder, image)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.hparams["linear_probe"]):
            tokens = self.encoder(image)
        logits: Tensor = self.probe(tokens)
        return logits

    def mix(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Mix each image of a training batch with the one before it, with the set probabilities.

        Args:
            image: images [B, 3, S, S].
            label: their classes, long [B].

        Returns:
            Images, and shares of the classes [B, C]; or both as they are.
        """
        mixed, cut = torch.rand(2).tolist()
        if not self._mixers or mixed >= self.hparams["mix_probability"]:
            return image, label
        return self._mixers[0 if cut < self.hparams["switch_probability"] else -1](image, label)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross entropy with the smoothed labels of the mixed images."""
        image, target = self.mix(batch["image"], batch["label"])
        logits = at_least_float32(self(image))
        target = target.to(logits.dtype) if target.is_floating_point() else target
        loss = F.cross_entropy(logits, target, label_smoothing=self.hparams["label_smoothing"])
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The head, and in fine-tuning the encoder, with a learning rate that falls from layer to layer."""
        groups = super().parameter_groups()
        if self.hparams["linear_probe"]:
            return groups
        return layer_decay_groups(groups, self._layers(), self.hparams["learning_rate"], self.hparams["layer_decay"])

    def decay_spared(self) -> tuple[str, ...]:
        """Names of the class token and of positions, where they train."""
        spared = self.encoder.no_weight_decay()
        named = self.encoder.named_parameters()
        return tuple(f"encoder.{name}" for name, parameter in named if name in spared and parameter.requires_grad)

    def _layers(self) -> dict[nn.Parameter, int]:
        """The layer of each parameter: 0 the embeddings, then the blocks, last the head."""
        # The last block's number is that of a norm after it, too.
        numbers = group_parameters(self.encoder, self.encoder.group_matcher(coarse=False), reverse=True)
        layers = {parameter: numbers[name] for name, parameter in self.encoder.named_parameters()}
        return layers | dict.fromkeys(self.probe.parameters(), max(layers.values()) + 1)


def timm_encoder(name: str, image_size: int, pretrained: bool = False) -> Any:
    """Make a vision transformer of timm's that returns its tokens.

    Args:
        name: of timm's model.
        image_size: side of the images, pixels.
        pretrained: load timm's weights for it, which are downloaded; positions are resampled for that size.

    Raises:
        ValueError: if there is no such model, or it does not have exactly one token before the patches.
    """
    try:
        encoder = timm.create_model(name, pretrained, num_classes=0, global_pool="", img_size=image_size)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"timm cannot make the encoder {name!r} for images of {image_size} pixels ({error}): set model.encoder "
            "to one of its vision transformers."
        ) from error
    if getattr(encoder, "num_prefix_tokens", 0) != 1:
        found = getattr(encoder, "num_prefix_tokens", "no")
        raise ValueError(
            f"The encoder {name!r} has {found} tokens before those of the patches, expected one, the class token: set "
            "model.encoder to another vision transformer."
        )
    return encoder


def load_encoder(encoder: nn.Module, source: str, unseen: Mapping[str, Any]) -> str:
    """Fill an image encoder from a checkpoint.

    Args:
        encoder: what to fill.
        source: checkpoint, file or folder, of a training of SHRe's or of `ImageProbeModule`.
        unseen: arguments that the encoder was built with and of which its weights say nothing.

    Returns:
        What was done, for a log line.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        RuntimeError: if it cannot be read.
        ValueError: if it has no such encoder, or one of other sizes. Nothing is loaded then.
    """
    path = Path(source).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"Found no checkpoint {source!r} to start from: correct model.weights.")
    content = AtomicCheckpointIO().load_checkpoint(path)
    saved = content.get("hyper_parameters", {})
    for name, expected in unseen.items():
        if saved.get(name, expected) != expected:
            raise ValueError(
                f"Found an image encoder with {name}={saved[name]} in {source!r}, expected {expected}: set "
                f"model.{name} to that."
            )
    load_fitting(encoder, _encoder_state(content.get("state_dict", {}), source), f"the image encoder from {source!r}")
    return f"The image encoder starts from {source!r}."


def _encoder_state(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """The encoder's part of a checkpoint, under its own names."""
    for prefix in _ENCODERS:
        own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        if own:
            return own
    raise ValueError(
        f"Found no image encoder in {source!r}, expected a checkpoint of a training of SHRe's, or of "
        "ImageProbeModule: correct model.weights."
    )
