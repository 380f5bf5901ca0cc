"""What is known of a module's weights, and the model card of an export, `README.md`, that says it."""

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
    """What is known of the training of a module, as plain data.

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
        """Read a checkpoint, and the files `environment.json` and `metrics.json` in the folder of its run."""
        states = (content.get("callbacks") or {}).values()
        seeds = [state["seed"] for state in states if isinstance(state, Mapping) and "seed" in state]
        data = dict(content.get("datamodule_hyper_parameters") or {})
        # Lightning stores the datamodule's state under the name of its class.
        own = (name for name, state in content.items() if isinstance(state, Mapping) and "preprocessing" in state)
        data.setdefault("_class_path", next(own, None))
        epoch = content.get("epoch")
        results = {"validation": content[RESULTS_KEY]} if RESULTS_KEY in content else {}
        if run is not None and (tested := _read(run / "metrics.json")).get("stage") == "test":
            results["test"] = tested
        git = {} if run is None else _read(run / "environment.json").get("git")
        return cls(
            data,
            steps=content.get("global_step"),
            epochs=None if epoch is None else epoch + 1,
            seed=next(iter(seeds), None),
            commit=(git or {}).get("commit"),
            results=results,
        )

    @classmethod
    def of_run(cls, module: LightningModule) -> "Training":
        """Read the Trainer of a module; empty without one."""
        trainer, data = trainer_of(module), datamodule_of(module)
        if trainer is None:
            return cls()
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
    found = {} if trainer is None else trainer.callback_metrics
    metrics = {name: float(value) for name, value in found.items() if name.startswith("val/") and value.numel() == 1}
    stated = {} if trainer is None else chance_levels(trainer, module)
    return {"metrics": metrics, "chance": {f"val/{name}": level for name, level in stated.items()}}


def _read(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a run; empty if there is none or it is something else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def tokenizer_of_data(datamodule: Any | None) -> str | None:
    """Return the tokenizer of a datamodule as JSON text; None without one of the `tokenizers` library.

    Without the padding and the length of the texts that it read last.
    """
    backend = getattr(getattr(datamodule, "tokenizer", None), "backend_tokenizer", None)
    if backend is None:
        return None
    return to_json(backend)


@dataclass
class Provenance:
    """What is known of the weights of a module after the run, the checkpoint or the export that they come from.

    Attributes:
        checkpoint: the checkpoint without weights and states; empty if the weights are of no checkpoint.
        run: folder of the checkpoint's run.
        training: the training of a run that ended, or of an export.
        tokenizer_json: the tokenizer of such a run or export, as JSON text.
    """

    checkpoint: dict[str, Any] = field(default_factory=dict)
    run: Path | None = None
    training: Training | None = None
    tokenizer_json: str | None = None

    @classmethod
    def of_checkpoint(cls, content: Mapping[str, Any], run: Path | None = None) -> "Provenance":
        """Keep what an export needs of a checkpoint."""
        kept = {name: value for name, value in content.items() if name not in _LARGE}
        states = content.get("callbacks") or {}
        seeds = {name: {"seed": state["seed"]} for name, state in states.items() if "seed" in (state or ())}
        return cls(kept | {"callbacks": seeds}, run)

    @classmethod
    def of_run(cls, module: LightningModule) -> "Provenance":
        """Keep what an export needs of the run that a module is attached to."""
        return cls(training=Training.of_run(module), tokenizer_json=tokenizer_of_data(datamodule_of(module)))

    def training_of(self, module: LightningModule) -> Training:
        """Return what is known of the training of a module's weights."""
        trainer = trainer_of(module)
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            return Training.of_run(module)
        if self.checkpoint:
            return Training.of_checkpoint(self.checkpoint, self.run)
        return self.training or Training.of_run(module)

    def tokenizer_of(self, module: LightningModule) -> str | None:
        """Return the tokenizer of a module's data as JSON text: of its run, or of where its weights come from."""
        tokenizer_json = tokenizer_of_data(datamodule_of(module)) or self.tokenizer_json
        if tokenizer_json is None and self.checkpoint:
            return saved_tokenizer(self.checkpoint)[0]
        return tokenizer_json


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
        training: what is known of its training.
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
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {name}",
        f"A `{kind}` of vlightning, {numbers:,} parameters.",
        f"## Use\n\n```python\n{_usage(module, name)}\n```",
        f"## Training\n\n{_table(('', ''), _facts(training))}",
    ]
    if rows := list(_results(training)):
        parts.append(f"## Results\n\n{_table(('metric', 'stage', 'value', 'chance'), rows)}")
    order = getattr(module, "retrieval_order", lambda: None)()
    if order is not None:
        parts.append(f"## Retrieval\n\n{order}")
    images = described(preprocessing)
    parts += [
        f"## Images\n\n{images[0].upper()}{images[1:]}.",
        "## Licence\n\nTo be filled in: replace `license` and `license_name` in the first lines, and this paragraph. "
        "The licences of the data and of initial weights may restrict that of the model.",
    ]
    return "\n\n".join(parts) + "\n"


def _results(training: Training) -> Iterable[tuple[str, ...]]:
    for stage, found in training.results.items():
        chance = found.get("chance") or {}
        for name, value in sorted((found.get("metrics") or {}).items()):
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
    known = training.data
    if known.get("_class_path"):
        yield "data", f"`{str(known['_class_path']).rpartition('.')[2]}`"
    for name in _DATA_OPTIONS:
        if known.get(name) not in (None, []):
            yield name, _without_folders(known[name])
    for name, value in (
        ("steps", training.steps),
        ("epochs", training.epochs),
        ("seed", training.seed),
        ("commit", training.commit),
    ):
        yield name, "unknown" if value is None else str(value)


def _without_folders(value: Any) -> str:
    """Return sources of data without the folders of the machine that they were on, and without secrets of URLs."""
    if isinstance(value, (list, tuple)):
        return ", ".join(_without_folders(part) for part in value)
    if isinstance(value, Mapping):
        return json.dumps({key: _without_folders(part) for key, part in value.items()})
    return Path(value).name if isinstance(value, str) and "://" not in value else public(str(value))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    cells = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(part.replace('|', '/').replace(chr(10), ' ') for part in row)} |" for row in cells)
