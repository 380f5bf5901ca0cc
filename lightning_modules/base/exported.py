"""Export of a method: a folder that `from_pretrained` and `weights` read, and further layouts of a method."""

import inspect
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self, TypeVar

from safetensors.torch import save_file
from torch import Tensor

from ...callbacks import rank
from ...common.errors import UserError
from ...common.files import check_free, replacing
from ..core.checkpoints import (
    CONFIG_FILE,
    ORDERS_KEY,
    WEIGHTS_FILE,
    class_name,
    read_folder,
    unsharded_class,
)
from ..core.fitting import load_fitting
from ..core.programs import HALF
from ..core.settings import accepted_names
from ..core.towers import SPACE, Space
from ..core.trainers import datamodule_of
from ..core.transformers_files import save_tokenizer, special_token_ids
from .evaluated import EvaluatedModule
from .model_card import CARD_FILE, Provenance, Training, model_card
from .sharding import full_state
from .start import InitialState

FOLDER = "vlightning"
"""Name of the layout that every method has."""
LAYOUT = "a folder with model.safetensors, config.json, the tokenizer and README.md, which from_pretrained reads"
"""Description of that layout."""
Module = TypeVar("Module", bound="ExportedModule")


class ExportedModule(EvaluatedModule):
    """A module that is exported from a run or from its checkpoint.

    A method with further layouts overrides `layouts` and `write_layout`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._initial = InitialState()
        self.provenance = Provenance()
        self.space: Space | None = None
        """The space of another pair that a tower was trained into; None for a model with a space of its own."""

    @classmethod
    def layouts(cls) -> dict[str, str]:
        """Return the description of each layout; the first is the default of `vlightning export`."""
        return {FOLDER: LAYOUT}

    @classmethod
    def half_precisions(cls) -> dict[str, tuple[str, ...]]:
        """Return the half precisions of each layout that has any.

        These are the folder of a model of images, whose features show the error, and programs, if `write_layout` takes
        a `dtype`.
        """
        kinds = HALF if "dtype" in inspect.signature(cls.write_layout).parameters else {}
        written = {layout: kinds[layout] for layout in cls.layouts() if layout in kinds}
        of_images = hasattr(cls, "encode_images") or [*inspect.signature(cls.forward).parameters] == ["self", "image"]
        return {FOLDER: ("float16", "bfloat16"), **written} if of_images else written

    @classmethod
    def write_layout(cls, content: Mapping[str, Any], source: str, target: str, layout: str) -> str:
        """Write the model of a checkpoint in a layout other than `FOLDER`.

        An override may take a `dtype` besides, the precision of programs (`half_precisions`).

        Args:
            content: The checkpoint.
            source: Description of the checkpoint for messages.
            target: The file or folder to write.
            layout: A name in `layouts()`, except `FOLDER`.

        Returns:
            A sentence that names what was written.

        Raises:
            UserError: If the weights do not fit the settings in the checkpoint, or the target cannot be written.
        """
        raise NotImplementedError(f"Expected {cls.__name__}.write_layout for the layout {layout!r}, got none: add it.")

    def export(self, target: str | Path, layout: str = FOLDER) -> None:
        """Write the trained model in a layout, as `FinalExport` does when a run ends; every process must call it.

        Args:
            target: A new name or an empty folder; some layouts are files.
            layout: A name in `layouts()`.

        Raises:
            UserError: If there is no such layout, or as `write_layout` and `save_pretrained`.
        """
        if layout not in self.layouts():
            raise UserError(
                f"Expected {' or '.join(self.layouts())} as the layout of {class_name(self)}, got {layout!r}: "
                "correct it."
            )
        if layout == FOLDER:
            self.save_pretrained(target)
            return
        content = self._exported_checkpoint()
        if rank() == 0:
            unsharded_class(self).write_layout(content, "the module", str(target), layout)

    def _exported_checkpoint(self) -> dict[str, Any]:
        """Return what `write_layout` reads of a checkpoint; a collective call, whose weights rank 0 gets."""
        data = dict(self.provenance.training_of(self).data)
        recorded: dict[str, Any] = {"preprocessing": self.preprocessing()}
        if data.get("tokenizer") is None:  # the run trained it
            recorded["tokenizer"] = self.provenance.tokenizer_of(self)
        content = {"exported": recorded, **self.provenance.checkpoint}
        content |= {"hyper_parameters": dict(self.hparams), "datamodule_hyper_parameters": data}
        if self.global_step:
            content["global_step"] = self.global_step
        self.on_save_checkpoint(content)
        return content | {"state_dict": full_state(self)}

    def pretrained_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the state dict that `save_pretrained` writes; by default all."""
        return state

    def load_pretrained_state(self, state: Mapping[str, Tensor], source: str) -> None:
        """Load the tensors of an export or of a checkpoint; `source` describes it for messages.

        Raises:
            UserError: If they do not fit.
        """
        load_fitting(self, state, f"{type(self).__name__} from {source}")

    def find_networks(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the frozen networks that a checkpoint names without their weights, for an export; by default none.

        Raises:
            UserError: If they are missing, or are not those of the training.
        """

    def write_networks(self, folder: Path) -> None:
        """Write frozen networks to separate files in the folder of an export; by default none."""

    def read_networks(self, folder: Path) -> None:
        """Load the frozen networks from the files of `write_networks`."""

    def save_pretrained(
        self, folder: str | Path, tokenizer_json: str | None = None, training: Training | None = None
    ) -> None:
        """Write the model to a new folder that `from_pretrained` reads; every process must call it.

        Args:
            folder: New or empty folder, which appears when all of its files are written.
            tokenizer_json: The tokenizer as JSON text of the `tokenizers` library; by default that of the run, the
                checkpoint or the export that the weights come from.
            training: Training for the model card; by default that of the same source.

        Raises:
            UserError: If the folder exists and is not empty.
        """
        state = full_state(self)
        if rank() != 0:
            return
        target = Path(folder).expanduser().absolute()
        check_free(target)
        training = training or self.provenance.training_of(self)
        if tokenizer_json is None:
            tokenizer_json = self.provenance.tokenizer_of(self)
        state = {name: tensor.contiguous() for name, tensor in self.pretrained_state(state).items()}
        preprocessing = self.preprocessing()
        accepted = accepted_names(type(self))  # `hparams` also has the arguments of base classes
        arguments = {name: value for name, value in self.hparams.items() if name in accepted}
        config = {
            "class": class_name(self),
            "vlightning_version": version("vlightning"),
            "arguments": arguments_without_weights(arguments),
            "preprocessing": preprocessing,
            "data": training.text_options(),
            ORDERS_KEY: self.retrieval_orders(),
            SPACE: None if self.space is None else self.space.as_dict(),
        }
        card = model_card(self, state, training, preprocessing, target.name)
        with replacing(target) as staged:
            staged.mkdir()
            save_file(state, staged / WEIGHTS_FILE, metadata={"format": "pt"})
            (staged / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            (staged / CARD_FILE).write_text(card, encoding="utf-8")
            self.write_networks(staged)
            if tokenizer_json is not None:
                _save_tokenizer(self, tokenizer_json, staged)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Rebuild a module from the folder of `save_pretrained`, in eval mode and in the precision of its file.

        Raises:
            UserError: If the folder is not an export of this class, or is damaged.
        """
        path = Path(folder).expanduser()
        config, state = read_folder(path)
        if config["class"] != cls.__name__:
            raise UserError(
                f"Expected an export of {cls.__name__} in {str(folder)!r}, got one of {config['class']}: load it with "
                "that class."
            )
        source = f"the export {str(folder)!r} of vlightning {config['vlightning_version']}"
        module = rebuild(cls, config["arguments"], state, source).eval()
        module.read_networks(path)
        module.adopt_preprocessing(config.get("preprocessing"))
        tokenizer = path / "tokenizer.json"
        tokenizer_json = tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else None
        module.provenance = Provenance(training=Training(config.get("data") or {}), tokenizer_json=tokenizer_json)
        module.adopt_retrieval_orders(config.get(ORDERS_KEY))
        module.space = Space.of(config)
        return module

    # Image preprocessing, which exports record and data reads

    @property
    def datamodule(self) -> Any | None:
        """The datamodule of the run; None outside a run, or if the run has loaders only."""
        return datamodule_of(self)

    def initial_preprocessing(self) -> dict[str, Any] | None:
        """Return the image preprocessing of the initial weights; None without such weights or if it is unknown."""
        return None

    def expected_image_size(self) -> int | None:
        """Return the side of the networks' images in pixels; by default `vision.image_size`."""
        size: int | None = self._setting("vision", "image_size")
        return size

    def adopt_preprocessing(self, record: Mapping[str, Any] | None) -> None:
        """Set the image preprocessing of loaded weights."""
        self._initial.preprocessing = None if record is None else dict(record)

    def expected_preprocessing(self) -> dict[str, Any]:
        """Return the image preprocessing of the weights, as a record (`common/preprocessing.py`), for datamodules.

        This is the checkpoint's record, else that of the initial weights, and the image size.
        """
        if self._initial.preprocessing is None and not self._initial.restored:
            self._initial.preprocessing = self.initial_preprocessing()
        size = self.expected_image_size()
        return (self._initial.preprocessing or {}) | ({} if size is None else {"image_size": size})

    def preprocessing(self) -> dict[str, Any] | None:
        """Return the preprocessing for exports: that of the run's datamodule, else that of the weights."""
        record = getattr(self.datamodule, "preprocessing", None) or self.expected_preprocessing()
        return record if record and ("mean" in record or "transform" in record) else None


def rebuild(cls: type[Module], hparams: Mapping[str, Any], state: Mapping[str, Tensor], source: str) -> Module:
    """Build a module from saved arguments and the state dict of an export or a checkpoint, in the state's precision.

    Raises:
        UserError: If the arguments are not those of this class, or the state does not fit.
    """
    arguments = arguments_without_weights(hparams)
    unknown = sorted(arguments.keys() - accepted_names(cls))
    if unknown:
        raise UserError(
            f"Expected arguments of {cls.__name__} in {source}, got {unknown[0]!r}: use the class and the version of "
            "vlightning that wrote it."
        )
    module = cls(**arguments)
    precision = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), None)
    module.to(precision)
    module.load_pretrained_state(state, source)
    return module


def arguments_without_weights(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved constructor arguments that rebuild a module whose weights come from elsewhere."""
    # Names that begin with an underscore record the class; the command line adds them.
    arguments = {name: value for name, value in hparams.items() if not name.startswith("_")}
    for name in ("vision", "text"):
        if "weights" in (arguments.get(name) or {}):
            arguments[name] = dict(arguments[name]) | {"weights": None}
    if isinstance(model := arguments.get("model"), Mapping):  # perhaps two towers with weights each
        arguments["model"] = {
            name: dict(tower) | {"weights": "random"} if isinstance(tower, Mapping) and "weights" in tower else tower
            for name, tower in model.items()
        }
    return arguments | {name: None for name in ("weights", "optimizer", "lr_scheduler") if name in arguments}


def _save_tokenizer(module: ExportedModule, text: str, folder: Path) -> None:
    """Write the tokenizer with its special tokens, which the JSON text does not contain.

    Their numbers are the module's `text.special_token_ids`, else those of the usual special tokens in the vocabulary.
    """
    numbers = getattr(getattr(module, "text", None), "special_token_ids", None)
    if numbers is None:
        numbers = special_token_ids(text)
    length = module.data_sizes().max_tokens or getattr(module, "max_tokens", None)
    save_tokenizer(text, folder, {name: number for name, number in numbers.items() if number is not None}, length)
