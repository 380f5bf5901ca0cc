"""`vlightning plan` agrees with the formulas and measurements of `docs/large_batches.md`."""

import re
from pathlib import Path

import pytest

from support.command_line import run
from vlightning.planning.estimate import USABLE, Estimate, Sizes, quadratic

ROOT = Path(__file__).resolve().parents[2]


def documented(method, gpus=64):
    """Rows of a method's tables in the document, of one number of GPUs."""
    text = (ROOT / "docs/large_batches.md").read_text().partition(f"### {method}\n")[2].partition("\n### ")[0]
    column = [8, 16, 32, 64, 128, 256].index(gpus)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| [^|]+ \| +[\d.,]+ \|", line)]
    return {name: float(cells[column].replace(",", "")) for name, *cells in rows}


def printed(out):
    """Rows of the printed tables: name to the columns DDP and FSDP2; one that is empty is left out."""
    rows = [re.split(r"  +", line) for line in out.splitlines() if "  " in line]
    return {
        name: [float(cell.replace(",", "")) for cell in cells if cell[0].isdigit()] for name, *cells in map(clean, rows)
    }


def clean(cells):
    return [cell.rstrip("%") for cell in cells if cell]


def test_the_plan_of_a_shipped_config_is_that_of_the_document():
    words = ("--devices", "64", "--batch", "65536", "--precision", "32-true", "--steps", "100")
    ran = run("plan", "--config", ROOT / "configs/shre/distill.yaml", *words)
    assert ran.status == 0, ran.err
    assert "Computed" in ran.out
    found, expected = printed(ran.out), documented("SHRe")
    for name in ("parameters", "gradients", "optimizer"):
        assert found[name][0] == expected[name]
    assert found["parameters"][0] == pytest.approx(114_983_656 * 4 / 2**30, abs=5e-4)
    assert found["optimizer"][0] == pytest.approx(114_983_656 * 8 / 2**30, abs=5e-4)
    assert found["frozen networks"][0] == expected["frozen teacher"]
    assert found["images and tokens"][0] == expected["images and tokens"]
    features = expected["gathered features"] + expected["gradients of features"]
    assert found["activations"][0] == pytest.approx(expected["activations, all at once"] + features, rel=0.1)
    # The document masks pairs of the same image, with one byte more for each of six tables, and the config does not.
    assert found["logits"][0] == pytest.approx(expected["logits, all at once"] * 32 / 38, rel=0.01)
    assert found["of the step: all-gather"][0] == pytest.approx(expected["features: all-gather"], rel=0.01)
    assert found["gradients: all-reduce"][0] == pytest.approx(expected["gradients: all-reduce"], abs=1)
    assert found["gradients: reduce-scatter"] == [
        pytest.approx(expected["sharded, at least: gradients: reduce-scatter"], abs=1)
    ]
    seconds, tera = (
        float(re.search(pattern, ran.out)[1]) for pattern in (r"included: ([\d.]+) s", r"([\d.]+) TFLOP of")
    )
    assert seconds == pytest.approx(tera / (0.4 * 67), rel=1e-3)
    assert f"{100 * seconds / 3600:.2f} hours" in ran.out


@pytest.mark.parametrize("adapters", [False, True])
def test_the_plan_of_a_fine_tuned_clip_has_the_sizes_of_the_published_model(adapters):
    files = ["finetune", "lora"] if adapters else ["finetune"]
    configs = [f"--config={ROOT}/configs/clip/{name}.yaml" for name in files]
    ran = run("plan", *configs, "--model.model=ViT-B-32", "--devices=8", "--batch=512", "--gpu=a100")
    assert ran.status == 0, ran.err
    found = printed(ran.out)
    published = 151_277_313 * 4 / 2**30  # parameters of ViT-B/32
    assert found["frozen networks" if adapters else "parameters"][0] == pytest.approx(published, abs=6e-4)
    assert found["optimizer"][0] == pytest.approx(2 * found["parameters"][0], abs=2e-3)
    # open_clip's profile: 7.40 billion multiplications of a pair; forward pass, and twice as many backward.
    operations = float(re.search(r"([\d.]+) TFLOP of", ran.out)[1])
    whole = 64 * 7.40e9 * 2 * 3 / 1e12
    assert operations == pytest.approx(whole, rel=0.02) if not adapters else 2 / 3 * whole < operations < 0.75 * whole


def test_an_unknown_gpu_is_refused_with_the_nearest_name():
    ran = run("plan", "--config", "configs/shre/distill.yaml", "--gpu", "h10")
    assert ran.status
    assert "did you mean 'h100'?" in ran.sentence


def test_a_quadratic_function_is_found_again():
    found = quadratic(64, [3 * x * x + 5 * x + 7 for x in (64, 128, 192)])
    assert found(1000) == pytest.approx(3 * 1000**2 + 5 * 1000 + 7)


@pytest.mark.parametrize("sharded", [False, True])
def test_the_largest_batch_fits_and_one_row_more_does_not(sharded):
    step = {kind: (lambda rows: 10.0 * rows) for kind in ("activations", "batch")} | {
        "logits": lambda rows: 0.5 * rows**2
    }
    found = Estimate(4, Sizes(1000, 2000, 1000, 500, 100), step, {}, None)
    memory = 100_000.0
    rows = found.largest_rows(memory, sharded)
    first, more = (sum(found.memory(number, sharded).values()) for number in (rows, rows + 1))
    assert first <= USABLE * memory < more
    fixed = 5500 / (4 if sharded else 1) + 100
    assert first == fixed + 20 * rows + 0.5 * rows**2
