"""Trained models out of files, and into the files of other projects."""

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import open_clip
import torch
from lightning.pytorch.utilities import rank_zero_info
from open_clip import CustomTextCLIP
from open_clip.model import convert_to_custom_text_state_dict
from open_clip.transform import PreprocessCfg, merge_preprocess_dict
from open_clip.transformer import VisionTransformer as OpenClipViT
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from timm.models import VisionTransformer as TimmViT
from torch import Tensor, nn
from torchvision.transforms import v2

from ...callbacks import AtomicCheckpointIO
from ...callbacks.checkpoints.sharded_checkpoint import METADATA
from ...common.files import check_free, replacing, writing
from ..base.preprocessing import is_checkpoint, recorded_preprocessing
from .checkpoint import fit, is_vit, own_names, to_vendor, vendor_name
from .models import PRESETS, Interpolation, Three, build_model, has_vendor_stem, model_config

_WRAPPED, _STUDENT, _AVERAGE = "module.", "student.", "average."
_CONFIG, _WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"  # open_clip looks for these


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """What a model expects to be done with an image.

    Attributes:
        image_size: side of what the model sees, pixels.
        mean: subtracted from the channels, on the 0-1 scale.
        std: what the channels are divided by then.
        interpolation: how it is resized.
        resize_mode: "shortest" gives the shorter side that size and cuts the middle out, "squash" gives it to both.
        resize: size of the side before the cut, where it is another.
    """

    image_size: int
    mean: Three
    std: Three
    interpolation: Interpolation
    resize_mode: Literal["shortest", "squash"] = "shortest"
    resize: int | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any], source: str) -> "Preprocessing":
        """Of what a checkpoint says.

        Args:
            record: in the words of `recorded_preprocessing`.
            source: where it is from, for messages.

        Raises:
            ValueError: if it names a transform that does not say what it does.
        """
        if "transform" in record:
            raise ValueError(
                f"Found the transform {record['transform']} in {source}, expected one that says what it does to a "
                "image: evaluate with CLIPEvalTransform or ALBEFEvalTransform as data.eval_transform, or export in a "
                "layout that does not say it."
            )
        return cls(**{field.name: record[field.name] for field in dataclasses.fields(cls) if field.name in record})

    def transform(self) -> v2.Transform:
        """A PIL image, or an 8-bit one [3, H, W], to float [3, S, S], normalised."""
        if self.resize_mode not in ("shortest", "squash"):
            raise ValueError(
                f"Found the resize_mode {self.resize_mode!r}, expected shortest or squash, since nothing here fills "
                "images up: choose other weights."
            )
        squash, side = self.resize_mode == "squash", self.resize or self.image_size
        return v2.Compose(
            [
                v2.RGB(),
                v2.Resize(
                    (side, side) if squash else side,
                    interpolation=v2.InterpolationMode(self.interpolation),
                    antialias=True,
                ),
                v2.CenterCrop(self.image_size),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(self.mean, self.std),
                v2.ToPureTensor(),
            ]
        )


class Pretrained(NamedTuple):
    """A trained model, in eval mode, and what it expects."""

    model: CustomTextCLIP
    preprocessing: Preprocessing


def preprocessing_of(name: str, image_size: int | None = None) -> Preprocessing:
    """What a model expects to be done with an image.

    Weights of one name may differ in it; of open_clip's, those are meant that it lists first.

    Args:
        name: as in `build_model`.
        image_size: side of the images, pixels; the model's own by default.

    Raises:
        ValueError: as `build_model` does.
    """
    size = image_size or model_config(name)["vision_cfg"]["image_size"]
    preset = PRESETS.get(name)
    if preset is not None:
        return Preprocessing(size, preset.mean, preset.std, preset.interpolation)
    tags = open_clip.list_pretrained_tags_by_model(name)
    listed = open_clip.get_pretrained_cfg(name, tags[0]) if tags else {}
    own = PreprocessCfg(**merge_preprocess_dict(PreprocessCfg(), listed))
    return Preprocessing(size, own.mean, own.std, own.interpolation, own.resize_mode)


def load_pretrained(
    name: str, path: str | Path, image_size: int | None = None, context_length: int | None = None
) -> Pretrained:
    """Make a model and give it trained weights.

    Names of open_clip's models say which activation they have, and files do not: OpenAI's weights are of names that
    end in `-quickgelu`.

    Args:
        name: as in `build_model`.
        path: as in `load_weights`.
        image_size: side of the images, pixels; the model's own by default.
        context_length: number of tokens in a text; the model's own by default.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if there is no such model, or the file is not of it.
        RuntimeError: if the file cannot be read.
    """
    model = build_model(name, image_size, context_length)
    rank_zero_info(load_weights(model, name, path))
    return Pretrained(model.eval(), preprocessing_of(name, image_size))


def preprocessing_of_file(name: str, path: str | Path, image_size: int | None = None) -> dict[str, Any] | None:
    """What weights in a file expect to be done with an image, in the words of `recorded_preprocessing`.

    Args:
        name: as in `build_model`.
        path: as in `load_weights`.
        image_size: side of the images, pixels; the model's own by default.

    Returns:
        What a checkpoint of ours or a folder of open_clip's says, else what is known of the model; None for a
        checkpoint that does not say.
    """
    file = Path(path).expanduser()
    if is_checkpoint(file):
        content = AtomicCheckpointIO().load_checkpoint(file)
        return preprocessing_of_training(content) if "model" in content.get("hyper_parameters", {}) else None
    own = dataclasses.asdict(preprocessing_of(name, image_size))
    beside = file.parent / _CONFIG
    if file.name == _WEIGHTS and beside.is_file():
        noted = json.loads(beside.read_text(encoding="utf-8")).get("preprocess_cfg", {})
        own |= {field: value for field, value in noted.items() if field in own}
    return own


def preprocessing_of_training(content: Mapping[str, Any]) -> dict[str, Any]:
    """What evaluation did to an image in a training, in the words of `recorded_preprocessing`.

    Where the datamodule is not one of this package the module's arguments say it, and what they leave out is the
    model's own.

    Args:
        content: its checkpoint.
    """
    recorded = recorded_preprocessing(content)
    arguments = content["hyper_parameters"]
    if recorded is None:
        return given_preprocessing(arguments)
    size = arguments["image_size"] or recorded.get("image_size")
    return recorded if "transform" in recorded else recorded | {"image_size": size}


def given_preprocessing(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What the arguments of `MobileCLIPModule` say; what they leave out is the model's own."""
    own = dataclasses.asdict(preprocessing_of(arguments["model"], arguments["image_size"]))
    given = {part: arguments[f"image_{part}"] for part in ("mean", "std", "interpolation")}
    return own | {part: value for part, value in given.items() if value is not None}


def rebuild(arguments: Mapping[str, Any], state: Mapping[str, Tensor], source: str) -> CustomTextCLIP:
    """The network that a training evaluates, in eval mode.

    Args:
        arguments: the module's.
        state: of that network.
        source: where it is from, for messages.

    Raises:
        ValueError: if the state is not of that network.
    """
    name, image_size = arguments["model"], arguments["image_size"]
    model = build_model(name, image_size, arguments["max_tokens"])
    if "logit_bias" not in state:
        model.logit_bias = None
    model.load_state_dict(fit(model, state, source, str))
    return model.eval()


def of_training(content: Mapping[str, Any], source: str) -> tuple[CustomTextCLIP, str]:
    """The network of a training's checkpoint: the moving average where there is one, else the student.

    Args:
        content: the checkpoint.
        source: where it is from, for messages.

    Returns:
        The network, and which of the two it is.

    Raises:
        ValueError: if it is of no training of this package, or does not fit its own arguments.
    """
    state = content["state_dict"]
    kind = "average" if any(key.startswith(_AVERAGE) for key in state) else "student"
    arguments = content["hyper_parameters"]
    missing = [name for name in ("model", "image_size", "max_tokens", "image_mean") if name not in arguments]
    if missing:
        raise ValueError(
            f"Found no {' and no '.join(missing)} among the hyper_parameters of {source}, expected those of "
            "MobileCLIPModule: it is of another class, or of another version of vlightning."
        )
    return rebuild(arguments, _below(f"{kind}.", state), source), kind


def load_weights(model: CustomTextCLIP, name: str, path: str | Path) -> str:
    """Give a model trained weights, all of them or none.

    Args:
        model: what to fill.
        name: of the model, for messages.
        path: a file of `torch.save` or `.safetensors`, in the vendor's layout or open_clip's, or a checkpoint of a
            training here, of which the averaged weights are taken if there are any.

    Returns:
        What was loaded, a sentence for the log.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is something else, or of another model.
        RuntimeError: if it cannot be read.
    """
    source = repr(str(path))
    state, kind = _read(Path(path).expanduser(), source)
    say: Callable[[str], str | None] = str
    if any(key.startswith("image_encoder.") for key in state):
        state, say = own_names(model, state), partial(vendor_name, vit=is_vit(model.state_dict()))
        kind = "the vendor's checkpoint"
    if model.logit_bias is None:
        state.pop("logit_bias", None)  # SigLIP's, which no features depend on
    notes = _resize_positions(model, state)
    fitted = fit(model, state, source, say)
    notes += [f"with zeros for {key}, which it lacks" for key in fitted.keys() - state.keys()]
    model.load_state_dict(fitted)
    return f"{name} starts with {kind} {source}{''.join(f', {note}' for note in notes)}."


def save_vendor(model: CustomTextCLIP, path: str | Path) -> None:
    """Write a `.pt` file that the vendor's code loads.

    Args:
        model: MobileCLIP-S0, -S1, -S2 or -B, not fused.
        path: of the file.

    Raises:
        ValueError: if the vendor's code has no such model.
        OSError: if it cannot be written; a file that was there before is then unchanged.
    """
    state = model.state_dict()
    if is_vit(state) and not has_vendor_stem(model):
        raise ValueError(
            "Found timm's ViT, which the vendor's code would read as its own with another stem: write the layout of "
            "open_clip."
        )
    AtomicCheckpointIO().save_checkpoint(to_vendor(state), Path(path).expanduser())


def save_open_clip(model: CustomTextCLIP, name: str, preprocessing: Preprocessing, folder: str | Path) -> None:
    """Write a folder that `open_clip.create_model_and_transforms("local-dir:<folder>")` loads; all of it or nothing.

    Args:
        model: what to write, not fused.
        name: as it was built by.
        preprocessing: what it expects.
        folder: a new or an empty one.

    Raises:
        ValueError: if open_clip has no such model.
        FileExistsError: if there is something of that name already.
        OSError: if it cannot be written.
    """
    _check_sayable(preprocessing)
    check_free(Path(folder).expanduser().absolute())
    write_open_clip(model, _checked_config(model, name, preprocessing.image_size), preprocessing, folder)


def write_open_clip(
    model: nn.Module, config: Mapping[str, Any], preprocessing: Preprocessing, folder: str | Path
) -> None:
    """Write a folder that open_clip loads; all of it or nothing.

    Args:
        model: what to write.
        config: what open_clip makes it of.
        preprocessing: what it expects.
        folder: a new or an empty one.

    Raises:
        ValueError: if open_clip's configuration has no words for what it expects.
        FileExistsError: if there is something of that name already.
        OSError: if it cannot be written.
    """
    _check_sayable(preprocessing)
    target = Path(folder).expanduser().absolute()
    check_free(target)
    preprocess = dataclasses.asdict(preprocessing)
    preprocess["size"] = preprocess.pop("image_size")
    del preprocess["resize"]
    # A number has no dimension there.
    state = {
        key: tensor.reshape(()) if key in ("logit_scale", "logit_bias") else tensor.contiguous()
        for key, tensor in model.state_dict().items()
    }
    with replacing(target) as staged, writing(target):
        staged.mkdir()
        save_file(state, staged / _WEIGHTS, {"format": "pt"})
        text = json.dumps({"model_cfg": dict(config), "preprocess_cfg": preprocess}, indent=2)
        (staged / _CONFIG).write_text(text + "\n", encoding="utf-8")


def _check_sayable(preprocessing: Preprocessing) -> None:
    if preprocessing.resize not in (None, preprocessing.image_size):
        raise ValueError(
            f"Found images that are resized to {preprocessing.resize} pixels before {preprocessing.image_size} are "
            "cut out, expected one size, since open_clip's configuration has no word for the other: evaluate with "
            "CLIPEvalTransform as data.eval_transform, or export in another layout."
        )


def _checked_config(model: CustomTextCLIP, name: str, image_size: int) -> dict[str, Any]:
    """What open_clip makes the model of, after checking that it makes this one of it."""
    preset = PRESETS.get(name)
    mixers = preset is not None and preset.mixers
    if mixers or has_vendor_stem(model):
        part = "the mixers of its text tower" if mixers else "the vendor's stem"
        raise ValueError(f"open_clip cannot build {name}, since it does not have {part}: write the layout 'vendor'.")
    config = model_config(name, image_size, model.context_length)
    with torch.device("meta"):
        theirs = CustomTextCLIP(**{key: value for key, value in config.items() if key != "custom_text"})
    made, found = _shapes(theirs), _shapes(model)
    differing = sorted(key for key in made.keys() | found.keys() if made.get(key) != found.get(key))
    if differing:
        raise ValueError(
            f"Found {len(differing)} weights that are not those of the {name} that open_clip makes ({differing[0]}, "
            "...), expected that model, not fused, and a ViT of timm's in its own image size."
        )
    return config


def _shapes(model: CustomTextCLIP) -> dict[str, torch.Size]:
    return {key: tensor.shape for key, tensor in model.state_dict().items() if not key.startswith("logit_")}


def _read(path: Path, source: str) -> tuple[dict[str, Tensor], str]:
    """A state dict in whatever layout, and what it is."""
    if path.is_dir() and not (path / METADATA).is_file():
        raise ValueError(f"Found a folder {source}, expected a file: name one in it, such as {_WEIGHTS}.")
    if not path.exists():
        raise FileNotFoundError(f"Found no file {source}, expected trained weights: correct the path, or download it.")
    state: Any
    try:
        state = load_file(path) if path.suffix == ".safetensors" else AtomicCheckpointIO().load_checkpoint(path)
    # Unpickling what is no pickle ends in any of these, apart from those that have a sentence already.
    except (SafetensorError, LookupError, UnicodeError, AssertionError, struct.error) as error:
        raise RuntimeError(
            f"The checkpoint {source} cannot be read ({error}): it is damaged or of another kind, get it again."
        ) from error
    for entry in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(entry), dict):
            state = state[entry]
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f"Found neither a state dict nor one under 'state_dict' or 'model' in {source}, expected trained weights: "
            "correct the path."
        )
    if all(key.startswith(_WRAPPED) for key in state):
        state = _below(_WRAPPED, state)
    for prefix, kind in ((_AVERAGE, "the averaged weights of"), (_STUDENT, "the student of")):
        if below := _below(prefix, state):
            return below, f"{kind} the training"
    return convert_to_custom_text_state_dict(state), "the checkpoint"


def _below(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _resize_positions(model: CustomTextCLIP, state: dict[str, Tensor]) -> list[str]:
    """Resample a ViT's positions for the model's size of images, in place, and say so."""
    trunk = getattr(model.visual, "trunk", None)
    if isinstance(trunk, TimmViT):
        name, grid = "visual.trunk.pos_embed", trunk.patch_embed.grid_size
        prefix = 0 if trunk.no_embed_class else trunk.num_prefix_tokens
    elif isinstance(model.visual, OpenClipViT):
        name, grid, prefix = "visual.positional_embedding", model.visual.grid_size, 1
    else:
        return []
    found, own = state.get(name), model.state_dict().get(name)
    if found is None or own is None or found.dim() != own.dim() or found.shape[-1] != own.shape[-1]:
        return []
    side = math.isqrt(found.shape[-2] - prefix)
    if found.shape == own.shape or side * side != found.shape[-2] - prefix:
        return []
    resampled = resample_abs_pos_embed(found.reshape(1, -1, found.shape[-1]), list(grid), num_prefix_tokens=prefix)
    state[name] = resampled.reshape(own.shape)
    return [f"with positions resampled from {side}x{side} to {grid[0]}x{grid[1]}"]
