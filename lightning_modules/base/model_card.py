"""Provenance of a module's weights, and the model card of an export, `README.md`, which states it."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from lightning import LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from ...callbacks.modules import chance_levels
from ...common.preprocessing import described
from ...common.shown import public
from ...common.tokenizers import saved_tokenizer, to_json
from ..core.checkpoints import RESULTS_KEY, class_name
from ..core.trainers import datamodule_of, trainer_of

CARD_FILE = "README.md"
_TEXT_OPTIONS = ("tokenizer", "clean_captions", "max_words", "append_sep", "max_tokens")
_LARGE = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks")
_DATA_OPTIONS = ("train", "validation", "test", "length", "samples")


@dataclass(frozen=True)
class Training:
    """The training of a module, as plain data; unknown values are empty or None.

    Attributes:
        data: class and options of the datamodule.
        steps: optimizer steps.
        epochs: epochs, the unfinished one included.
        seed: seed of the run.
        commit: commit of git that the run was started with.
        results: results by stage, each with "metrics" and "chance", values by name.
    """

    data: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    epochs: int | None = None
    seed: int | None = None
    commit: str | None = None
    results: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)

    @classmethod
    def of_checkpoint(cls, content: Mapping[str, Any], run: Path | None = None) -> "Training":
        """Read a checkpoint, and `environment.json`, `metrics.json` and `config.yaml` in the folder of its run."""
        states = (content.get("callbacks") or {}).values()
        seeds = [state["seed"] for state in states if isinstance(state, Mapping) and "seed" in state]
        data = dict(content.get("datamodule_hyper_parameters") or {})
        # Lightning stores the datamodule's state under the name of its class.
        classes = (name for name, state in content.items() if isinstance(state, Mapping) and "preprocessing" in state)
        data.setdefault("_class_path", next(classes, None))
        epoch = content.get("epoch")
        results = {"validation": content[RESULTS_KEY]} if RESULTS_KEY in content else {}
        if run is not None and (tested := _read(run / "metrics.json")).get("stage") == "test":
            results["test"] = tested
        git = {} if run is None else _read(run / "environment.json").get("git")
        return cls(
            data,
            steps=content.get("global_step"),
            epochs=None if epoch is None else epoch + 1,
            seed=next(iter(seeds), None if run is None else _seed_of_config(run / "config.yaml")),
            commit=(git or {}).get("commit"),
            results=results,
        )

    @classmethod
    def of_run(cls, module: LightningModule) -> "Training":
        """Read the Trainer of a module; empty without one."""
        trainer = trainer_of(module)
        if trainer is None:
            return cls()
        data = datamodule_of(module)
        options = {"_class_path": None if data is None else type(data).__name__, **getattr(data, "hparams", {})}
        content = {"callbacks": {}, "datamodule_hyper_parameters": options}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            content["callbacks"][callback.state_key] = callback.state_dict()
        state = {"global_step": trainer.global_step, "epoch": max(trainer.current_epoch - 1, 0)}
        return cls.of_checkpoint(content | state | {RESULTS_KEY: validation_results(module)})

    def text_options(self) -> dict[str, Any]:
        """Return the options of the datamodule that decide how a text becomes token ids."""
        return {name: self.data[name] for name in _TEXT_OPTIONS if self.data.get(name) is not None}


def validation_results(module: LightningModule) -> dict[str, dict[str, float]]:
    """Return metrics of the last validation of a module's run, and the chance levels that its evaluation states."""
    trainer = trainer_of(module)
    if trainer is None:
        return {"metrics": {}, "chance": {}}
    logged = trainer.callback_metrics
    metrics = {name: float(value) for name, value in logged.items() if name.startswith("val/") and value.numel() == 1}
    chance = {f"val/{name}": level for name, level in chance_levels(trainer, module).items()}
    return {"metrics": metrics, "chance": chance}


def _read(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a run; empty if the file is missing or has no mapping."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _seed_of_config(file: Path) -> int | None:
    """Return the seed in the configuration of a run; None if there is none."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return None
    seed = content.get("seed_everything") if isinstance(content, dict) else None
    return seed if type(seed) is int else None


def tokenizer_of_data(datamodule: Any | None) -> str | None:
    """Return the tokenizer of a datamodule as JSON text, without padding and truncation.

    None if the datamodule has no tokenizer of the `tokenizers` library.
    """
    backend = _backend_of(datamodule)
    return None if backend is None else to_json(backend)


def _backend_of(datamodule: Any | None) -> Any | None:
    return getattr(getattr(datamodule, "tokenizer", None), "backend_tokenizer", None)


@dataclass
class Provenance:
    """Source of a module's weights: a run that ended, a checkpoint or an export.

    Attributes:
        checkpoint: the checkpoint without weights and states; empty if the weights are of no checkpoint.
        run: folder of the checkpoint's run.
        training: the training of a run that ended, or of an export.
        tokenizer_json: the tokenizer of an export, as JSON text.
        tokenizer: that of such a run, as the `tokenizers` library has it.
    """

    checkpoint: dict[str, Any] = field(default_factory=dict)
    run: Path | None = None
    training: Training | None = None
    tokenizer_json: str | None = None
    tokenizer: Any | None = None

    @classmethod
    def of_checkpoint(cls, content: Mapping[str, Any], run: Path | None = None) -> "Provenance":
        """Keep the entries of a checkpoint that an export needs."""
        entries = {name: value for name, value in content.items() if name not in _LARGE}
        states = content.get("callbacks") or {}
        seeds = {name: {"seed": state["seed"]} for name, state in states.items() if "seed" in (state or ())}
        return cls(entries | {"callbacks": seeds}, run)

    @classmethod
    def of_run(cls, module: LightningModule) -> "Provenance":
        """Keep the training and the tokenizer of the run that a module is attached to."""
        return cls(training=Training.of_run(module), tokenizer=_backend_of(datamodule_of(module)))

    def training_of(self, module: LightningModule) -> Training:
        """Return the training of a module's weights."""
        trainer = trainer_of(module)
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            return Training.of_run(module)
        if self.checkpoint:
            return Training.of_checkpoint(self.checkpoint, self.run)
        return self.training or Training.of_run(module)

    def tokenizer_of(self, module: LightningModule) -> str | None:
        """Return the tokenizer of the run, else of the source of the weights, as JSON text; None without one."""
        tokenizer_json = tokenizer_of_data(datamodule_of(module)) or self.tokenizer_json
        if tokenizer_json is None and self.tokenizer is not None:  # not written at each fit's end, only for an export
            return to_json(self.tokenizer)
        if tokenizer_json is None:
            expected = expected_tokenizer_of(module)
            return saved_tokenizer(self.checkpoint, expected)[0] if self.checkpoint or expected else None
        return tokenizer_json


def expected_tokenizer_of(module: LightningModule) -> str | None:
    """Return the folder or hub name of the tokenizer that the text tower of a module came with; None without one."""
    expected = getattr(module, "expected_tokenizer", None)
    return expected() if callable(expected) else None


def model_card(
    module: LightningModule,
    state: Collection[str],
    training: Training,
    preprocessing: Mapping[str, Any] | None,
    name: str,
) -> str:
    """Return the Markdown text of a model card.

    Args:
        module: the exported module.
        state: names of the tensors that are written; a teacher that a run has loaded is not.
        training: its training.
        preprocessing: record of its image preprocessing.
        name: name of the folder.
    """
    kind = class_name(module)
    front = {
        "library_name": "vlightning",
        "license": "other",
        "license_name": "to-be-filled-in",
        **_task(module),
        "tags": ["vlightning", kind],
    }
    numbers = sum(
        parameter.numel() for parameter_name, parameter in module.named_parameters() if parameter_name in state
    )
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {name}",
        f"A `{kind}` of vlightning, {numbers:,} parameters.",
        f"## Use\n\n```python\n{_usage(module, name)}\n```",
        f"## Training\n\n{_table(('', ''), _facts(training))}",
    ]
    if rows := list(_results(training)):
        sections.append(f"## Results\n\n{_table(('metric', 'stage', 'value', 'chance'), rows)}")
    if (space := getattr(module, "space", None)) is not None:
        sections.append(f"## Space\n\n{space.described()}")
    order = getattr(module, "retrieval_order", lambda: None)()
    if order is not None:
        sections.append(f"## Retrieval\n\n{order}")
    images = described(preprocessing)
    sections += [
        f"## Images\n\n{images[0].upper()}{images[1:]}.",
        "## Licence\n\nTo be filled in: replace `license` and `license_name` in the first lines, and this paragraph. "
        "The licences of the data and of initial weights may restrict that of the model.",
    ]
    return "\n\n".join(sections) + "\n"


def _results(training: Training) -> Iterable[tuple[str, ...]]:
    for stage, result in training.results.items():
        chance = result.get("chance") or {}
        for name, value in sorted((result.get("metrics") or {}).items()):
            level = f"{chance[name]:.4g}" if name in chance else ""
            yield name, stage, "not finite" if value is None else f"{value:.4g}", level


def _task(module: LightningModule) -> dict[str, str]:
    if _embeds(module):
        return {"pipeline_tag": "zero-shot-image-classification"}
    return {"pipeline_tag": "image-classification"} if hasattr(module, "num_classes") else {}


def _embeds(module: LightningModule) -> bool:
    return hasattr(module, "encode_images") and hasattr(module, "encode_texts")


def _usage(module: LightningModule, name: str) -> str:
    lines = [
        "from vlightning.commands.export import from_pretrained",
        "",
        f"model, transform, tokenizer = from_pretrained({name!r})  # this folder, or its name on the hub",
    ]
    if _embeds(module):
        lines.append("images = model.encode_images(transform(image)[None])[0]  # unit-length embeddings")
        lines.append('texts = model.encode_texts(**tokenizer(["a photo of a dog"]))')
    elif hasattr(module, "write_captions"):
        lines.append("captions = model(embeddings)  # [B, D] of the image tower that tower.json names")
    elif hasattr(module, "num_classes"):
        lines.append("logits = model(transform(image)[None])")
    return "\n".join(lines)


def _facts(training: Training) -> Iterable[tuple[str, str]]:
    data = training.data
    if data.get("_class_path"):
        yield "data", f"`{str(data['_class_path']).rpartition('.')[2]}`"
    for name in _DATA_OPTIONS:
        if data.get(name) not in (None, []):
            yield name, _without_folders(data[name])
    for name in ("steps", "epochs", "seed", "commit"):
        value = getattr(training, name)
        yield name, "unknown" if value is None else str(value)


def _without_folders(value: Any) -> str:
    """Return sources of data without the folders of the machine that they were on, and without secrets of URLs."""
    if isinstance(value, (list, tuple)):
        return ", ".join(_without_folders(item) for item in value)
    if isinstance(value, Mapping):
        return json.dumps({key: _without_folders(item) for key, item in value.items()})
    return Path(value).name if isinstance(value, str) and "://" not in value else public(str(value))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    cells = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in row)} |" for row in cells)
