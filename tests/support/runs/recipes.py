"""Run the commands of the shipped configs in this process, with sizes that take seconds.

The files that a recipe names are made, small ones of the same layout, where it names them. What cannot be had in a test
(sizes, devices, weights to download) is replaced after the command was parsed; `Ran.replaced` says by what.
"""

import copy
import functools
import os
import re
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from support.methods.clip import LENGTH, SIZE, add_tiny_clip
from support.runs.command_line import run
from vlightning.commands.cli import lightning_cli
from vlightning.commands.cli.command_line import schedule_of
from vlightning.commands.cli.typed_values import Schedule

ROOT = Path(__file__).resolve().parents[3]
CLASSES, DIMS = 1000, [6, 6]
ROWS = 4  # of a process's batch

WIDTHS = {"width": 16, "heads": 2}
TASK = {
    "vision.patch_size": 8,
    "vision.width": 16,
    "vision.depth": 1,
    "vision.heads": 2,
    "text.width": 16,
    "text.heads": 2,
    "text.ffn_width": 64,
    "text.depth": 1,
    "text.fusion_depth": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "ALBEFModule": {
        "vision.patch_size": 8,
        "vision.width": 16,
        "vision.depth": 1,
        "vision.heads": 2,
        "text.width": 16,
        "text.heads": 2,
        "text.ffn_width": 64,
        "text.depth": 1,
        "text.fusion_depth": 1,
        "contrast.embed_dim": 8,
        "contrast.queue_size": 16,
        "rerank.k": 10,
    },
    **dict.fromkeys(("EntailmentModule", "NLVR2Module", "TextAssignmentModule"), TASK),
    "VQAModule": TASK | {"answers.candidates": 3},
    "CLIPModule": {},
    "CoCoRDModule": {
        "contrast.queue_size": 16,
        "heads.embed_dim": 16,
        "heads.hidden": 12,
        "heads.predictor_hidden": 8,
    },
    "CoCoRDLinearProbeModule": {},
    "MMLGModule": {"towers.width": 16, "towers.heads": 2, "towers.embed_dim": 12, "vision.patch_size": 8},
    "MMLGImageClassifierModule": {"vision.width": 16, "vision.heads": 2, "vision.patch_size": 8},
    "CaptioningModule": {
        "embed_dim": 12,
        "mapper.width": 32,
        "mapper.prefix_length": 3,
        "mapper.clip_length": 2,
        "mapper.depth": 1,
        "mapper.heads": 4,
        "generation.max_new_tokens": 4,
    },
    "MobileCLIPModule": {},
    "NewTextModule": {},
    "NewTowerModule": {},
    "ReinforcementModule": {"captioner.init_args.length": 6},
    "SHReModule": {
        "vision.width": 16,
        "vision.heads": 2,
        "vision.patch_size": 8,
        "vision.depth": 2,
        "text.depth": 2,
    },
    "SHReImageClassifierModule": {"vision.width": 16, "vision.heads": 2, "vision.patch_size": 8, "vision.depth": 2},
}
"""Sizes of networks, by module; a group's setting has a dotted name."""
SWAPPED = {
    "ViT-B-16": "tiny-clip-of-the-tests",
    "ViT-B-32": "tiny-clip-of-the-tests",
    "laion2b_s34b_b79k": "clip.safetensors",
    "MobileCLIP-S0": "MobileCLIP-tiny",
    "MobileCLIP-B": "tiny-clip-of-the-tests",
    "MobileCLIP2-S0": "MobileCLIP-tiny",
    "MobileCLIP2-S4": "tiny-clip-of-the-tests",
    "ViT-L-14": "tiny-clip-of-the-tests",
    "openai": "clip.safetensors",
    "datacomp_xl_s13b_b90k": "clip.safetensors",
    "dfn2b": "clip.safetensors",
    "dfn2b_s39b": "clip.safetensors",
    "deit_base_patch16_224.fb_in1k": "deit.pth",
    "base_imagenet.pt": "data2vec.pth",
    "timm/resnet50": "resnet8",
    "a1_in1k": "resnet8.pth",
    "timm/beitv2_base_patch16_224": "timm/test_vit",
    "beitv2_base_patch16_224_pt1k.pth": "test_vit.pth",
    "IMAGENET1K_V1": "imagenet_{teacher}.pth",
    "tf_efficientnet_lite0": "test_efficientnet",
    "mobilenetv3_small_100": "test_efficientnet",
    "sentence-transformers/all-MiniLM-L6-v2": "text_encoder",
    "coca_ViT-L-14": "coca",
    "mscoco_finetuned_laion2b_s13b_b90k": "coca",
    "coca_dfn2b_mscoco38k.pt": "coca",
}
"""Replacements of networks and weights that would be downloaded."""
DATA: dict[str, Any] = {
    "batch_size": ROWS,
    "global_batch_size": None,
    "eval_batch_size": ROWS,
    "num_workers": 0,
    "cache_dir": "cache",
    "held_out": 0.5,  # of twenty images
}
LARGE = {  # where the recipe says more
    "samples_per_epoch": 4 * ROWS,
    "augmentations": 3,
    "length": 4 * ROWS,
    "eval_length": 2 * ROWS,
}
TRAINER: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "num_nodes": 1,
    "max_steps": 2,
    "limit_train_batches": 2,
    "num_sanity_val_steps": 0,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass
class Ran:
    """Result of a command."""

    status: int
    error: str
    replaced: list[str] = field(default_factory=list)
    """Dotted names of settings that differ from the command."""
    dropped: list[str] = field(default_factory=list)
    """Settings of a config that did not reach the module or the data, where the config's header has this command."""
    steps: int = 0
    """Of the optimizer, as it counts those that change the weights."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    planned: dict[str, Any] = field(default_factory=dict)
    """Batch and length of the whole run as parsed, and its learning rates over the steps that the config states."""


def length_of(command: str) -> Schedule | None:
    """Return the length that the last config of a command states; None if no config does."""
    paths = [ROOT / word for word in shlex.split(command) if word.startswith("configs/")]
    stated = [yaml.safe_load(path.read_text()).get("schedule") for path in paths]
    lengths = [schedule_of(path, each) for path, each in zip(paths, stated, strict=True) if each is not None]
    return lengths[-1] if lengths else None


def commands_of(config: Path) -> list[str]:
    """The complete commands in the first lines of a config."""
    comment = [line for line in config.read_text().splitlines() if line.startswith("#")]
    return [line.lstrip("# ") for line in comment if re.match(r"# +vlightning (fit|validate|test|predict) ", line)]


_WRITERS = (
    *("_teacher", "teacher_", "base", "quickstart", "extract", "pt_ft", "activate", "distill"),
    *("self_supervised", "memory_bank"),
)


def in_order(commands: list[str]) -> list[str]:
    """Return the commands in an order in which products exist before they are read."""

    def place(command: str) -> tuple[int, bool]:
        last = Path([word for word in shlex.split(command) if word.startswith("configs/")][-1]).stem
        first = next((number for number, writer in enumerate(_WRITERS) if writer in last), len(_WRITERS))
        return first, last.endswith("_quickstart")  # of a task, from the quickstart of its method

    return sorted(dict.fromkeys(commands), key=place)


def is_distributed(command: str) -> bool:
    """Whether a config that a command names asks for DDP."""
    return any(
        re.search(r"^  strategy: ddp$", (ROOT / word).read_text(), re.MULTILINE)
        for word in shlex.split(command)
        if word.startswith("configs/")
    )


def ran(command: str) -> Ran:
    """Run a command in the current folder, under DDP where its config says so and there is a process group."""
    kept: list[Any] = []
    planned: dict[str, Any] = {}

    class RecipeCLI(lightning_cli.VLightningCLI):
        def _parse_ckpt_path(self) -> None:
            config = self.config[self.config.subcommand]
            before = _flat(config.as_dict())
            kept.append(_dropped(config.as_dict(), command))
            planned.update(_planned(config))
            _replace(config, str(self.config.subcommand))
            after = _flat(config.as_dict())
            changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
            kept.append(sorted(changed))
            super()._parse_ckpt_path()

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            trainer = super().instantiate_trainer(**kwargs)
            kept.append(trainer)
            return trainer

    words = [str(ROOT / word) if word.startswith("configs/") else word for word in shlex.split(command)[1:]]
    real, lightning_cli.VLightningCLI = lightning_cli.VLightningCLI, RecipeCLI
    try:
        add_tiny_clip()
        done = run(*words)
    finally:
        lightning_cli.VLightningCLI = real
    if done.status or len(kept) < 3:
        return Ran(done.status or 1, done.err)
    dropped, replaced, trainer = kept
    found = Ran(0, done.err, replaced, dropped)
    found.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found.trainer = {
        "precision": trainer.precision_plugin.precision,
        "scaler": getattr(trainer.precision_plugin, "scaler", None) is not None,
        "clip": trainer.gradient_clip_val,
        "accumulate": trainer.accumulate_grad_batches,
        "processes": trainer.world_size,
        "global_step": trainer.global_step,
        "validations": trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.completed,
    }
    found.planned = planned
    length = length_of(command)
    if length and " fit " in command:
        schedule = trainer.lightning_module.paper_schedule()
        total, last = length.steps, length.steps if schedule.interval == "step" else planned["epochs"]
        rates = {"start": 0, "peak": length.warmup_steps + 1 if schedule.interval == "step" else 0, "end": last}
        found.planned |= {name: schedule.rate(index, total) / schedule.peak for name, index in rates.items()}
    for optimizer in trainer.optimizers:
        states = list(optimizer.state.values())
        found.steps = int(min(state["step"] for state in states)) if "step" in states[0] else trainer.global_step
        found.optimizer = {"class": type(optimizer).__name__, "fused": optimizer.defaults.get("fused")}
    return found


def ran_together(commands: list[str]) -> list[dict[str, Any]]:
    """Run commands one after the other in a process of several, as plain data."""
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "NODE_RANK": "0"}  # Lightning then launches nothing itself
    return [asdict(ran(command)) for command in commands]


@functools.cache
def compose(*configs: Path) -> Any:
    """Return what a fit with these configs prints."""
    done = run("fit", *(word for config in configs for word in ("--config", str(config))), "--print_config")
    assert done.status == 0, done.err
    return yaml.safe_load(done.out)


def says(found: Any, given: Any) -> bool:
    """Whether all that was given is there; classes get their whole path, and what was not given is filled in."""
    if isinstance(given, dict):
        return all(
            found[key].endswith(f".{value}") if key == "class_path" else says(found[key], value)
            for key, value in given.items()
        )
    if isinstance(given, list):
        return len(found) == len(given) and all(map(says, found, given))
    return bool(found == given)


def _dropped(composed: dict[str, Any], command: str) -> list[str]:
    words, dropped = shlex.split(command), []
    for word in words:
        if not word.startswith("configs/") or commands_of(ROOT / word)[-1] != command:
            continue
        own = yaml.safe_load((ROOT / word).read_text())
        for section in ("model", "data"):
            given = own.get(section, {}).get("init_args", {})
            for typed in (word for word in words if word.startswith(f"--{section}.")):
                *groups, last = typed.split(".")[1:]
                functools.reduce(lambda group, name: group.get(name, {}), groups, given).pop(last, None)
            there = composed[section]["init_args"]
            dropped += [f"{section}.{name}" for name, value in given.items() if not says(there[name], value)]
    return dropped


def _planned(config: Any) -> dict[str, Any]:
    trainer, data = config.trainer, config.data.init_args
    return {
        "batch": data.get("global_batch_size"),
        "epochs": trainer.max_epochs,
        "steps": trainer.max_steps,
        "samples": data.get("samples"),
        "rows": data.get("samples_per_epoch"),
    }


def _replace(config: Any, subcommand: str) -> None:
    trainer = config.trainer
    if trainer.strategy == "ddp":
        strategy = DDPStrategy(process_group_backend="gloo")
        strategy.cluster_environment = LightningEnvironment()
        trainer.strategy = strategy
    for name, value in TRAINER.items():
        trainer[name] = value
    if isinstance(trainer.strategy, DDPStrategy):
        trainer.devices = torch.distributed.get_world_size()
    if trainer.val_check_interval is not None:
        trainer.val_check_interval = TRAINER["max_steps"]
    if trainer.precision == "16-mixed":  # which Lightning makes bf16 on a CPU, in silence
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        trainer.precision, trainer.plugins = None, [MixedPrecision("16-mixed", "cpu", scaler)]
    model, data = config.model, config.data
    kind, arguments = model.class_path.rpartition(".")[2], model.init_args
    sizes = MODELS[kind] | ({"embed_dim": 8} if kind == "TextAssignmentModule" else {})
    for name, value in sizes.items():
        if arguments[name]:
            arguments[name] = value
    if kind == "SHReModule" and arguments.num_classes == 768:  # the width of a self-supervised teacher
        arguments.num_classes, arguments.teacher.queue_size = 64, min(arguments.teacher.queue_size, 16)
    if kind == "MobileCLIPModule" and arguments.teacher.dims is None:
        arguments.teacher.dims = DIMS  # in place of DataCompDR's
    _swap(model)
    # timm's weights would be downloaded.
    if kind in ("CLIPModule", "NewTowerModule") and getattr(arguments.model, "image", None) is not None:
        arguments.model.image.weights = "random"
    # The side on which their encoder is trained.
    side = SIZE if kind in ("SHReModule", "SHReImageClassifierModule") else None
    if "MobileCLIP-tiny" in _flat(arguments.as_dict()).values():
        # Of 16 pixels its last stage would get a single one, on which oneDNN's gradient of a strided depthwise
        # convolution in bfloat16 reads memory that was never written.
        side = 2 * SIZE
    _shrink_data(data, side)
    for callback in trainer.callbacks or []:
        if "data" in (callback.get("init_args") or {}):
            _shrink_data(callback.init_args.data, side)
        if "templates" in (callback.get("init_args") or {}):
            callback.init_args.templates = ["a photo of a {}."]  # 80 for each of a thousand classes take minutes
    size = data.init_args.get("image_size")
    for section in (model, data):
        for name in ("max_tokens", "text.max_tokens"):
            if section.init_args.get(name) == 77:
                section.init_args[name] = LENGTH
    for name in ("image_size", "vision.image_size"):
        if size is None and arguments.get(name):
            arguments[name] = SIZE


def _swap(section: Any) -> None:
    """Put small networks and files where others would be downloaded, at any depth."""
    items = section.items() if hasattr(section, "items") else enumerate(section)
    for name, value in list(items):
        if isinstance(value, str) and value in SWAPPED:
            other = SWAPPED[value]
            if "{teacher}" in other:
                teacher = section[f"{name.removesuffix('weights')}name"]
                other = other.format(teacher=teacher.rpartition("/")[2])
            section[name] = other
        elif hasattr(value, "items") or isinstance(value, list):
            _swap(value)


def _shrink_data(data: Any, side: int | None = None) -> None:
    arguments = data.init_args
    for name, value in DATA.items():
        if name in arguments:
            arguments[name] = value
    for name, value in LARGE.items():
        if isinstance(arguments.get(name), int):
            arguments[name] = min(arguments[name], value)
    classes = data.class_path.endswith("ImageClassificationDataModule")
    if "image_size" in arguments and not (classes and arguments.get("preset") == "cifar" and not arguments.image_size):
        arguments.image_size = side or (32 if classes else SIZE)
    for name in ("train_transform", "eval_transform"):
        transform = arguments.get(name)
        if transform and transform.init_args.get("size"):
            transform.init_args["size"] = arguments.image_size or transform.init_args["size"]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """A nested configuration by dotted names; lists of plain values are values."""
    if isinstance(value, dict):
        parts = [_flat(item, f"{name}.{key}" if name else str(key)) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        parts = [_flat(item, f"{name}.{number}") for number, item in enumerate(value)]
    else:
        return {name: copy.copy(value) if isinstance(value, list) else value}
    return {key: item for part in parts for key, item in part.items()}
