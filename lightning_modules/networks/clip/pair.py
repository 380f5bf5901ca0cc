"""A pair of towers of one's own: any image network of timm, any text encoder of transformers, a projection on each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import timm
import torch
from torch import Tensor, nn

from ....callbacks import AtomicCheckpointIO
from ....common.errors import UserError
from ....common.hub import hub_or_cache, reason_not_found
from ....common.names import did_you_mean
from ....common.preprocessing import Preprocessing
from ....common.ranges import COUNT, SettingsGroup
from ...core.checkpoints import is_checkpoint, is_folder, preprocessing_of_checkpoint, read_folder, tower_in
from ...core.fitting import misfits
from ...core.settings import settings
from .text_encoder import (
    CONFIG,
    OPEN_CLIP_POOLERS,
    EncoderTower,
    Pooling,
    Projection,
    read_config,
    read_pooling,
    read_weights,
)

if TYPE_CHECKING:
    from open_clip.timm_model import TimmModel

PRETRAINED = "pretrained"
"""Weights of the tower's own name or folder."""
RANDOM = "random"
"""No trained weights."""
IMAGE_PROJECTION = "head."
"""Begin of the names of the image projection's weights."""


@dataclasses.dataclass(frozen=True)
class ImageTower(SettingsGroup, option="model.image"):
    """An image network of timm.

    Args:
        name: timm's name, such as `tf_efficientnet_lite0` or `vit_base_patch16_dinov3`.
        weights: "pretrained", those that timm downloads for this name; "random"; a `.safetensors`, `.pth` or `.bin`
            file with timm's names; or a checkpoint or an export of this package with the same image tower.
        projection: layer that maps features to embeddings: one linear layer, or an MLP.

    Raises:
        UserError: If timm has no such network.
    """

    name: str
    weights: str = PRETRAINED
    projection: Projection = "linear"

    def __post_init__(self) -> None:
        check_image_network(self.name, "model.image.name")

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class TextTower(SettingsGroup, option="model.text"):
    """A text encoder of transformers.

    Args:
        name: a local folder, or a name on the Hugging Face hub, of the encoder and its tokenizer.
        weights: "pretrained", those of `name`; "random"; another folder or name of the same network; or a checkpoint or
            an export of this package with the same text tower.
        tokenizer: folder or name of the tokenizer; None means `name`.
        pooling: how the tokens' outputs become one: "mean", "cls" (the first token), "pooler" (the first token through
            the encoder's own pooling layer, if it has one) or "last"; None means that of the sentence-transformers
            file of `name`, else the mean.
        prefix: text before each text, which some encoders need (E5: "query: ").
        projection: layer that maps features to embeddings: one linear layer, or an MLP.
        config: configuration of the encoder in place of that of `name`; checkpoints have it, and need no other file.
    """

    name: str
    weights: str = PRETRAINED
    tokenizer: str | None = None
    pooling: Pooling | None = None
    prefix: str = ""
    projection: Projection = "linear"
    config: dict[str, Any] | None = None

    def __str__(self) -> str:
        return Path(self.name).name


@dataclasses.dataclass(frozen=True)
class TowerPair(SettingsGroup, option="model"):
    """Two towers that were not trained together.

    Args:
        image: the image tower; see `ImageTower`.
        text: the text tower; see `TextTower`.
        projection_dim: embedding dimension of both towers.

    Raises:
        UserError: If a tower is unknown.
    """

    image: ImageTower
    text: TextTower
    projection_dim: Annotated[int, COUNT] = 512

    def __post_init__(self) -> None:
        object.__setattr__(self, "image", settings(ImageTower, self.image))  # mappings in a checkpoint
        object.__setattr__(self, "text", settings(TextTower, self.text))

    def __str__(self) -> str:
        return f"{self.image.name} with {self.text}"


def check_image_network(name: str, option: str) -> None:
    """Check that timm has an image network; `option` names it in messages.

    Raises:
        UserError: If it has none of that name.
    """
    if not timm.is_model(name):
        hint = did_you_mean(name, timm.list_models())
        raise UserError(f"Expected an image network of timm as {option}, got {name!r}: {hint}")


def fit_projection(tower: TimmModel) -> None:
    """Rebuild the projection of a network that pools to another width than that of its last features, in place.

    open_clip projects from the width of the features, which MobileNetV3's and MambaOut's heads change.
    """
    width = int(getattr(tower.trunk, "head_hidden_size", None) or tower.trunk.num_features)
    for name, layer in list(tower.head.named_modules()):
        if isinstance(layer, nn.Linear):  # the first
            if layer.in_features != width:
                tower.head.set_submodule(name, nn.Linear(width, layer.out_features, layer.bias is not None))
            return


def completed(pair: TowerPair) -> TowerPair:
    """Return a pair that names its pooling and has the configuration of its text encoder, independent of files.

    Raises:
        UserError: If there is no such encoder, or it is a causal decoder without a pooling.
    """
    return dataclasses.replace(pair, text=completed_text(pair.text))


def completed_text(text: TextTower) -> TextTower:
    """Return a text tower that names its pooling and has the configuration of its encoder, independent of files.

    Raises:
        UserError: If there is no such encoder, or it is a causal decoder without a pooling.
    """
    config = read_config(text.name) if text.config is None else text.config
    pooling = read_pooling(text.name, config) if text.pooling is None else text.pooling
    return dataclasses.replace(text, config=config, pooling=pooling)


def config_of_pair(pair: TowerPair) -> dict[str, Any]:
    """Return open_clip's configuration of a pair."""
    return {
        "embed_dim": pair.projection_dim,
        "vision_cfg": config_of_image(pair.image),
        "text_cfg": config_of_text(pair.text),
        "custom_text": True,
    }


def config_of_image(image: ImageTower) -> dict[str, Any]:
    """Return the entry `vision_cfg` of open_clip's configuration for an image tower."""
    return {
        "timm_model_name": image.name,
        "timm_model_pretrained": False,
        "timm_pool": "",  # the network's own
        "timm_proj": image.projection,
        "image_size": _pretrained_config(image.name)["input_size"][-1],
    }


def config_of_text(given: TextTower) -> dict[str, Any]:
    """Return the entry `text_cfg` of open_clip's configuration for a text tower."""
    text = completed_text(given)
    assert text.pooling is not None
    return {
        "hf_model_name": text.name,
        "hf_tokenizer_name": text.tokenizer or text.name,
        "hf_proj_type": text.projection,
        "hf_pooler_type": OPEN_CLIP_POOLERS.get(text.pooling, text.pooling),
        CONFIG: text.config,
    }


def preprocessing_of_image_tower(image: ImageTower, image_size: int | None) -> Preprocessing:
    """Return the preprocessing of an image tower: that of its weights if they are of this package, else timm's.

    Images are resized to the tower's size and not cropped further, unlike timm's `crop_pct`, as those of CLIP.

    Args:
        image: the tower.
        image_size: side of the images in pixels; None means the tower's own.
    """
    weights = image.weights
    if weights not in (PRETRAINED, RANDOM):
        path = Path(weights).expanduser()
        record = preprocessing_of_checkpoint(path) if path.exists() else None
        if record is not None and "mean" in record:
            size = image_size or record["image_size"]
            return Preprocessing.from_dict({**record, "image_size": size, "resize": None}, weights)
    given = _pretrained_config(image.name)
    interpolation = "bilinear" if given.get("interpolation") == "bilinear" else "bicubic"
    mode = "squash" if given.get("crop_mode") == "squash" else "shortest"
    return Preprocessing(image_size or given["input_size"][-1], given["mean"], given["std"], interpolation, mode)  # type: ignore[arg-type]


def load_towers(network: Any, pair: TowerPair) -> str:
    """Load the trained weights of both towers.

    Args:
        network: the pair, which `build_model` made.
        pair: its description.

    Returns:
        A sentence for the log.

    Raises:
        UserError: If weights are missing or of another network; the network is then unchanged.
    """
    image = image_state(network.visual, pair.image)  # both before either is loaded
    text = text_state(network.text, pair.text)
    network.visual.load_state_dict(image)
    network.text.load_state_dict(text)
    return f"The image tower is {sourced(pair.image)}, the text tower {sourced(pair.text)}."


def sourced(tower: ImageTower | TextTower) -> str:
    """Return the name of a tower with the source of its weights, for the log."""
    weights = "random weights" if tower.weights == RANDOM else f"the weights {tower.weights!r}"
    return f"{tower} with {weights}"


def _pretrained_config(name: str) -> dict[str, Any]:
    """Return timm's description of the images of a network's weights."""
    config = timm.get_pretrained_cfg(name)
    values: dict[str, Any] = {"input_size": (3, 224, 224), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    return values if config is None else values | config.to_dict()


def image_state(tower: TimmModel, given: ImageTower, option: str = "model.image.weights") -> dict[str, Tensor]:
    """Return the weights of an image tower from the source that its description names.

    Args:
        tower: the tower.
        given: its description.
        option: option that names the source, for messages.

    Raises:
        UserError: If weights are missing or of another network.
    """
    if given.weights == RANDOM:
        return tower.state_dict()
    path = Path(given.weights).expanduser()
    if given.weights == PRETRAINED:
        try:
            with hub_or_cache():
                trained = timm.create_model(given.name, pretrained=True)
        except Exception as error:  # of the HTTP libraries, whose types depend on the version
            raise UserError(
                f"Expected timm's weights of {given.name} from the hub, got none ({reason_not_found(error)}): give a "
                f"file as {option}, or random."
            ) from error
        return _with_trunk(tower, trained.state_dict(), trained.pretrained_cfg, f"timm's {given.name}", option)
    if is_checkpoint(path) or is_folder(path):
        return _of_this_package(path, ("visual.", "image_encoder."), tower, option)
    return _with_trunk(tower, _read(path, option), tower.trunk.pretrained_cfg, given.weights, option)


def text_state(tower: EncoderTower, given: TextTower) -> dict[str, Tensor]:
    """Return the weights of a text tower from the source that its description names.

    Args:
        tower: the tower.
        given: its description.

    Raises:
        UserError: If weights are missing or of another network.
    """
    if given.weights == RANDOM:
        return tower.state_dict()
    path = Path(given.weights).expanduser()
    if given.weights != PRETRAINED and (is_checkpoint(path) or _is_export(path)):
        return _of_this_package(path, ("text.", "text_encoder."), tower, "model.text.weights")
    state = read_weights(given.name if given.weights == PRETRAINED else given.weights, tower)
    return tower.state_dict() | {f"transformer.{name}": tensor for name, tensor in state.items()}


def _is_export(path: Path) -> bool:
    try:
        return is_folder(path) and bool(read_folder(path))
    except (UserError, OSError):  # a folder of transformers
        return False


def _with_trunk(
    tower: TimmModel, state: Mapping[str, Tensor], config: Any, source: str, option: str
) -> dict[str, Tensor]:
    """Return the weights of an image tower with those of a network of timm, whose classifier is left out."""
    expected = tower.trunk.state_dict()
    classifiers = config.get("classifier") or ()
    classifiers = (classifiers,) if isinstance(classifiers, str) else classifiers
    unused = tuple(f"{name}." for name in classifiers)
    counters = {name: tensor for name, tensor in expected.items() if name.endswith("num_batches_tracked")}
    state = counters | {
        name: tensor for name, tensor in state.items() if name in expected or not name.startswith(unused)
    }
    name = "pos_embed"
    if name in state and name in expected and state[name].shape != expected[name].shape:
        state[name] = _resampled(tower.trunk, state[name])
    _check(state, expected, source, option)
    return tower.state_dict() | {f"trunk.{name}": tensor for name, tensor in state.items()}


def _resampled(trunk: Any, table: Tensor) -> Tensor:
    from timm.layers import resample_abs_pos_embed

    prefix = 0 if getattr(trunk, "no_embed_class", False) else getattr(trunk, "num_prefix_tokens", 1)
    try:
        return resample_abs_pos_embed(table, list(trunk.patch_embed.grid_size), num_prefix_tokens=prefix)
    except (AttributeError, RuntimeError):  # of another network: the shapes are compared next
        return table


def _check(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], source: str, option: str) -> None:
    missing = [name for name in expected if name not in state]
    unexpected = [name for name in state if name not in expected]
    wrong = [name for name in expected if name in state and state[name].shape != expected[name].shape]
    problems = misfits(missing, unexpected, wrong)
    if problems:
        raise UserError(
            f"Expected the weights of this tower as {option}, got {' and '.join(problems)} in {source!r}: name the "
            "network that the weights are of."
        )


def _of_this_package(path: Path, towers: Sequence[str], tower: nn.Module, option: str) -> dict[str, Tensor]:
    """Return the weights of a tower in a checkpoint or an export of this package, with its projection if it fits.

    Args:
        path: the checkpoint or the export.
        towers: names of the tower in the methods' networks.
        tower: the tower to load into.
        option: option that names the path, for messages.
    """
    state = tower_in(path, towers)
    expected = tower.state_dict()
    ends = (IMAGE_PROJECTION, "proj.")
    for name in list(state):
        fits = name in expected and expected[name].shape == state[name].shape
        if name.startswith(ends) and not fits:
            del state[name]
    kept = {name: tensor for name, tensor in expected.items() if name.startswith(ends)}
    state = kept | state
    _check(state, expected, str(path), option)
    return state


def _read(path: Path, option: str) -> dict[str, Tensor]:
    """Return the state dict in a file, perhaps below `state_dict` or `model` and with the prefix of DataParallel."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise UserError(
            f"Expected a file of weights, an export or a checkpoint as {option}, found none at "
            f"{str(path)!r}: correct the path."
        )
    try:
        state: Any = load_file(path) if path.suffix == ".safetensors" else AtomicCheckpointIO().load_checkpoint(path)
    except (SafetensorError, LookupError, UnicodeError, AssertionError) as error:
        raise UserError(
            f"Expected readable weights as {option}, got {str(path)!r} ({error}): get the file again."
        ) from error
    for entry in ("state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(entry), Mapping):
            state = state[entry]
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"Expected a state dict as {option}, found none in {str(path)!r}: correct the path.")
    return {name.removeprefix("module."): tensor for name, tensor in state.items()}
