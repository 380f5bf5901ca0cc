"""The shipped configs: each composes as its first lines say, and the quickstart runs every subcommand."""

import re
from pathlib import Path

import pytest
import yaml

from support.command_line import run

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def _composed(*configs):
    words = [word for config in configs for word in ("--config", str(config))]
    ran = run("fit", *words, "--print_config")
    assert ran.status == 0, ran.err
    return yaml.safe_load(ran.out)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_command_in_a_configs_first_lines_composes(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_data.yaml").write_text("data: {class_path: ImageTextDataModule, init_args: {train: pairs.jsonl}}")
    comment = "".join(line for line in config.read_text().splitlines(True) if line.startswith("#"))
    named = re.findall(r"--config (\S+)", comment)
    assert str(config.relative_to(ROOT)) in named
    composed = _composed(*[name if name == "my_data.yaml" else ROOT / name for name in named])
    own = yaml.safe_load(config.read_text())
    for section in ("model", "data"):
        for name, value in own.get(section, {}).get("init_args", {}).items():
            assert composed[section]["init_args"][name] == value, name


def test_official_sets_every_switch_of_the_authors():
    model = _composed(ROOT / "configs/albef/base.yaml", ROOT / "configs/albef/official.yaml")["model"]["init_args"]
    expected = {
        "teacher_dropout": True,
        "positives": "diagonal",
        "key_columns": "local",
        "queue_start": "random",
        "decay_temperature": True,
        "lr_schedule": "official",
        "warmup_steps": 2000,
    }
    defaults = _composed(ROOT / "configs/albef/base.yaml")["model"]["init_args"]
    for name, value in expected.items():
        assert model[name] == value
        assert defaults[name] != value


@pytest.mark.slow
def test_quickstart_runs_every_subcommand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quickstart = ("--config", str(ROOT / "configs/albef/quickstart.yaml"))
    small = ("--data.eval_length", "8", "--data.num_workers", "0", "--trainer.logger", "false")
    short = ("--trainer.max_steps", "2", "--trainer.limit_val_batches", "1", "--trainer.default_root_dir", ".")
    for subcommand in ("fit", "validate", "test", "predict"):
        ran = run(subcommand, *quickstart, *small, *(short if subcommand == "fit" else ()))
        assert ran.status == 0, ran.err
