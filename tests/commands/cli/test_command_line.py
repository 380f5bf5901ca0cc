"""The parts of the command line: what was given, where, and in which order."""

import itertools
from pathlib import Path

import pytest

from vlightning.commands.cli.command_line import find_config, read_command_line
from vlightning.commands.cli.typed_values import Schedule
from vlightning.common.errors import UserError


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "a.yaml"
    path.write_text("model: {class_path: x.Net, init_args: {dim: 1, lr: 1e-3}}\ntrainer: {max_epochs: 2}\n")
    return str(path)


def test_later_words_override_earlier_ones(config: str):
    typed = read_command_line(["fit", "--config", config, "--model.dim", "3", "--model.init_args.lr=4"])
    assert typed.subcommand == "fit"
    assert typed.lookup("model.class_path") == "x.Net"
    assert typed.lookup("model.init_args.dim") == 3
    assert typed.lookup("model.lr") == 4
    assert typed.lookup("trainer.max_epochs") == 2
    assert typed.lookup("trainer.min_epochs") is None
    assert typed.origin("model.init_args.dim") == "--model.dim"
    assert typed.origin("model.lr") == "--model.init_args.lr"
    assert typed.origin("model.other") is None


def test_options_override_section_files_and_those_override_configs_in_any_order(config: str, tmp_path: Path):
    (tmp_path / "b.yaml").write_text("{ckpt_path: null, trainer: {max_epochs: 4, max_steps: 4}}")
    (tmp_path / "trainer.yaml").write_text("{max_epochs: 5, max_steps: 5}")
    words = [f"--config={config}", f"--trainer={tmp_path}/trainer.yaml", "--trainer.max_epochs=6", "--ckpt_path=x"]
    for order in itertools.permutations([*words, f"--config={tmp_path}/b.yaml"]):
        typed = read_command_line(["fit", *order])
        assert typed.lookup("trainer.max_epochs") == 6
        assert typed.lookup("trainer.max_steps") == 5
        assert typed.lookup("ckpt_path") == "x"
        configs = [word for word in order if word.startswith("--config")]
        assert typed.args == ["fit", *configs, words[1], *(word for word in order if word in words[2:])]


def test_what_is_given_is_told_from_what_is_not(config: str):
    typed = read_command_line(["fit", "-c", config, "--seed_everything", "0", "--trainer.callbacks+=Timer"])
    assert typed.is_given("seed_everything")
    assert typed.is_given("trainer.callbacks")
    assert not typed.is_given("trainer.logger")
    assert [str(path) for path in typed.config_files] == [config]


def test_negative_numbers_and_values_with_an_equals_sign_are_values():
    typed = read_command_line(["fit", "--trainer.max_steps", "-1", "--ckpt_path=runs/a=b/last.ckpt"])
    assert typed.lookup("trainer.max_steps") == -1
    assert typed.lookup("ckpt_path") == "runs/a=b/last.ckpt"


def test_a_config_before_the_subcommand_holds_a_section_for_each(tmp_path: Path):
    (tmp_path / "all.yaml").write_text("fit: {trainer: {max_epochs: 2}}\ntest: {trainer: {max_epochs: 9}}\n")
    typed = read_command_line(["--config", str(tmp_path / "all.yaml"), "fit"])
    assert typed.lookup("trainer.max_epochs") == 2


def test_debug_is_taken_out():
    typed = read_command_line(["fit", "--debug", "--print_config"])
    assert typed.args == ["fit", "--print_config"]


def test_configs_are_looked_for_here_first_then_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    shipped = find_config("configs/albef/tiny.yaml")
    assert shipped is not None
    assert shipped.is_absolute()
    assert find_config("albef/tiny.yaml") == shipped
    mine = tmp_path / "configs/albef/tiny.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("{}")
    found = find_config("configs/albef/tiny.yaml")
    assert found is not None
    assert found.resolve() == mine


def test_yaml_text_in_place_of_a_file_is_no_file():
    assert find_config("{trainer: {max_epochs: 2}}") is None
    with pytest.raises(UserError, match="is a folder"):
        find_config("/")


def test_a_config_may_state_the_length_of_its_run(config: str, tmp_path: Path):
    """The last one counts, and no option of the command line sees it."""
    texts = (
        "schedule: {steps: 20, batch: 4}",
        "schedule: {steps: 30, batch: 8, epochs: 2.5}\ntrainer: {max_epochs: 5}",
    )
    words = [f"--config={config}"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.yaml").write_text(text)
        words.append(f"--config={tmp_path}/{number}.yaml")
    typed = read_command_line(["fit", *words])
    assert typed.schedule == Schedule(30, 8, epochs=2.5)
    assert typed.lookup("trainer.max_epochs") == 5
    assert not typed.is_given("schedule")
    assert not any("schedule" in word for word in typed.args)
    assert read_command_line(["fit", f"--config={config}"]).schedule is None


@pytest.mark.parametrize(
    "stated", ["{steps: 20}", "{steps: 20, batch: 0}", "{steps: 2, batch: 4, step: 3}", "20", "null"]
)
def test_a_length_that_is_none_is_refused(tmp_path: Path, stated: str):
    (tmp_path / "a.yaml").write_text(f"schedule: {stated}")
    with pytest.raises(
        UserError, match=r"Expected a schedule with positive whole numbers of steps and batch in .*a\.yaml"
    ):
        read_command_line(["fit", f"--config={tmp_path}/a.yaml"])
