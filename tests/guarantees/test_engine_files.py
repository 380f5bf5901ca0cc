"""The files of configs/engines/: fields by the engines' schemas, and words that `vlightning fit` takes."""

import ast
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.project.pages import PAGES
from support.runs.recipes import compose

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / "configs/engines"
SCHEMAS = json.loads((ROOT / "tests/support/data/engine_fields.json").read_text())
TYPES = {"str": str, "int": int, "bool": bool, "dict": dict, "list": list}
PAGE = "docs/engines.md"


def unknown(value: Any, expected: Any, schema: dict[str, Any], name: str = "") -> list[str]:
    """The fields that the schema does not have, and those of another type."""
    if isinstance(expected, str) and expected.startswith("["):
        assert isinstance(value, list)
        return [wrong for each in value for wrong in unknown(each, expected[1:-1], schema, f"{name}[]")]
    if isinstance(expected, str) and expected in schema:
        expected = schema[expected]
    if isinstance(expected, dict):
        if not isinstance(value, dict):
            return [name]
        wrong = []
        for key, each in value.items():
            field = expected.get(key, expected.get("*"))
            wrong += [f"{name}.{key}"] if field is None else unknown(each, field, schema, f"{name}.{key}")
        return wrong
    if expected in TYPES:
        return [] if type(value) is TYPES[expected] else [name]
    return [] if value in expected.split("|") else [name]


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_fields_are_those_of_the_engine(name: str):
    schema = SCHEMAS[name]
    content = yaml.safe_load((ENGINES / f"{name}.yaml").read_text())
    assert unknown(content, schema["fields"], schema) == []
    text = (ENGINES / f"{name}.yaml").read_text()
    mistakes = (("replicas: 2", "replica: 2"), ("use_spot: true", "use_spot: 1"), ("Policy: ExitCode", "Policy: Code"))
    for right, wrong in mistakes:
        if right in text:
            assert unknown(yaml.safe_load(text.replace(right, wrong)), schema["fields"], schema)


def commands() -> dict[str, str]:
    """The command that each file starts a process with."""
    kubernetes = yaml.safe_load((ENGINES / "kubernetes.yaml").read_text())["spec"]
    assert kubernetes["elasticPolicy"]["maxReplicas"] == kubernetes["pytorchReplicaSpecs"]["Worker"]["replicas"] == 2
    (words,) = kubernetes["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["args"]
    run = yaml.safe_load((ENGINES / "skypilot.yaml").read_text())["run"].replace("\\\n", "")
    return {"kubernetes": words.partition("TERM;")[2].partition(" & ")[0], "skypilot": run.splitlines()[-1]}


@pytest.mark.parametrize("name", ["kubernetes", "skypilot"])
def test_each_file_starts_torchrun_with_options_that_it_has(name: str):
    from torch.distributed.run import get_args_parser

    text = commands()[name].replace("$(WORDS)", "").replace("$WORDS", "")
    text = re.sub(r"\$\(echo [^)]*\)", "host", text)
    text = re.sub(r'"\$SKYPILOT_\w+"', "1", text)
    program, *words = shlex.split(text.strip().removeprefix("exec "))
    assert program == "torchrun"
    given = get_args_parser().parse_args(words)
    assert (given.module, given.training_script) == (True, "vlightning.cli")
    assert given.training_script_args[0] == "fit"


@pytest.mark.parametrize(
    ("ends", "signals", "status"), [("exit 0", 0, 0), ("exit 2", 0, 2), ("exec sleep 60 >&-", 1, 143)]
)
def test_a_pod_that_gets_sigterm_ends_with_a_status_that_starts_it_again(tmp_path: Path, ends, signals, status):
    """torchrun ends with 1 after SIGTERM, which PyTorchJob's ExitCode takes for a failure of the program."""
    container = yaml.safe_load((ENGINES / "kubernetes.yaml").read_text())["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = container["template"]["spec"]["containers"]
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f"#!/bin/sh\ntrap 'echo stopped; exit 1' TERM\necho started\n({ends}) & wait $!\n")
    torchrun.chmod(0o755)
    words = [word.replace("$(WORDS)", "") for word in container["args"]]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    pod = subprocess.Popen([*container["command"], *words], env=environment, stdout=subprocess.PIPE, text=True)
    assert pod.stdout.readline() == "started\n"
    if signals:
        pod.terminate()
    said, _ = pod.communicate(timeout=30)
    assert pod.returncode == status
    assert said == "stopped\n" * signals


@pytest.mark.parametrize("file", sorted(ENGINES.iterdir()), ids=lambda file: file.name)
def test_the_words_in_the_first_lines_compose(file: Path):
    head = file.read_text().partition("apiVersion")[0].replace("\\\n", " ")
    found = re.findall(r"configs/(?!engines)\w+/\w+\.yaml", head)
    if "embed ViT-B-32" not in head:
        assert _names(compose(*[ROOT / config for config in found])) == "ALBEFModule"


def _names(composed: dict[str, Any]) -> str:
    return composed["model"]["class_path"].rpartition(".")[2]


def test_modal_calls_only_what_its_package_has():
    """Names and arguments of modal 1.6: `modal/app.py`, `modal/retries.py`, `modal/volume.py`, `modal/_image.py`."""
    known = {
        "App": set(),
        "debian_slim": {"python_version"},
        "pip_install": set(),
        "from_name": {"create_if_missing"},
        "function": {"image", "gpu", "volumes", "timeout", "retries", "single_use_containers"},
        "Retries": {"max_retries", "initial_delay"},
        "local_entrypoint": set(),
        "remote": set(),
    }
    calls = {
        call.func.attr: {each.arg for each in call.keywords}
        for call in ast.walk(ast.parse((ENGINES / "modal_train.py").read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in known
    }
    assert calls == known


def test_the_page_names_every_file_and_engine():
    for file in ENGINES.iterdir():
        assert f"configs/engines/{file.name}" in PAGES[PAGE]
    assert "VLIGHTNING_JOB" in PAGES[PAGE]
