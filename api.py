"""The package in a few lines of Python: `import vlightning as vl`, then `vl.fit`, `vl.distill`, `vl.load`.

A thin layer over the methods, the datamodules, Lightning's Trainer and the commands `search` and `export`: each keyword
goes to the constructor that has it, and nothing is reachable only from here.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from . import callbacks, datamodules
from .commands.cli.links import LINKED
from .commands.cli.listing import PACKAGE_ROOT
from .commands.cli.saved_run import resolved
from .commands.demo.search import Ranked
from .commands.evaluate.encoding import Loading, encode_images, encode_texts
from .commands.evaluate.model import ImageTextModel, embeds_both, load_model, model_of_module
from .commands.evaluate.row_sets import NamedImages
from .commands.export.reading import from_pretrained
from .commands.search.images import opened_search
from .common.errors import UserError
from .common.files import read_yaml
from .common.messages import silence_noise
from .common.names import did_you_mean
from .common.preprocessing import Preprocessing
from .datamodules.base.faults import BadSample
from .datamodules.base.hyperparameters import constructor_arguments
from .datamodules.base.memory import stored_image
from .datamodules.reading.tar import IMAGE_SUFFIXES
from .lightning_modules import method_classes
from .lightning_modules.base.method import Method
from .lightning_modules.core.checkpoints import CONFIG_FILE, WEIGHTS_FILE, read_config

SPLIT = "0.9/0.1"
"""Shares of training and validation where neither a validation nor a split is given."""
_QUIET = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}


class Model:
    """A trained model.

    Args:
        module: the method, or the network of a published model.
        trainer: the Trainer of the fit; None for a model that was loaded.
        encoders: the model as `vlightning evaluate` loads it; None for one that does not embed images and texts.
    """

    def __init__(self, module: Any, trainer: pl.Trainer | None = None, encoders: ImageTextModel | None = None) -> None:
        self.module = module
        self.trainer = trainer
        self.encoders = encoders

    def __repr__(self) -> str:
        """Return the class of the method, the number of parameters, and the metrics of the validation."""
        parameters = sum(parameter.numel() for parameter in self.module.parameters())
        reached = [f"{name} {value:.4g}" for name, value in self.metrics.items() if name.startswith("val/")]
        return f"Model({', '.join([type(self.module).__name__, f'{parameters:,} parameters', *reached])})"

    @property
    def metrics(self) -> dict[str, float]:
        """The last metrics of the fit by name; empty for a model that was loaded."""
        logged = {} if self.trainer is None else self.trainer.callback_metrics
        return {name: float(value) for name, value in logged.items() if value.numel() == 1}

    def embed(self, inputs: Any, batch_size: int = 64, num_workers: int = 0) -> Tensor:
        """Return unit-length embeddings of images or texts, [N, E], on the CPU.

        Args:
            inputs: a text, or an image: a path (a `Path`, or a string with the suffix of an image), an image of Pillow
                or an array as in `MemoryRows`; or a list of either.
            batch_size: images that are embedded at a time.
            num_workers: processes that read images.

        Raises:
            UserError: If the model does not embed, texts are mixed with images, or an image cannot be used.
        """
        model = self._embedding()
        several = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
        if not several:
            raise UserError("Expected images or texts to embed, got an empty list: give at least one.")
        images = [not isinstance(one, str) or one.lower().endswith(IMAGE_SUFFIXES) for one in several]
        if not any(images):
            return encode_texts(model, several)
        if not all(images):
            raise UserError(
                f"Expected images alone or texts alone to embed, got the text {several[images.index(False)]!r} among "
                "images: embed them apart."
            )
        samples = NamedImages(_contents(several), model.transform)
        encoded = encode_images(model, samples, Loading(batch_size, num_workers))
        if encoded.named:
            raise UserError(f"Expected images to embed, got {encoded.named[0]}: correct or leave it out.")
        return encoded.features

    def predict(self, images: Any) -> Tensor:
        """Return the probabilities of the classes for images, [N, C], on the CPU; images as of `embed`.

        Raises:
            UserError: If the model is no classifier, or an image cannot be used.
        """
        record = self.module.preprocessing() if isinstance(self.module, Method) else None
        if self.encoders is not None or record is None:
            raise UserError("Expected a classifier to predict classes, got another model: embed images and classes.")
        several = list(images) if isinstance(images, (list, tuple)) else [images]
        samples = NamedImages(_contents(several), Preprocessing.from_dict(record, "the model").transform())
        try:
            pixels = torch.stack([samples[number].image for number in range(len(samples))])
        except BadSample as bad:
            raise UserError(f"Expected images, got {bad.fault.name} ({bad.fault.cause}): correct it.") from None
        with torch.no_grad():
            return self.module.eval()(pixels.to(self.module.device)).softmax(-1).cpu()

    def search(
        self,
        images: str | Path,
        query: Any,
        count: int = 10,
        *,
        captions: str | None = None,
        caption_column: str | None = None,
        image_column: str = "image",
        cache: str | None = None,
        batch_size: int = 64,
        num_workers: int = 0,
    ) -> list[Ranked]:
        """Return the images that a text or an image ranks first, as `vlightning search`, whose options these are.

        Args:
            images: a folder, or a table of images.
            query: a text, or an image as of `embed`.
            count: number of images.
            captions: table with titles of the images of a folder; by default one in the folder.
            caption_column: column of the titles.
            image_column: column of the images in a table.
            cache: folder of the kept embeddings; by default that of the demo.
            batch_size: images that are embedded at a time.
            num_workers: processes that read images.

        Raises:
            UserError: If the model does not embed, or an argument is wrong.
        """
        if count < 1:
            raise UserError(f"Expected a count of at least 1, got {count}: increase it.")
        search = opened_search(
            self._embedding(),
            str(images),
            captions=captions,
            caption_column=caption_column,
            image_column=image_column,
            cache=cache,
            loading=Loading(batch_size, num_workers),
        )
        if isinstance(query, str) and not query.lower().endswith(IMAGE_SUFFIXES):
            return search.rank(query, count)
        return search.rank_by_embedding(self.embed(query)[0], count)

    def save(self, folder: str | Path) -> None:
        """Write the model to a new folder, as `vlightning export --layout vlightning`; `load` reads it.

        Raises:
            UserError: If the folder is not empty, or the model is a published one.
        """
        if not isinstance(self.module, Method):
            raise UserError("Expected a model of this package to save, got a published one: load it by its name.")
        self.module.save_pretrained(folder)

    def _embedding(self) -> ImageTextModel:
        if self.encoders is None:
            raise UserError(
                f"Expected a model of images and texts, got {type(self.module).__name__}: use `predict`, or `module`."
            )
        return self.encoders


def fit(
    data: Any,
    model: str | Method | None = None,
    /,  # `model` by its name is the option of the method, such as CLIPModule's
    *,
    start: str | None = None,
    lora: bool = False,
    **options: Any,
) -> Model:
    """Train a model on image-text pairs.

    Args:
        data: what a datamodule's `train` takes (a file, a folder, a hub name, or rows in memory), or a datamodule.
            Without `validation` or `split`, a tenth of the rows validates.
        model: a shipped config, `METHOD-NAME` such as `clip-small` (`configs/clip/small.yaml`, the default), or the
            path of a YAML file; or a method.
        start: a published model to fine-tune by `configs/clip/finetune.yaml`, as `NAME/TAG` of open_clip's, or a
            folder.
        lora: whether to fine-tune low-rank adapters (`configs/clip/lora.yaml`).
        **options: arguments of the method, of its datamodule and of Lightning's Trainer, in place of those of the
            config. One that several have goes to each.

    Raises:
        UserError: If an option is unknown or wrong, or the data cannot be used.
    """
    if start is not None and model is not None:
        raise UserError("Expected a model to train or `start` to fine-tune, got both: leave one out.")
    if lora and start is None:
        raise UserError("Expected `start` with lora=True, which adapts a published model, got none: give it.")
    if start is None:
        return _fit(data, "clip-small" if model is None else model, options)
    folder = Path(start).expanduser()
    name, _, weights = start.rpartition("/")
    is_folder = folder.exists() or start.startswith("local-dir:")
    if not is_folder and not name:
        raise UserError(
            f"Expected `start` as NAME/TAG, such as ViT-B-32/openai, or a folder, got {start!r}: correct it."
        )
    initial = {"weights": start} if is_folder else {"model": name, "weights": weights}
    return _fit(data, _config("clip-lora" if lora else "clip-finetune"), initial | options)


def distill(
    images: Any, *, teacher: str, student: str = "resnet20", teacher_name: str | None = None, **options: Any
) -> Model:
    """Train a small classifier from a large one, by CoCoRD.

    Args:
        images: labeled images, as `ImageClassificationDataModule` takes them, or a datamodule.
        teacher: weights of the teacher: the folder of a run or of `Model.save`, a file, or the name of the library's.
        student: name of a CIFAR network, or of a model of torchvision or timm.
        teacher_name: name of the teacher's network; by default that of the run or of the saved model.
        **options: as of `fit`.

    Raises:
        UserError: As `fit`.
    """
    network = teacher_name or _student_of(teacher)
    saved = Path(teacher).expanduser() / WEIGHTS_FILE
    networks = {"student": student, "teacher": {"name": network, "weights": str(saved) if saved.is_file() else teacher}}
    return _fit(images, {"model": {"class_path": "CoCoRDModule"}, "data": {"class_path": _LABELS}}, networks | options)


_LABELS = "ImageClassificationDataModule"


def _data_of(module: type) -> str:
    """Return the name of the datamodule for a config that names none; the method is compared by name to stay lazy."""
    return _LABELS if "CoCoRDModule" in {base.__name__ for base in module.__mro__} else "ImageTextDataModule"


def load(model: str | Path, weights: str | None = None) -> Model:
    """Load a model: an export, a run's folder, a checkpoint, or a published model.

    Args:
        model: the folder or the file; or a name of open_clip's, with `weights`.
        weights: a tag of open_clip's or a file, for a name.

    Raises:
        UserError: If there is no such model.
    """
    path = Path(model).expanduser()
    if weights is None and (path / CONFIG_FILE).is_file():
        name = str(read_config(path).get("class"))
        if name in (classes := method_classes()) and not embeds_both(classes[name]):
            return Model(from_pretrained(path).model)
    encoders = load_model(str(model), weights)
    return Model(encoders.network, encoders=encoders)


def _fit(data: Any, model: Any, options: dict[str, Any]) -> Model:
    """Build module, datamodule and Trainer, fit, and return the model."""
    silence_noise()
    config = {} if isinstance(model, Method) else _config(model) if isinstance(model, str) else model
    of_model = config.get("model", {})
    of_data = config.get("data", {})
    module_class = type(model) if isinstance(model, Method) else _class_of(of_model["class_path"], method_classes())
    data_class = (
        type(data)
        if isinstance(data, pl.LightningDataModule)
        else _class_of(of_data.get("class_path", _data_of(module_class)), vars(datamodules))
    )
    to_module, to_data, to_trainer = _routed(options, module_class, data_class)
    trainer_options = {**config.get("trainer", {}), **to_trainer}
    trainer_options["logger"] = to_trainer.get("logger", False)  # a config's is an entry of a file
    more = to_trainer.get("callbacks") or []
    named = [_callback(entry) for entry in config.get("trainer", {}).get("callbacks", ())]
    trainer_options["callbacks"] = [*named, *(more if isinstance(more, Sequence) else [more])]
    pl.seed_everything(options.get("seed", config.get("seed_everything", 0)), workers=True, verbose=False)
    if isinstance(data, pl.LightningDataModule):
        if unused := [name for name in to_data if name not in to_module and name not in to_trainer]:
            raise UserError(
                f"Expected options of the model and the Trainer beside a datamodule, got {unused[0]}: set it there."
            )
    else:
        divided = {} if {"validation", "split"} & to_data.keys() else {"split": SPLIT}
        data = data_class(**{**of_data.get("init_args", {}), **divided, **to_data, "train": _with_path(data)})
    if not isinstance(model, Method):
        arguments = _merged(of_model.get("init_args", {}), to_module)
        if "num_classes" in inspect.signature(module_class).parameters:
            arguments.setdefault("num_classes", data.num_classes)
        _link(arguments, module_class, data.hparams)
        model = module_class(**arguments)
    elif to_module:
        raise UserError(f"Expected no options of the model beside a method, got {next(iter(to_module))}: set it there.")
    trainer = pl.Trainer(**{**_QUIET, **trainer_options})
    trainer.fit(model, datamodule=data)
    encoders = model_of_module(model, module_class.__name__) if embeds_both(module_class) else None
    return Model(model, trainer, encoders)


def _routed(
    options: Mapping[str, Any], module: type, data: type
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the options of the method, the datamodule and the Trainer, each for all that have it.

    Raises:
        UserError: If none has it.
    """
    of_trainer_class = set(inspect.signature(pl.Trainer).parameters)
    names = set(inspect.signature(module).parameters), set(constructor_arguments(data)), of_trainer_class
    for name in options:
        if not any(name in known for known in names):
            raise UserError(
                f"Expected an option of {module.__name__}, {data.__name__} or the Trainer, got {name!r}: "
                f"{did_you_mean(name, sorted(set().union(*names)))}"
            )
    of_module, of_data, of_trainer = ({name: options[name] for name in options if name in known} for known in names)
    return of_module, of_data, of_trainer


def _link(arguments: dict[str, Any], module: type, data: Mapping[str, Any]) -> None:
    """Set arguments of a method, also those in a group of settings, to the values of the data, as the commands do.

    Raises:
        UserError: If an argument is given and differs from that of the data.
    """
    parameters = inspect.signature(module).parameters
    for name in LINKED:
        if (value := data.get(name)) is None:
            continue
        grouped = {group for group, one in parameters.items() if name in _fields(one.default)}
        for group in {None} if name in parameters else grouped:
            target = arguments if group is None else arguments.setdefault(group, {})
            if not isinstance(target, dict):  # a group of settings as an object, which is complete
                continue
            if target.setdefault(name, value) != value:
                where = name if group is None else f"{group}.{name}"
                raise UserError(
                    f"Expected the same {name} for {module.__name__} and its data, got {where}={target[name]!r} and "
                    f"{name}={value!r}: give {name} only."
                )


def _fields(group: Any) -> set[str]:
    """Return the names of the settings of a group; none for another value."""
    return {field.name for field in dataclasses.fields(group)} if dataclasses.is_dataclass(group) else set()


def _config(name: str) -> dict[str, Any]:
    """Return a shipped config by its name, such as `clip-small`, or that of a YAML file.

    Raises:
        UserError: If there is none.
    """
    if name.endswith((".yaml", ".yml")):
        if not Path(name).expanduser().is_file():
            raise UserError(f"Expected a YAML file of a config, got {name!r}, which does not exist: correct the path.")
        return _read_config(Path(name).expanduser())
    files = {
        f"{file.parent.name}-{file.stem.replace('_', '-')}": file for file in PACKAGE_ROOT.glob("configs/*/*.yaml")
    }
    if name not in files:
        raise UserError(
            f"Expected a config as METHOD-NAME, such as clip-small, a YAML file or a method, got {name!r}: "
            f"{did_you_mean(name, sorted(files))}"
        )
    return _read_config(files[name])


def _read_config(file: Path) -> dict[str, Any]:
    """Return the content of a config after that of the configs which it changes (its line `needs`).

    Raises:
        UserError: If one of them cannot be read.
    """
    content = dict(read_yaml(file))
    needs = content.pop("needs", [])
    merged: dict[str, Any] = {}
    for needed in [needs] if isinstance(needs, str) else needs:
        merged = _merged(merged, _read_config(file.parent / needed))
    return _merged(merged, content)


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings, those of `second` before those of `first`."""
    merged = dict(first)
    for name, value in second.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _class_of(name: str, classes: Mapping[str, Any]) -> Any:
    if name not in classes:
        raise UserError(f"Expected a class of this package, got {name!r}: {did_you_mean(name, sorted(classes))}")
    return classes[name]


def _callback(entry: Mapping[str, Any]) -> Any:
    return getattr(callbacks, entry["class_path"])(**entry.get("init_args", {}))


def _with_path(data: Any) -> Any:
    return str(data) if isinstance(data, Path) else data


def _contents(images: Sequence[Any]) -> dict[str, bytes | Path]:
    """Return images by their positions, encoded or as paths."""
    contents: dict[str, bytes | Path] = {}
    for number, image in enumerate(images):
        try:
            stored = stored_image(image)
        except BadSample as bad:
            raise UserError(
                f"Expected an image or a text, got {bad.fault.cause} at position {number}: convert it."
            ) from None
        contents[f"image {number}"] = stored["bytes"] if stored["path"] is None else Path(stored["path"])
    return contents


def _student_of(weights: str) -> str | None:
    """Return the name of the network that CoCoRD trained, of a run or an export; None for other weights."""
    path = Path(weights).expanduser()
    if not path.exists():
        return None
    if (path / CONFIG_FILE).is_file():
        arguments = read_config(path).get("arguments") or {}
    elif (checkpoint := resolved(weights)).suffix == ".ckpt":
        arguments = callbacks.AtomicCheckpointIO().load_checkpoint(checkpoint).get("hyper_parameters") or {}
    else:
        return None
    name = arguments.get("student")
    return None if name is None else str(name)
