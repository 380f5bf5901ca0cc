"""Any image-text model for evaluation: a checkpoint or an export of a method, or a published model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize

from ... import lightning_modules
from ...callbacks import AtomicCheckpointIO
from ...common.clip_vocabulary import CLIP
from ...common.errors import UserError
from ...common.preprocessing import Preprocessing, recorded_preprocessing
from ...common.tokenizers import saved_tokenizer, tokenizer_from_json
from ...datamodules.text.tokenizers import Encoder
from ...datamodules.transforms.normalize import ToNormalized
from ...lightning_modules.base.model_card import expected_tokenizer_of
from ...lightning_modules.clip.tower_export import CLASS as TOWER_CLASS
from ...lightning_modules.clip.tower_export import load_tower
from ...lightning_modules.core.checkpoints import class_of, is_checkpoint, is_folder, read_config, saved_settings
from ...lightning_modules.core.memory import weights_in_place
from ...lightning_modules.core.programs import padding_tokenizer
from ...lightning_modules.core.towers import Space, tower_digest_of, weights_digest
from ...lightning_modules.networks.clip.files import CONFIG_NAME
from ...lightning_modules.networks.published_clip import RANDOM, PublishedCLIP, TowerTokenizer, load_published
from ..cli.saved_run import resolved
from ..export.reading import has_clip_texts, text_encoder, tokenizer_of_folder

_LOCAL = "local-dir:"


@dataclass
class ImageTextModel:
    """A model in eval mode and float32, with its preprocessing and its tokenizer.

    Attributes:
        name: What the results are listed under.
        network: Holds the weights.
        images: Images [B, 3, S, S] to features [B, E].
        texts: Texts to features [T, E].
        transform: RGB image to uint8 [3, S, S], which loader workers apply and send.
        finish: Normalization of a batch of these, on the model's device.
        note: Caveat that reports print beside each metric; None if there is none.
        encoder: Texts to token ids; None for a published model, whose module maps no words.
        logit_scale: Inverse of the temperature that the model learned, by which cosines become logits; 1 for one whose
            features were not trained with a temperature.
        token_ids: Texts to the token ids, long [T, L], that `texts` encodes.
        preprocessing: What `transform` and `finish` do.
        joined: The space of another pair that a tower was trained into; None for a space of its own.
        sides: The towers that there are.
        image_digest: Fingerprint of an image tower that `network` does not hold; None if it holds it.
    """

    name: str
    network: nn.Module
    images: Callable[[Tensor], Tensor]
    texts: Callable[[Sequence[str]], Tensor]
    transform: Callable[[Image.Image], Tensor]
    finish: Callable[[Tensor], Tensor]
    note: str | None = None
    encoder: Encoder | None = None
    logit_scale: float = 1.0
    token_ids: Callable[[Sequence[str]], Tensor] | None = None
    preprocessing: Preprocessing | None = None
    joined: Space | None = None
    sides: Sequence[str] = ("image", "text")
    image_digest: str | None = None

    @cached_property
    def space(self) -> Space:
        """The space of the embeddings: `joined`, or the model's own."""
        return self.joined or Space(self.name, **self.tower_digests())

    @cached_property
    def sha256(self) -> str:
        """Fingerprint of the weights, all of which are read for it."""
        return weights_digest(self.network.state_dict().items())

    def tower_digest(self, side: str) -> str:
        """Return the fingerprint of the tower `image` or `text`; that of all weights without separate towers."""
        if side == "image" and self.image_digest is not None:
            return self.image_digest
        return tower_digest_of(self.network, side) or self.sha256

    def tower_digests(self) -> dict[str, str]:
        """Return the fingerprints of both towers, `image` and `text`."""
        return {side: self.tower_digest(side) for side in ("image", "text")}

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.network.parameters()).device

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """Return unit-length features [B, E] of images, uint8 [B, 3, S, S], on the model's device."""
        pixels = images.to(self.device, non_blocking=True)
        return normalize(self.images(self.finish(pixels)).float(), dim=-1)

    @torch.no_grad()
    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Return unit-length features [T, E] of texts."""
        return normalize(self.texts(texts).float(), dim=-1)

    def prepared(self, image: Image.Image) -> Tensor:
        """Return an image as the network takes it, float [3, S, S], on the CPU."""
        return self.finish(self.transform(image))

    def shares(self, cosines: Tensor) -> Tensor:
        """Return the softmax [..., C] of the model's logits; of none where a cosine [..., C] is non-finite."""
        return (self.logit_scale * cosines).softmax(-1)


def load_model(model: str, weights: str | None = None) -> ImageTextModel:
    """Load a model for evaluation, on the CPU, in the memory of one copy of its weights.

    Args:
        model: A checkpoint of a training, a file or a folder; the folder of a run, for its best checkpoint; the folder
            of an export; a folder of open_clip's, also as `local-dir:FOLDER`; or a model's name, with `weights`.
        weights: A tag of open_clip's, a file, or "random", for a model's name.

    Raises:
        UserError: If there is no such model, or it does not embed images and texts.
    """
    if weights == RANDOM:  # which are drawn
        return _loaded(model, weights)
    with weights_in_place():
        return _loaded(model, weights)


def _loaded(model: str, weights: str | None) -> ImageTextModel:
    if weights is not None:
        return _published(load_published(model, weights, digest=False))
    if model.startswith(_LOCAL):
        return _published(load_published(None, model.removeprefix(_LOCAL), digest=False))
    path = resolved(model)
    if is_checkpoint(path):
        content = AtomicCheckpointIO().load_checkpoint(path, map_location="meta")  # the module loads the weights
        cls = _class_of(class_of(saved_settings(content)), str(path))
        # An optimizer of the user's own is not needed, and its code not imported.
        module = cls.load_from_checkpoint(path, map_location="cpu", optimizer=None, lr_scheduler=None)
        return _from_checkpoint(module, content, str(path))
    if (path / CONFIG_NAME).is_file():  # an export in that layout, without the prefix
        return _published(load_published(None, str(path), digest=False))
    if is_folder(path):
        return _from_tower(path) if read_config(path)["class"] == TOWER_CLASS else _from_export(path)
    if path.exists():
        raise UserError(
            f"Expected a .ckpt file, the folder of a sharded checkpoint, of a run or of an export as the model, got "
            f"{model!r}: give the model's name, and this file as its weights (--weights)."
        )
    raise UserError(
        f"Expected an existing checkpoint or export as the model, got {model!r}: correct the path, or give the tag or "
        "the file of the weights of a published model of this name too (--weights)."
    )


def _published(published: PublishedCLIP) -> ImageTextModel:
    network = published.network
    tokenizer = published.tokenizer

    def token_ids(texts: Sequence[str]) -> Tensor:
        return tokenizer(list(texts))

    def encode(texts: Sequence[str]) -> Tensor:
        features: Tensor = network.encode_text(token_ids(texts).to(next(network.parameters()).device))
        return features

    logit_scale = getattr(network, "logit_scale", None)
    return ImageTextModel(
        f"{published.model} ({published.weights})",
        network,
        network.encode_image,
        encode,
        *_prepared(published.preprocessing),
        logit_scale=1.0 if logit_scale is None else float(logit_scale.exp()),
        token_ids=token_ids,
        preprocessing=published.preprocessing,
        joined=published.space,
    )


def _prepared(preprocessing: Preprocessing) -> tuple[Callable[[Image.Image], Tensor], Callable[[Tensor], Tensor]]:
    """Return what loader workers do to an image, and the normalization."""
    return preprocessing.pixels(), ToNormalized(preprocessing.mean, preprocessing.std)


def shares_space(record: Mapping[str, Any], model: ImageTextModel, side: str) -> bool:
    """Return whether features of one side, `image` or `text`, and a model are of one space.

    Args:
        record: fingerprints of the towers that computed the features by side, and their `space` if it is another's.
        model: the model.
        side: the side of the features.
    """
    space = Space.of(record)
    return space.is_that_of(model.space) if space else record.get(side) == getattr(model.space, side)


def load_interpolated(path: str, ratio: float) -> ImageTextModel:
    """Load a model between published weights and a fine-tuning that started with them (WiSE-FT), on the CPU.

    Args:
        path: Checkpoint of the fine-tuning, or the folder of its run.
        ratio: Share of its weights.

    Raises:
        UserError: If there is no such checkpoint, it is of something else, or the published weights cannot be read.
    """
    file = resolved(path)
    if not is_checkpoint(file):
        raise UserError(f"Expected a checkpoint of a fine-tuning with --interpolate, got {path!r}: correct --model.")
    content = AtomicCheckpointIO().load_checkpoint(file)
    cls = _class_of(class_of(saved_settings(content)), path)
    content = cls.interpolated(content, repr(path), ratio)
    arguments = {name: value for name, value in content["hyper_parameters"].items() if not name.startswith("_")}
    module = cls(**arguments)
    module.load_state_dict(content["state_dict"])
    return _from_checkpoint(module, content, f"{path} at {ratio:g}")


def _from_checkpoint(module: Any, content: Mapping[str, Any], path: str) -> ImageTextModel:
    """Return the model of a module with the preprocessing and the tokenizer in its checkpoint."""
    data = content.get("datamodule_hyper_parameters") or {}
    expected = expected_tokenizer_of(module)
    text, note = (None, "with CLIP's") if data.get("tokenizer") == CLIP else saved_tokenizer(content, expected)
    tokenizer = None if text is None else tokenizer_from_json(text)
    if tokenizer is None and data.get("tokenizer") != CLIP and not has_clip_texts(module):
        raise UserError(f"Expected a checkpoint with its tokenizer in {path!r}, got one {note}: export it with one.")
    return _from_module(module, path, recorded_preprocessing(content), tokenizer, data)


def _from_export(folder: Path) -> ImageTextModel:
    config = read_config(folder)
    module = _class_of(config["class"], str(folder)).from_pretrained(folder)
    tokenizer = tokenizer_of_folder(folder, config)
    if tokenizer is None and not has_clip_texts(module):
        raise UserError(
            f"Expected an export with its tokenizer in {str(folder)!r}, got none: export the checkpoint again."
        )
    return _from_module(module, str(folder), config.get("preprocessing"), tokenizer, config.get("data") or {})


def _from_tower(folder: Path) -> ImageTextModel:
    """Return the model of a tower that was exported alone: the other tower's features are asked for in vain."""
    one = load_tower(folder)
    side = one.side

    def absent(*_: Any) -> Any:
        raise UserError(
            f"Expected a model with both towers, got the {side} tower alone in {str(folder)!r}: give the export of the "
            "pair."
        )

    if side == "image":
        preprocessing = Preprocessing.from_dict(one.preprocessing or {}, repr(str(folder)))
        prepared = _prepared(preprocessing)
        return ImageTextModel(str(folder), one.tower, one.tower, absent, *prepared, joined=one.space, sides=(side,))
    tower: Any = one.tower
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = TowerTokenizer(padding_tokenizer(text, tower.context_length, one.padding), one.prefix)

    def encode(texts: Sequence[str]) -> Tensor:
        features: Tensor = tower(tokenizer(list(texts)).to(next(tower.parameters()).device))
        return features

    return ImageTextModel(
        str(folder), tower, absent, encode, absent, absent, joined=one.space, sides=(side,), token_ids=tokenizer
    )


def embeds_both(cls: type) -> bool:
    """Return whether a class embeds images and texts."""
    return hasattr(cls, "encode_images") and hasattr(cls, "encode_texts")


def model_of_module(module: Any, name: str) -> ImageTextModel:
    """Return the model of a method after its training, which puts it into eval mode and float32.

    Args:
        module: A method that embeds images and texts, whose Trainer has its datamodule, or that was loaded.
        name: What results are listed under.

    Raises:
        UserError: If preprocessing or tokenizer are not known.
    """
    data = module.provenance.training_of(module).data
    text = None if data.get("tokenizer") == CLIP else module.provenance.tokenizer_of(module)
    tokenizer = None if text is None else tokenizer_from_json(text)
    return _from_module(module, name, module.preprocessing(), tokenizer, data)


def _class_of(name: str | None, source: str) -> Any:
    """Return the class of a checkpoint or an export that embeds images and texts."""
    classes = {key: cls for key, cls in lightning_modules.method_classes().items() if embeds_both(cls)}
    if name not in classes:
        raise UserError(
            f"Expected a model of images and texts ({', '.join(classes)}), got {name or 'an unknown class'} in "
            f"{source!r}: give another."
        )
    return classes[name]


def _from_module(
    module: Any, source: str, recorded: Mapping[str, Any] | None, tokenizer: Any, data: Mapping[str, Any]
) -> ImageTextModel:
    """Return a model of a method, with the preprocessing and the tokenizer of its training."""
    if recorded is None or ("mean" not in recorded and "transform" not in recorded):
        raise UserError(
            f"Expected the preprocessing of the images in {source!r}, got none: give a checkpoint that was trained or "
            "validated with a datamodule of this package."
        )
    module.eval().requires_grad_(False).float()
    encoder = text_encoder(module, tokenizer, data)

    def encode_texts(texts: Sequence[str]) -> Tensor:
        device = next(module.parameters()).device
        features: Tensor = module.text_features(**{key: ids.to(device) for key, ids in encoder(texts).items()})
        return features

    def token_ids(texts: Sequence[str]) -> Tensor:
        return encoder(texts)["input_ids"]

    preprocessing = Preprocessing.from_dict(recorded, repr(source))
    return ImageTextModel(
        source,
        module,
        module.image_features,
        encode_texts,
        *_prepared(preprocessing),
        module.evaluation_note,
        encoder,
        module.similarity_scale(),
        token_ids,
        preprocessing,
        module.space,
        image_digest=getattr(module, "image_digest", None),
    )
