"""SHRe: one space for images and texts, learned from a supervised classifier (T. Cares, master's thesis, 2024).

The name and the idea are those of "See, Hear, and Read: Deep Aligned Representations" (Aytar et al. 2017, arXiv
1706.00932): the class posterior of an image, as a trained classifier sees it, is the target for the image and its
caption alike, and both members of a pair are pulled together.
"""

import math
from collections.abc import Iterable
from typing import Any

import timm
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from ...callbacks import (
    ClassPredictionWriter,
    RetrievalPredictionWriter,
    StepSeedCallback,
    TextClassPredictionWriter,
    missing_callbacks,
)
from ...callbacks.distributed.collectives import gather, keep_from_ddp, rank
from ..base.clamped import ClampedParameters
from ..base.fitting import load_student
from ..base.frozen import FrozenTeacher
from ..base.preprocessing import preprocessing_of_checkpoint
from ..base.sharding import shard
from ..base.taught import TaughtModule
from ..base.vocabulary import TextTower, TrainedVocabulary
from ..contrast import Side, contrast_terms
from ..evaluation.retrieval import Batch, RetrievalEvaluation, RetrievalModule
from ..memory import in_slices
from ..networks.classifiers import LibraryClassifier, build_classifier
from ..networks.frozen_classifier import load_frozen
from ..networks.precision import at_least_float32, unit
from ..networks.vit_weights import load_vision_weights
from ..optim.adamw import WarmupShareModule
from ..optim.layout import channels_last
from .losses import posterior_divergence, posterior_entropy
from .network import Shared, SHReNetwork, SHReSizes
from .weights import load_text_weights

Three = tuple[float, float, float]
MEDIAN_RANK_FOLD = 1000  # images (Aytar et al.)


class SHReModule(TaughtModule, ClampedParameters, WarmupShareModule, TrainedVocabulary, RetrievalModule):
    """Distillation of a classifier into an encoder of images and texts (listing 2).

    The loss is kl_weight times the divergences from the teacher's posterior of the image, of the image's posterior
    and of the caption's, plus itc_weight times the mean over the shared encoder's results of CLIP's loss, each result
    with a temperature of its own. Sizes default to the origin's: 114,983,656 parameters. The teacher is not in the
    checkpoint, which names it and holds a fingerprint of its weights.

    Retrieval is measured in two spaces, the first result's ("h2") and the logits' ("h3"), with the average median rank
    in folds of 1000 images beside recall. What `classify_images` says of data whose labels trained the teacher is a
    supervised teacher's work, not zero-shot.

    Args:
        num_classes: number of classes C of the teacher (ImageNet).
        teacher: name of a classifier as in `build_classifier`, "timm/..." for timm's (listing: ResNet-50-A1).
        teacher_weights: a file; the folder of a run that trained it here; or the name of the library's own weights.
        teacher_mean: what the teacher's images are normalised with; by default as timm says for its models, and as
            the data's for others.
        teacher_std: standard deviation that goes with `teacher_mean`.
        image_size: side of the square images, pixels. The command line sets it, and the four that follow, from the
            data's.
        image_mean: what the data's images are normalised with; by default as its training transform says.
        image_std: standard deviation that goes with `image_mean`.
        max_tokens: longest caption in tokens (listing: 64).
        vocab_size: most words of the tokenizer (BERT, uncased), and as many as it has where a run trains it.
        patch_size: side of a patch, pixels.
        width: width D of both encoders (BERT-base, ViT-B).
        heads: number of attention heads in both.
        image_layers: blocks of the image encoder (origin).
        text_layers: layers of the text encoder (origin).
        post_norm: whether the image encoder is Data2Vec 2.0's (origin), or the usual ViT.
        shared: "mlp" is the origin's shared encoder; "transformer" the later one, contrasted on h2 alone, which was 2
            to 3 points better; "mlp_in_order" the listing's widths read as those of layers in a row.
        dropout: dropout probability of BERT.
        image_weights: timm model name or file that the image encoder starts from, the first blocks of a deeper one
            (origin: Data2Vec 2.0's `base_imagenet.pt`). None means random.
        text_weights: hub name or folder of a BERT that the text encoder starts from (origin: "bert-base-uncased").
        weights: checkpoint of an earlier training here whose student this one starts from; takes the place of both.
        kl_weight: weight of the KL divergences together (listing: 1); 0 leaves the teacher out.
        kl_image_share: share of `kl_weight` that the image's divergence has, the rest is the caption's (listing:
            1/2).
        kl_temperature: temperature of both posteriors (origin: 1).
        itc_weight: weight of the contrast (listing: 1).
        itc_layers: results that are contrasted, of "h1", "h2", "h3"; all that the shared encoder has for it by default.
        temperature: temperature of each contrast at the start; it is learned.
        max_logit_scale: one over a temperature is clamped to at most this after each optimizer step (CLIP).
        mask_same_image: whether other captions of an image are no negatives for it; the origin counts them.
        features: space of `predict`, and of class names in `ZeroShotClassification`: "h2" (what the origin's
            evaluation reads) or "h3" (what its text says).
        learning_rate: learning rate at its peak (origin: 1e-4 for each 256 pairs of the global batch).
        warmup_share: share of the run's optimizer steps in which the learning rate rises from 0 (origin).
        weight_decay: weight decay of AdamW (origin); vectors, tokens, positions and embeddings are spared.
        betas: beta1 and beta2 of AdamW (origin).
        eps: epsilon of AdamW (origin).
        micro_batch_size: pairs that go through the encoders at a time, activations computed again in the backward pass:
            the memory of a small batch for the loss of the whole one. None: all at once.
        loss_rows: rows of the logits that are held at a time, computed again in the backward pass; None holds all.
        match_equal_texts: whether retrieval evaluation counts equal captions of other images as matches.

    Raises:
        ValueError: for sizes that do not fit together, or a number or name that makes no sense.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        teacher: str = "timm/resnet50",
        teacher_weights: str | None = "a1_in1k",
        teacher_mean: Three | None = None,
        teacher_std: Three | None = None,
        image_size: int = 224,
        image_mean: Three | None = None,
        image_std: Three | None = None,
        max_tokens: int = 64,
        vocab_size: int = 30522,
        patch_size: int = 16,
        width: int = 768,
        heads: int = 12,
        image_layers: int = 6,
        text_layers: int = 6,
        post_norm: bool = True,
        shared: Shared = "mlp",
        dropout: float = 0.1,
        image_weights: str | None = None,
        text_weights: str | None = None,
        weights: str | None = None,
        kl_weight: float = 1.0,
        kl_image_share: float = 0.5,
        kl_temperature: float = 1.0,
        itc_weight: float = 1.0,
        itc_layers: list[str] | None = None,
        temperature: float = 0.07,
        max_logit_scale: float = 100.0,
        mask_same_image: bool = True,
        features: str = "h2",
        learning_rate: float = 1e-4,
        warmup_share: float = 0.1,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-6,
        micro_batch_size: int | None = None,
        loss_rows: int | None = None,
        match_equal_texts: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.student = SHReNetwork(
            SHReSizes(
                image_size,
                patch_size,
                width,
                heads,
                image_layers,
                text_layers,
                post_norm,
                shared,
                num_classes,
                vocab_size,
                max_tokens,
                dropout,
            )
        )
        self._check_arguments()
        results = [*self._contrasted(), *["h3"] * bool(kl_weight)]
        for layer in self.student.shared_encoder.layers_after(results):
            layer.requires_grad_(False)  # no loss reaches it, which DDP would not forgive
        # FSDP2 shards along the first dimension, and a number has none.
        start = torch.tensor([-math.log(temperature)])
        self.scales = nn.ParameterDict([(name, nn.Parameter(start.clone())) for name in self._contrasted()])
        self.teacher: FrozenTeacher[Any] = FrozenTeacher(nn.Identity())  # until a fit needs it
        self._told = False  # how sure the teacher is
        self._sent: tuple[Any, tuple[Tensor, Tensor, Tensor, Tensor] | None] | None = None  # what normalises images
        first, *_, last = self.student.widths
        self.spaces = {name: self.student.widths[name] for name in (first, last)}
        self.evaluation = RetrievalEvaluation(
            match_equal_texts, spaces=self.spaces, prediction_space=features, median_rank_fold=MEDIAN_RANK_FOLD
        )
        self.start_vocabulary()

    def text_towers(self) -> Iterable[TextTower]:
        """The student's."""
        return (self.student.text_encoder,)

    def _check_arguments(self) -> None:
        hparams, known = self.hparams, list(self.student.widths)
        for name in ("kl_weight", "itc_weight"):
            if hparams[name] < 0:
                raise ValueError(f"{name} is {hparams[name]}: give a weight of at least 0.")
        if not hparams["kl_weight"] and not hparams["itc_weight"]:
            raise ValueError("kl_weight and itc_weight are both 0, so there is nothing to learn: raise one.")
        if not 0 <= hparams["kl_image_share"] <= 1:
            raise ValueError(f"kl_image_share is {hparams['kl_image_share']}: give a share from 0 to 1.")
        for name in ("kl_temperature", "temperature"):
            if hparams[name] <= 0:
                raise ValueError(f"{name} is {hparams[name]}: give a number above 0.")
        if not 0 <= hparams["warmup_share"] < 1:
            raise ValueError(f"warmup_share is {hparams['warmup_share']}: give a share from 0 to below 1.")
        for name in ("micro_batch_size", "loss_rows"):
            if hparams[name] is not None and hparams[name] < 1:
                raise ValueError(f"{name} is {hparams[name]}: give a number of at least 1, or leave it out.")
        layers = hparams["itc_layers"]
        if layers is not None and (not layers or not set(layers) <= set(known) or len(set(layers)) < len(layers)):
            raise ValueError(
                f"Found itc_layers {layers}, but the shared encoder {hparams['shared']} has {', '.join(known)}: name "
                "one or several of these."
            )
        if hparams["features"] not in (known[0], known[-1]):
            raise ValueError(f"features is {hparams['features']!r}: give {known[0]!r} or {known[-1]!r}.")

    def _contrasted(self) -> tuple[str, ...]:
        if not self.hparams["itc_weight"]:
            return ()
        return tuple(self.hparams["itc_layers"] or self.student.shared_encoder.contrasted)

    def configure_callbacks(self) -> list[Callback]:
        """Supply what the method cannot run without, and what writes predictions, unless the user's own is there."""
        needed = (StepSeedCallback(), RetrievalPredictionWriter())
        return missing_callbacks(self.trainer.callbacks, *needed)  # type: ignore[attr-defined]

    def setup(self, stage: str) -> None:
        """Load the teacher, which only training needs."""
        super().setup(stage)
        hparams = self.hparams
        if stage == "fit" and hparams["kl_weight"] and self.teacher.origin is None:
            name, classes = hparams["teacher"], hparams["num_classes"]
            self.teacher.network = build_classifier(name, classes).requires_grad_(False)
            load_frozen(self.teacher, name, hparams["teacher_weights"], classes)
            self.teacher.train(False)
            keep_from_ddp(self, [self.teacher])

    def evaluates_initial_weights(self) -> bool:
        """Whether there is a trained student."""
        return self.hparams["weights"] is not None

    def initial_preprocessing(self) -> dict[str, Any] | None:
        """What the training that `weights` are of did to an image."""
        source = self.hparams["weights"]
        return None if source is None else preprocessing_of_checkpoint(source)

    def load_initial_weights(self) -> None:
        """Start the student from a training, or its encoders from public models; what is random is said too."""
        source = self.hparams["weights"]
        if source is not None:
            rank_zero_info(load_student(self.student, source, type(self).__name__))
            return
        done = ["image encoder random", "text encoder random"]
        if self.hparams["image_weights"] is not None:
            done[0] = load_vision_weights(self.student.image_encoder, self.hparams["image_weights"], first_blocks=True)
        if self.hparams["text_weights"] is not None:
            done[1] = load_text_weights(self.student.text_encoder, self.hparams["text_weights"])
        rank_zero_info(f"Initial weights: {done[0]}; {done[1]}; shared encoder random.")

    def configure_model(self) -> None:
        """Shard the networks where the strategy shards."""
        taught = self.teacher.origin is not None
        shard(self, [self.student, *[self.teacher.network] * taught])
        if self.device_mesh is None:  # FSDP2 takes contiguous parameters only
            channels_last(self.teacher)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Divergence from the teacher's posterior, and contrast of the shared encoder's results."""
        self._check_tokens(batch["input_ids"])
        target = self._posterior(batch["image"])
        images, texts = self._encode(batch)
        losses = []
        if target is not None:
            losses.append(self.hparams["kl_weight"] * self._divergence(target, images["h3"], texts["h3"]))
        if self.scales:
            losses.append(self.hparams["itc_weight"] * self._contrast(images, texts, batch["image_id"]))
        loss = torch.stack(losses).sum()
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    @torch.no_grad()
    def _posterior(self, image: Tensor) -> Tensor | None:
        """The teacher's logits [B, C] of images as the data normalises them."""
        if not self.hparams["kl_weight"]:
            return None

        def classify(image: Tensor) -> tuple[Tensor]:
            return (self.teacher.network(self._as_taught(image)),)

        return in_slices(classify, self.hparams["micro_batch_size"], image)[0]

    def _as_taught(self, image: Tensor) -> Tensor:
        """Images as the teacher is used to see them."""
        config = self._teacher_config()
        if (numbers := self._renormalisation(config, image.dtype, image.device)) is not None:
            own_mean, own_std, mean, std = numbers
            image = (image * own_std + own_mean - mean) / std
        side = config.get("input_size", image.shape)[-1]
        if config.get("fixed_input_size", False) and side != image.shape[-1]:
            image = F.interpolate(image, (side, side), mode="bilinear", antialias=True)
        return image

    def _renormalisation(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Mean and deviation of the data's images, then of the teacher's, [3, 1, 1]; None where they are the same.

        They are compared and sent to the device once, since each slice of each step would wait for that.
        """
        theirs: list[Any] = [self.hparams[f"teacher_{name}"] or config.get(name) for name in ("mean", "std")]
        if theirs[0] is None or theirs[1] is None:
            return None
        wanted = [list(part) for part in (*self._normalisation(), *theirs)], dtype, device
        if self._sent is None or self._sent[0] != wanted:
            numbers = [torch.tensor(part, dtype=dtype)[:, None, None] for part in wanted[0]]
            same = torch.equal(numbers[0], numbers[2]) and torch.equal(numbers[1], numbers[3])
            own_mean, own_std, mean, std = (number.to(device) for number in numbers)
            self._sent = wanted, None if same else (own_mean, own_std, mean, std)
        return self._sent[1]

    def _normalisation(self) -> tuple[Three, Three]:
        """Mean and deviation that the data's images were normalised with."""
        given = self.hparams["image_mean"], self.hparams["image_std"]
        if None not in given:
            return given
        data = None if self._trainer is None else getattr(self.trainer, "datamodule", None)
        finish: Any = getattr(getattr(data, "train_transform", None), "finish", None)
        if not hasattr(finish, "mean") or not hasattr(finish, "std"):
            raise ValueError(
                f"{type(data).__name__} does not say how its images are normalised, which the teacher wants to "
                "know: set model.image_mean and model.image_std."
            )
        return finish.mean, finish.std

    def _teacher_config(self) -> dict[str, Any]:
        """What timm says of the images that the teacher's weights were trained with; nothing for others."""
        network = self.teacher.network
        if isinstance(network, LibraryClassifier) and type(network.network).__module__.startswith(timm.__name__):
            config: Any = network.network.pretrained_cfg
            return dict(config)
        return {}

    def _encode(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The shared encoder's results of the images and of the captions, by name."""

        def encode(image: Tensor, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
            return *self.student.encode_image(image), *self.student.encode_text(input_ids, attention_mask)

        inputs = (batch[name] for name in ("image", "input_ids", "attention_mask"))
        found = in_slices(encode, self.hparams["micro_batch_size"], *inputs)
        names = list(self.student.widths)
        return dict(zip(names, found[: len(names)], strict=True)), dict(zip(names, found[len(names) :], strict=True))

    def _divergence(self, target: Tensor, image: Tensor, text: Tensor) -> Tensor:
        """KL halves of logits [B, C]."""
        share, temperature = self.hparams["kl_image_share"], self.hparams["kl_temperature"]
        of_image, of_text = (posterior_divergence(target, logits, temperature) for logits in (image, text))
        entropy = posterior_entropy(target, temperature)
        if not self._told:
            self._told = True
            rank_zero_info(
                f"The teacher's posteriors of the first batch have a mean entropy of {float(entropy):.2f} nats; where "
                f"it is near {math.log(target.shape[1]):.2f}, they say nothing, and a kl_temperature below 1 sharpens "
                "them."
            )
        self.log_dict({"train/kl_image": of_image.detach(), "train/kl_text": of_text.detach()})
        self.log("train/teacher_entropy", entropy)
        return share * of_image + (1 - share) * of_text

    def _contrast(self, images: dict[str, Tensor], texts: dict[str, Tensor], image_id: Tensor) -> Tensor:
        """Mean over the contrasted results of CLIP's loss."""
        names = list(self.scales)
        own = [unit(side[name]) for side in (images, texts) for name in names]
        everyone = gather(torch.cat(own, 1), gradient=True).split([part.shape[1] for part in own], 1)
        ids = (image_id, gather(image_id)) if self.hparams["mask_same_image"] else None
        losses = {}
        for number, name in enumerate(names):
            image, text = number, number + len(names)
            side = Side(own[image], own[text], everyone[image], everyone[text], self.scales[name].exp())
            terms = contrast_terms(side, [], rank() * len(image_id), self.hparams["loss_rows"], ids)
            losses[name] = terms.contrast
        self.log_dict({f"train/contrast_{name}": loss.detach() for name, loss in losses.items()})
        self.log_dict({f"train/logit_scale_{name}": self.scales[name].detach().exp().squeeze() for name in names})
        return torch.stack(list(losses.values())).mean()

    def _check_tokens(self, input_ids: Tensor) -> None:
        longest = self.hparams["max_tokens"]
        if input_ids.shape[1] > longest:
            raise ValueError(
                f"Found captions of {input_ids.shape[1]} tokens, expected at most {longest}: set data.max_tokens."
            )

    def bounds(self) -> Iterable[tuple[nn.Parameter, float, float]]:
        """Those of CLIP, for each contrasted result's scale."""
        return [(scale, 0.0, math.log(self.hparams["max_logit_scale"])) for scale in self.scales.values()]

    def decay_spared(self) -> tuple[str, ...]:
        """Tokens, positions and embeddings."""
        parts = ("cls_token", "pos_embed", "embeddings.weight")
        trained = (name for name, parameter in self.named_parameters() if parameter.requires_grad)
        return tuple(name for name in trained if name.endswith(parts))

    def encode_images(self, image: Tensor) -> tuple[Tensor, None]:
        """Unit-length features [B, E] of images [B, 3, S, S], in the space `features`."""
        return unit(self._results(self.student.encode_image(image))[self.hparams["features"]]), None

    def encode_texts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Unit-length features [B, E] of texts, ids and mask [B, L], in the space `features`."""
        self._check_tokens(input_ids)
        return unit(self._results(self.student.encode_text(input_ids, attention_mask))[self.hparams["features"]])

    def ranked_images(self, image: Tensor) -> tuple[Tensor, None]:
        """Unit-length features of both spaces, side by side."""
        return self._side_by_side(self.student.encode_image(image)), None

    def ranked_texts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Unit-length features of both spaces, side by side."""
        self._check_tokens(input_ids)
        return self._side_by_side(self.student.encode_text(input_ids, attention_mask))

    def classify_images(self, image: Tensor) -> Tensor:
        """The teacher's classes of images [B, 3, S, S], logits [B, C]."""
        return at_least_float32(self.student.encode_image(image)[-1])

    def classify_texts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The teacher's classes of texts, ids and mask [B, L], logits [B, C]."""
        self._check_tokens(input_ids)
        return at_least_float32(self.student.encode_text(input_ids, attention_mask)[-1])

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """As for retrieval; if a callback writes them, probabilities [B, C] of classes of the images, or texts."""
        found = super().predict_step(batch, batch_idx, dataloader_idx)
        writers = (ClassPredictionWriter, TextClassPredictionWriter)
        if any(isinstance(callback, writers) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            if "image" in batch:
                logits = self.classify_images(batch["image"])
            else:
                logits = self.classify_texts(batch["input_ids"], batch["attention_mask"])
            found["probabilities"] = logits.softmax(-1)
        return found

    def _side_by_side(self, results: tuple[Tensor, ...]) -> Tensor:
        named = self._results(results)
        return torch.cat([unit(named[name]) for name in self.spaces], 1)

    def _results(self, results: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return dict(zip(self.student.widths, results, strict=True))
