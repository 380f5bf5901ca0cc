"""Advice on missing weights names shipped configs that train them."""

from pathlib import Path

import yaml

from vlightning.lightning_modules.networks.classifier_files import TRAINING

ROOT = Path(__file__).resolve().parents[3]


def test_the_named_configs_write_the_runs_and_train_without_a_teacher():
    named = set()
    for run, arguments in TRAINING.items():
        files = [ROOT / word for word in arguments.split() if word.endswith(".yaml")]
        config = yaml.safe_load(files[-1].read_text())
        logger = config["trainer"]["logger"]["init_args"]
        assert (logger["save_dir"], logger["name"]) == ("runs", run)
        assert "teacher" not in config["model"]["init_args"]
        assert all(file.is_file() for file in files)
        named.add(files[-1])
    published = ROOT / "configs/shre/self_supervised_teacher.yaml"  # has a teacher, and trains none
    assert named == set((ROOT / "configs").glob("*/*teacher*.yaml")) - {published}
