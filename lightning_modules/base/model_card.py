"""The model card of an export: `README.md`, filled with what is known of the training."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from lightning import LightningModule

from .checkpoints import METRICS_KEY, class_name
from .preprocessing import described
from .trainers import datamodule_of, trainer_of

CARD_FILE = "README.md"
_TEXT_OPTIONS = ("tokenizer", "clean_captions", "max_words", "append_sep", "max_tokens")
_DATA_OPTIONS = ("train", "validation", "test", "length", "samples")


@dataclass(frozen=True)
class Training:
    """What is known of the training of a module, as plain data.

    Attributes:
        data: class and options of the datamodule.
        steps: optimizer steps.
        epochs: epochs, the unfinished one included.
        seed: seed of the run.
        metrics: results of the last validation in the training, by name.
    """

    data: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    epochs: int | None = None
    seed: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of_checkpoint(cls, content: Mapping[str, Any]) -> "Training":
        """Read a checkpoint."""
        states = (content.get("callbacks") or {}).values()
        seeds = [state["seed"] for state in states if isinstance(state, Mapping) and "seed" in state]
        data = dict(content.get("datamodule_hyper_parameters") or {})
        # Lightning stores the datamodule's state under the name of its class.
        own = (name for name, state in content.items() if isinstance(state, Mapping) and "preprocessing" in state)
        data.setdefault("_class_path", next(own, None))
        epoch = content.get("epoch")
        return cls(
            data,
            steps=content.get("global_step"),
            epochs=None if epoch is None else epoch + 1,
            seed=next(iter(seeds), None),
            metrics=content.get(METRICS_KEY) or {},
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
        return cls.of_checkpoint(content | state | {METRICS_KEY: validation_metrics(module)})

    def text_options(self) -> dict[str, Any]:
        """Return the options of the datamodule that decide how a text becomes token ids."""
        return {name: self.data[name] for name in _TEXT_OPTIONS if self.data.get(name) is not None}


def validation_metrics(module: LightningModule) -> dict[str, float]:
    """Return the results of the last validation of a module's run, by name."""
    trainer = trainer_of(module)
    found = {} if trainer is None else trainer.callback_metrics
    return {name: float(value) for name, value in found.items() if name.startswith("val/") and value.numel() == 1}


def model_card(module: LightningModule, training: Training, preprocessing: Mapping[str, Any] | None, name: str) -> str:
    """Return the Markdown text of a model card.

    Args:
        module: the exported module.
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
    numbers = sum(parameter.numel() for parameter in module.parameters())
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {name}",
        f"A `{kind}` of vlightning, {numbers:,} parameters.",
        f"## Use\n\n```python\n{_usage(module, name)}\n```",
        f"## Training\n\n{_table(('', ''), _facts(training))}",
    ]
    if training.metrics:
        rows = [(result, "validation", f"{value:.4g}") for result, value in sorted(training.metrics.items())]
        parts.append(f"## Results\n\nOf the last validation in the training.\n\n{_table(_RESULTS, rows)}")
    images = described(preprocessing)
    parts += [
        f"## Images\n\n{images[0].upper()}{images[1:]}.",
        "## Licence\n\nTo be filled in: replace `license` and `license_name` in the first lines, and this paragraph. "
        "The licences of the data and of initial weights may restrict that of the model.",
    ]
    return "\n\n".join(parts) + "\n"


_RESULTS = ("metric", "stage", "value")


def _task(module: LightningModule) -> dict[str, str]:
    if _embeds(module):
        return {"pipeline_tag": "zero-shot-image-classification"}
    return {"pipeline_tag": "image-classification"} if hasattr(module, "num_classes") else {}


def _embeds(module: LightningModule) -> bool:
    return hasattr(module, "encode_images") and hasattr(module, "encode_texts")


def _usage(module: LightningModule, name: str) -> str:
    lines = [
        "from vlightning.hub import from_pretrained",
        "",
        f"model, transform, tokenizer = from_pretrained({name!r})  # this folder, or its name on the hub",
    ]
    if _embeds(module):
        lines.append("images = model.encode_images(transform(image)[None])[0]  # unit-length embeddings")
        lines.append('texts = model.encode_texts(**tokenizer(["a photo of a dog"]))')
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
    for name, value in (("steps", training.steps), ("epochs", training.epochs), ("seed", training.seed)):
        yield name, "unknown" if value is None else str(value)


def _without_folders(value: Any) -> str:
    """Return sources of data without the folders of the machine that they were on."""
    if isinstance(value, (list, tuple)):
        return ", ".join(_without_folders(part) for part in value)
    if isinstance(value, Mapping):
        return json.dumps({key: _without_folders(part) for key, part in value.items()})
    return Path(value).name if isinstance(value, str) and "://" not in value else str(value)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    cells = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(part.replace('|', '/').replace(chr(10), ' ') for part in row)} |" for row in cells)
