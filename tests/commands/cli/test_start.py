"""What the command line answers before torch is imported: pages, lists and the completion script."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vlightning.lightning_modules
from support.runs.command_line import run
from vlightning.commands.cli.command_line import SUBCOMMANDS
from vlightning.commands.cli.commands import COMMANDS as OWN
from vlightning.commands.cli.listing import COMMANDS, configs, methods
from vlightning.commands.cli.start import LISTS, OPTIONS, let_threads_sleep

ROOT = Path(__file__).resolve().parents[3]
ASKED = """
import sys
from vlightning.commands.cli.start import main
sys.argv = ["vlightning", *sys.argv[1:]]
main()
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "lightning", "jsonargparse", "numpy"}))
"""


@pytest.mark.parametrize("words", ["", "--version", "--help", "methods", "configs albef", "completion"])
def test_pages_and_lists_import_no_torch(words: str, tmp_path: Path):
    command = [sys.executable, "-c", ASKED, *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    text, _, imported = done.stdout.rstrip().rpartition("\n")
    assert imported == "[]"
    assert text.rstrip("\n") == run(*words.split()).out.rstrip("\n") != ""


def test_the_installed_command_starts_there():
    assert 'vlightning = "vlightning.commands.cli.start:main"' in (ROOT / "pyproject.toml").read_text()


def test_help_names_every_command_and_no_other():
    assert set(COMMANDS) == {*SUBCOMMANDS, *OWN, *LISTS}
    assert re.findall(r"^  (\w+) {2,}\S", run("--help").out, re.M) == list(COMMANDS)


def test_the_first_page_shows_a_command_that_runs_and_existing_lists():
    page = run().out
    assert len(page.splitlines()) <= 20
    commands = re.findall(r"^  vlightning (\w+)(?: --config (\S+))?", page, re.M)
    assert {name for name, _ in commands} == {"fit", "methods", "configs"}
    assert all((ROOT / config).is_file() for _, config in commands if config)


def test_methods_lists_each_method_with_its_class():
    listed = run("methods").out
    assert {method.module for method in methods()} <= set(vlightning.lightning_modules.__all__)
    folders = {path.name for path in (ROOT / "configs").iterdir()} - {"engines", "slurm", "strategy"}
    assert {method.name for method in methods()} == folders
    for method in methods():
        count = len(list((ROOT / "configs" / method.name).rglob("*.yaml")))
        assert f"{method.name} ({method.module}, {count} configs)" in listed
        assert method.summary in " ".join(listed.split())


def test_configs_lists_each_config_with_its_first_lines_and_of_a_method_its_commands():
    paths = [path for suffix in ("yaml", "sh", "py") for path in (ROOT / "configs").rglob(f"*.{suffix}")]
    shipped = sorted(str(path.relative_to(ROOT)) for path in paths)
    listed = run("configs").out
    assert [line for line in listed.splitlines() if line.startswith("configs/")] == shipped
    assert "    vlightning " not in listed
    for config in configs():
        first = (ROOT / config.path).read_text().splitlines()[0]
        assert len(config.summary) >= 10
        assert first.startswith(f"# {config.summary[:40]}")
    quickstart = run("configs", "mobileclip").out.split("\nconfigs/mobileclip/quickstart.yaml\n")[1]
    assert "\n    vlightning fit --config configs/mobileclip/quickstart.yaml\n" in quickstart
    scripts = run("configs", "slurm").out
    assert "configs/slurm/one_node.sh\n  One node, one process per GPU\n    sbatch configs/slurm/one_node.sh" in scripts
    engines = run("configs", "engines").out
    assert "configs/engines/modal_train.py\n  `vlightning fit` on Modal: one machine of eight GPUs" in engines
    assert '\n    modal run configs/engines/modal_train.py --name albef-4m --words "--config configs/albef/' in engines


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("configs albeff", "Expected a method after configs, got 'albeff': did you mean 'albef'?"),
        ("configs albef clip", "Expected one method after configs, got 'albef clip': name one, or none for all."),
        ("methods albef", "Expected nothing after methods, got 'albef': see vlightning configs albef."),
        ("completion fish", "Expected bash or zsh after completion, got 'fish': other shells have none."),
        ("mehtods", "Expected a subcommand, got 'mehtods': did you mean 'methods'?"),
    ],
)
def test_a_mistake_is_one_sentence(words: str, sentence: str):
    ran = run(*words.split())
    assert (ran.status, ran.sentence) == (2, sentence)


def completed(line: str, folder: Path) -> list[str]:
    """What bash offers at the end of a line."""
    script = (
        run("completion").out + 'COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _vlightning; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    command = ["bash", "--norc", "-c", script, "bash", *line.split(" ")]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_configs_methods_options_and_files(tmp_path: Path):
    (tmp_path / "my_data.yaml").touch()
    assert completed("vlightning ev", tmp_path) == ["evaluate"]
    assert completed("vlightning configs m", tmp_path) == ["mmlg", "mobileclip", "my_data.yaml"]
    assert completed("vlightning fit --config configs/clip/l", tmp_path) == [
        "configs/clip/locked.yaml",
        "configs/clip/lora.yaml",
    ]
    assert completed("vlightning fit --config my", tmp_path) == ["my_data.yaml"]
    assert completed("vlightning fit --ck", tmp_path) == ["--ckpt_path"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_with_and_without_its_own_completion_loaded(tmp_path: Path):
    for before in ("", "autoload -U compinit && compinit -u\n"):
        script = before + run("completion").out + "print -r -- $_comps[vlightning]"
        environment = os.environ | {"ZDOTDIR": str(tmp_path), "HOME": str(tmp_path)}
        done = subprocess.run(["zsh", "-f", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
        assert done.stderr == ""
        assert "_vlightning" in done.stdout


def test_completed_options_exist():
    for names, options in OPTIONS.items():
        for name in names.split():
            shown = run(name, "--help").out
            assert not [option for option in options.split() if option not in shown], name


@pytest.mark.parametrize(
    ("words", "all_methods"),
    [
        ("--config=configs/cocord/quickstart.yaml --print_config", False),
        ("--config=configs/mobileclip/quickstart.yaml --model.dim=1", True),  # the message names what is near
        ("--model.help=CoCoRDModule", True),
        ("--model=CoCoRDModul", True),
        ("--help", True),
    ],
)
def test_a_fit_imports_other_methods_than_it_names_for_a_help_and_a_message_only(words, all_methods, monkeypatch):
    calls = []
    monkeypatch.setattr(vlightning.lightning_modules, "load_all", lambda: calls.append(words))
    run("fit", *words.split())
    assert bool(calls) == all_methods


def test_named_methods_are_imported_alone(monkeypatch):
    names = []
    monkeypatch.setattr(vlightning.lightning_modules._LAZY, "get", names.append)
    vlightning.lightning_modules.load_named({"CoCoRDModule", "CoCaCaptioner", "resnet8"})
    assert sorted(names) == ["CoCaCaptioner", "CoCoRDModule"]


@pytest.mark.parametrize(
    ("load", "given", "policy"), [(0.9, None, None), (1.0, None, "passive"), (1.0, "active", "active")]
)
def test_threads_sleep_where_other_work_wants_half_of_the_processors(load, given, policy, monkeypatch):
    monkeypatch.setattr(os, "environ", {} if given is None else {"OMP_WAIT_POLICY": given})
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    let_threads_sleep()
    assert os.environ.get("OMP_WAIT_POLICY") == policy
