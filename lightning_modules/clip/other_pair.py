"""One tower of another pair as the new tower of a trained pair: its description, its weights, its images."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from open_clip.model import convert_to_custom_text_state_dict
from torch import Tensor

from ...callbacks import AtomicCheckpointIO
from ...common.errors import UserError
from ...common.ranges import SettingsGroup
from ..core.checkpoints import class_of, is_checkpoint, is_folder, read_config, saved_settings
from ..core.settings import plain
from ..networks.clip.files import CONFIG_NAME
from ..networks.clip.models import build_model, model_config, preset_of
from ..networks.clip.new_tower import TOWERS, NewTower
from ..networks.clip.pair import RANDOM, ImageTower, TextTower, TowerPair
from ..networks.clip.preprocessing import preprocessing_of, preprocessing_of_weights
from ..networks.clip.shapes import Model, ModelShape, OpenClipConfig, resolved
from ..networks.clip.weights import load_state
from ..networks.published_clip import load_published
from .predecessor import PairDescription, described_pair

Side = Literal["image", "text"]


@dataclass(frozen=True)
class PairTower(SettingsGroup, option="pair"):
    """The image or the text tower of another pair, which becomes the new tower.

    Args:
        side: which tower of the other pair.
        weights: a checkpoint or an export of a pair of towers here; a folder of open_clip's, such as the export of an
            MM-LG's descendant; with `name` a tag of open_clip's, a file of open_clip's or of MobileCLIP's, or "random".
        name: the other pair's name, one of open_clip's or MobileCLIP's, for a tag, a file or "random".
        of: the other pair with the embedding dimension of the trained one; checkpoints have it, and need no other file.
        images: record of the preprocessing of its images; checkpoints have it.
    """

    side: Side = "image"
    weights: str | None = None
    name: str | None = None
    of: str | dict[str, Any] | None = None
    images: dict[str, Any] | None = None


class Composed(NamedTuple):
    """A trained pair with a tower of another one.

    Attributes:
        model: description of both towers.
        of: description of the other pair, whose tower on that side is the new one.
        image_size: side of the images of the pair in pixels; None means its own.
        max_tokens: number of tokens of its texts.
    """

    model: Model
    of: Model
    image_size: int | None
    max_tokens: int


class OtherPair:
    """The pair that a new tower is taken from; its description is read at the first use.

    Args:
        tower: names the pair and the tower.
    """

    def __init__(self, tower: PairTower) -> None:
        self.tower = tower

    @cached_property
    def described(self) -> PairDescription:
        """The description of the pair."""
        weights, name = self.tower.weights, self.tower.name
        if weights is None:
            raise UserError(
                "Expected the weights of the new tower's pair as model.pair.weights, got none: give a checkpoint, an "
                "export, a folder of open_clip's, or a tag or random with model.pair.name."
            )
        if weights == RANDOM and name is None:
            raise UserError("Expected the name of a pair as model.pair.name with random weights, got none: add it.")
        if name is None:
            _check_class(Path(weights).expanduser())
        return described_pair(weights, name)

    def composed(self, old: PairDescription, image_size: int | None, max_tokens: int) -> Composed:
        """Return the description of a trained pair with the new tower.

        Args:
            old: the trained pair.
            image_size: side of the images in pixels; None means the new image tower's own, or the trained pair's.
            max_tokens: number of tokens of the texts of a new text tower; others have the trained pair's.

        Raises:
            UserError: If open_clip's configuration cannot describe the pair.
        """
        side = self.tower.side
        of = self.described
        if side == "text":
            size, tokens = image_size or old.image_size, max_tokens
        else:
            size, tokens = image_size or of.image_size, old.max_tokens or _own_tokens(old.of)
        model, new = _composed(old, of.of, side, size, tokens)
        return Composed(model, new, size, tokens)

    def sourced(self, new: list[str]) -> str:
        """Return the name of the tower with the source of its weights, for the log; `new` are the names of new ones."""
        weights = self.tower.weights
        pair = resolved(self.described.of)
        if weights == RANDOM:
            return f"that of {pair} with random weights"
        return f"that of {pair} with the weights {weights!r}{', new: ' * bool(new)}{', '.join(new)}"

    def images(self) -> dict[str, Any]:
        """Return the preprocessing of the images of the pair, as a record."""
        described, weights = self.described, str(self.tower.weights)
        if weights == RANDOM:
            return preprocessing_of(described.of, described.image_size).as_dict()
        record = described.images or preprocessing_of_weights(described.of, weights, described.image_size)
        if record is None or "mean" not in record:  # a transform of the user's own
            return preprocessing_of(described.of, described.image_size).as_dict()
        return record

    def state(self, tower: Any, image_size: int | None, max_tokens: int) -> tuple[dict[str, Tensor], list[str]]:
        """Return the weights of the tower, and the names of those that are new.

        New are the weights whose shape depends on the embedding dimension, if the trained pair has another.

        Args:
            tower: the tower to fill, with random weights.
            image_size: side of its images in pixels.
            max_tokens: number of tokens of its texts.

        Raises:
            UserError: If the weights cannot be loaded, or are not those of the tower's pair.
        """
        expected: dict[str, Tensor] = tower.state_dict()
        if self.tower.weights == RANDOM:
            return expected, sorted(expected)
        of, image = self.described, self.tower.side == "image"
        whole = build_model(of.of, image_size if image else of.image_size, of.max_tokens if image else max_tokens)
        published = load_published(self.tower.name, str(self.tower.weights), digest=False)
        state = convert_to_custom_text_state_dict(dict(published.network.state_dict()))
        load_state(whole, resolved(of.of), state, repr(self.tower.weights), "the weights")
        own = getattr(whole, TOWERS[self.tower.side]).state_dict()
        new = sorted(name for name, tensor in expected.items() if own[name].shape != tensor.shape)
        return {name: expected[name] if name in new else tensor for name, tensor in own.items()}, new


def _check_class(path: Path) -> None:
    """Refuse checkpoints and exports that are no pair of towers of open_clip's form."""
    if is_checkpoint(path):
        kind = class_of(saved_settings(AtomicCheckpointIO().load_checkpoint(path, map_location="meta")))
    elif is_folder(path) and not (path / CONFIG_NAME).is_file():
        kind = str(read_config(path)["class"])
    else:
        return
    if kind == "NewTower":
        raise UserError(
            f"Expected a pair of towers as model.pair.weights, got the tower alone in {str(path)!r}: give it as "
            "model.image.weights or model.text.weights."
        )
    if kind == "MMLGModule":
        raise UserError(
            f"Expected a pair of towers as model.pair.weights, got a training of MMLGModule in {str(path)!r}: export "
            "it with --layout open_clip, and give that folder."
        )


def _own_tokens(model: Model) -> int:
    """Return the number of tokens of a pair's texts without a given one."""
    return int(model_config(model, None, None)["text_cfg"].get("context_length") or 77)


def _composed(
    old: PairDescription, new: Model, side: Side, image_size: int | None, max_tokens: int
) -> tuple[Model, Model]:
    """Return the descriptions of a trained pair with another's tower, and of the other with the embedding dimension.

    Either tower may be described by itself, as a network of timm or an encoder of transformers: it then replaces that
    of the other description. Two of MobileCLIP's shapes become one; all others one configuration of open_clip's.

    Args:
        old: the trained pair.
        new: the other pair.
        side: the tower of the other pair.
        image_size: side of the images in pixels.
        max_tokens: number of tokens of the texts.

    Raises:
        UserError: If open_clip's configuration cannot describe one of them.
    """
    width = model_config(old.of)["embed_dim"]
    own = _tower(new, side)
    if isinstance(own, (ImageTower, TextTower)):
        described = _with_tower(own, side, old.of, {"image_size": old.image_size, "max_tokens": old.max_tokens})
        return described, described
    kept_side: Side = "text" if side == "image" else "image"
    kept = _tower(old.of, kept_side)
    shape = preset_of(own)
    if isinstance(kept, (ImageTower, TextTower)):
        other = _of_width(own, width)
        sizes = {"max_tokens": max_tokens} if side == "text" else {"image_size": image_size}
        return _with_tower(kept, kept_side, other, sizes), other
    kept_shape = preset_of(kept)
    if shape is not None and kept_shape is not None:
        new_shape = _of_width(shape, width)
        images, texts = (new_shape, kept_shape) if side == "image" else (kept_shape, new_shape)
        assert isinstance(images, ModelShape)
        text = {name: getattr(texts, name) for name in ("width", "layers", "causal", "mixers")}
        return dataclasses.replace(images, embed_dim=width, **text), new_shape
    _check_expressible(kept_shape, kept_side, str(kept))
    _check_expressible(shape, side, str(own))
    configs = {kept_side: model_config(kept, None, None), side: model_config(own, None, None)}
    # open_clip has one activation for all of its own networks; each network of timm and of transformers has its own.
    native = kept_side == "text" or "timm_model_name" not in configs["image"]["vision_cfg"]
    quick = bool(configs[kept_side if native else side].get("quick_gelu"))
    both = {"vision_cfg": configs["image"]["vision_cfg"], "text_cfg": configs["text"]["text_cfg"], "quick_gelu": quick}
    name = f"{side} tower of {own} in the space of {kept}"
    return _of_open_clip(name, both, width), _of_width(own, width, quick)


def _with_tower(tower: ImageTower | TextTower, side: Side, of: Model, sizes: Mapping[str, int | None]) -> NewTower:
    """Return a pair with another tower, independent of files."""
    fields: dict[str, Any] = {side: tower, **plain({"of": of}), **sizes}
    return NewTower(**fields).completed()


def _of_width(pair: Model, width: int, quick: bool | None = None) -> ModelShape | OpenClipConfig:
    """Return a pair of MobileCLIP's or of open_clip's with another embedding dimension, perhaps another activation."""
    shape = preset_of(pair)
    if shape is not None:
        # A new tower trains whole, also the bias that the vendor's first networks lack.
        return dataclasses.replace(shape, embed_dim=width, projection_bias=True)
    config = model_config(pair, None, None)
    return _of_open_clip(str(pair), config if quick is None else config | {"quick_gelu": quick}, width)


def _of_open_clip(name: str, config: Mapping[str, Any], width: int) -> OpenClipConfig:
    """Return the parts of a configuration of open_clip's that describe towers, with an embedding dimension."""
    kept = {key: config[key] for key in ("vision_cfg", "text_cfg")}
    quick = {"quick_gelu": True} if config.get("quick_gelu") else {}
    return OpenClipConfig(name, {"embed_dim": width, **kept, **quick, "custom_text": True})


def _tower(model: Model, side: Side) -> ImageTower | TextTower | Model:
    """Return the description of one tower: by itself, or a pair that is neither of towers nor with a new tower."""
    given = resolved(model)
    if isinstance(given, (NewTower, TowerPair)):
        own = given.image if side == "image" else given.text
        if own is not None:
            return dataclasses.replace(own, weights=RANDOM)
        assert isinstance(given, NewTower)
        assert given.of is not None
        return _tower(given.of, side)
    return given


def _check_expressible(shape: ModelShape | None, side: Side, name: str) -> None:
    """Refuse a tower of MobileCLIP's that open_clip's configuration cannot describe."""
    if shape is None:
        return
    additions = {"mixers": shape.mixers} if side == "text" else {}
    if side == "image":
        additions = {"the vendor's stem": shape.vendor_stem, "options of its own": bool(shape.image_options)}
    for addition, present in additions.items():
        if present:
            raise UserError(
                f"Expected towers that open_clip's configuration describes, got the {side} tower of {name} with "
                f"{addition}: put towers of MobileCLIP's together, or take another tower."
            )
