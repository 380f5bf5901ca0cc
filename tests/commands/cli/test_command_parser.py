"""Wrong arguments of the commands beside LightningCLI's end in one sentence, and status 2."""

import pytest

from vlightning.cli import main

MISTAKES = {
    "evaluate --modle run": "Expected an option of vlightning evaluate, got '--modle': did you mean '--model'?",
    "evaluate --model run --protocol zero_shots": "Expected a value for --protocol, got 'zero_shots': did you mean "
    "'zero_shot'?",
    "evaluate --model run --shots many": "Expected a whole number for --shots, got 'many': correct it.",
    "evaluate --model run --c=high": "Expected a number for --c, got 'high': correct it.",
    "evaluate --model": "Expected one value after --model: add it.",
    "evaluate run": "Expected no further argument of vlightning evaluate, got 'run': remove it, or quote words that "
    "belong together.",
    "new methods mine": "Expected a value for kind, got 'methods': did you mean 'method'?",
    "new method": "Expected name after vlightning new, got none: vlightning new --help lists the arguments.",
    "new method mine --folders x": "Expected an option of vlightning new, got '--folders': did you mean '--folder'?",
    "compare a.yaml --seeds 0": "Expected a number of at least 1, got 0 for --seeds: correct it.",
    "compare a.yaml --seed=2": "Expected an option of vlightning compare, got '--seed=2': did you mean '--seeds'?",
    "export --layout onnxx a b": "Expected a value for --layout, got 'onnxx': did you mean 'onnx'?",
    "push folder": "Expected name after vlightning push, got none: vlightning push --help lists the arguments.",
    "convert": "Expected checkpoint, target after vlightning convert, got none: vlightning convert --help lists the "
    "arguments.",
    "demo --model run --image x": "Expected an option of vlightning demo, got '--image': did you mean '--images'?",
    "plan --devices two": "Expected a whole number for --devices, got 'two': correct it.",
    "data --limit": "Expected one value after --limit: add it.",
    "embed --views x": "Expected a whole number for --views, got 'x': correct it.",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_wrong_argument_is_one_sentence(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    assert capsys.readouterr().err == f"vlightning: error: {MISTAKES[words]}\n"
    assert stop.value.code == 2
