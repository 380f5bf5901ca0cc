"""`vlightning plan` agrees with the formulas and measurements of `docs/large_batches.md`."""

import re
from pathlib import Path

import pytest
import torch
from open_clip import create_model

from support.runs.command_line import run
from vlightning import callbacks, lightning_modules
from vlightning.commands.plan.configuration import Planned, read
from vlightning.commands.plan.counted_step import count_step, fake_tensors, make_fake
from vlightning.commands.plan.estimate import USABLE, Estimate, Layout, Sizes, quadratic, sizes_of
from vlightning.commands.plan.module import has_plan, start
from vlightning.commands.plan.remedies import remedies
from vlightning.common.gpus import GPUS
from vlightning.datamodules.reinforced.reinforcement import stored_bytes
from vlightning.lightning_modules.core.settings import flat

ROOT = Path(__file__).resolve().parents[3]


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


@pytest.mark.slow
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


@pytest.mark.slow
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
    # Formulas of torch differ: 2.777 with its release 2.14, 2.830 with 2.15.
    assert operations == pytest.approx(whole, rel=0.025) if not adapters else 2 / 3 * whole < operations < 0.75 * whole


def test_an_unknown_gpu_is_refused_with_the_nearest_name():
    ran = run("plan", "--config", "configs/shre/distill.yaml", "--gpu", "h10")
    assert ran.status
    assert "did you mean 'h100'?" in ran.sentence


def test_a_quadratic_function_is_found_again():
    found = quadratic([128, 192, 256], [3 * x * x + 5 * x + 7 for x in (128, 192, 256)])
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


def shipped_recipes():
    """The commands of shipped configs that train on GPUs and have a plan: the config to its files."""
    commands = {}
    planned_classes = [name for name, cls in lightning_modules.method_classes().items() if has_plan(cls)]
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        command = re.search(r"^#   vlightning fit (--config .*)", path.read_text(), re.M)
        files = re.findall(r"--config (\S+)", command[1]) if command else []
        if not files or not all((ROOT / file).is_file() for file in files):  # one's own data
            continue
        texts = "".join((ROOT / file).read_text() for file in files)
        planned = any(f"class_path: {name}\n" in texts for name in planned_classes)
        if planned and re.search(r"^  accelerator: gpu", texts, re.M) and path == ROOT / files[-1]:
            commands[str(path.relative_to(ROOT / "configs"))] = files
    return commands


RECIPES = shipped_recipes()


def test_recipes_of_every_method_that_trains_on_gpus_are_planned():
    assert len(RECIPES) >= 20
    assert {name.partition("/")[0] for name in RECIPES} == {"albef", "mmlg", "mobileclip", "shre"}


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted({name.partition("/")[0] for name in RECIPES}))
def test_the_shipped_recipes_of_a_method_fit_on_the_gpus_that_they_name(method):
    callbacks.load_all()  # so that YAML can name them, as the command line does
    lightning_modules.load_all()
    counted = {}
    for name, files in RECIPES.items():
        if name.startswith(f"{method}/"):
            share = bytes_of_recipe(files, counted) / GPUS["h100"].memory
            assert 0.005 < share <= USABLE, f"{name}: {share:.0%}"


def bytes_of_recipe(files, counted):
    """As `vlightning plan` for an H100, by one step of the whole batch in place of three small ones.

    Recipes that differ in what a step does not read are counted once: `counted` has the bytes of those before.
    """
    planned = read([f"--config={ROOT / file}" for file in files])
    trainer = planned.trainer
    devices = 1 if trainer["devices"] == "auto" else int(trainer["devices"])
    processes = devices * int(trainer["num_nodes"] or 1)
    rows = (planned.data.get("global_batch_size") or planned.data["batch_size"] * processes) // processes
    start(planned.module)
    settings = {
        name: value
        for name, value in flat(dict(planned.module.hparams)).items()
        if name.partition(".")[0] not in ("optim", "evaluation") and not name.endswith("weights")
    }
    with fake_tensors(processes):
        make_fake(planned.module)
        batch = planned.module.example_batch(rows, planned.data)
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in batch.items()}
        same = str([type(planned.module), processes, trainer["precision"], sorted(settings.items(), key=str), shapes])
        if same not in counted:
            step = count_step(planned.module, batch, processes, str(trainer["precision"]))
            sizes = sizes_of(planned.module)
            counted[same] = sum(vars(sizes).values()) + sizes.parameters  # gradients
            counted[same] += sum(tensor.nbytes for tensor in batch.values()) + step.activations + step.logits
    return counted[same]


@pytest.mark.slow
def test_a_plan_of_what_does_not_fit_ends_with_the_setting_with_which_it_fits():
    words = [
        f"--config={ROOT}/configs/mmlg/quickstart.yaml",
        "--model.towers.depth=2",  # few and wide layers have as many activations as the config's, in fewer operations
        "--model.towers.width=384",
        "--devices=2",
        "--gpu=t4",
        "--batch=10240",
        "--steps=1000",
    ]
    ran = run("plan", *words)
    assert ran.status == 0, ran.err
    assert printed(ran.out)["of the GPU's memory"][0] > 90
    said = ran.out.partition("It does not fit in 90% of t4. It does with one of:\n")[2].splitlines()
    (setting,) = (line for line in said if "micro_batch_size" in line)
    option, size, share, hours = re.fullmatch(
        r"  (--\S+ \d+): ([\d.]+) GiB \((\d+)%\), ([\d.]+) hours", setting
    ).groups()
    again = run("plan", *words, *option.split())
    assert "does not fit" not in again.out
    assert float(size) == pytest.approx(printed(again.out)["sum of the peaks"][0], abs=0.06)
    assert float(share) == printed(again.out)["of the GPU's memory"][0] <= 90
    assert f"1,000 steps: {hours} hours" in again.out


def test_sharding_is_named_where_it_makes_a_run_fit():
    step = {"activations": lambda rows: 2e9, "batch": lambda rows: 0.0, "logits": lambda rows: 0.0, "flops": float}
    counted = Estimate(4, Sizes(6_000_000_000, 12_000_000_000, 0, 0, 0), step, {}, None)
    layout = Layout(GPUS["4090"], "4090", 4, 32, 1, "bf16-mixed", 0.4, sharded=False)
    said = remedies([], Planned(torch.nn.Module(), {}, {}, [], []), counted, layout, 1000).splitlines()
    assert said[0] == "It does not fit in 90% of 4090. It does with one of:"
    assert said[1].startswith("  --config configs/strategy/fsdp.yaml: 7.5 GiB (33%), ")
    smaller = Layout(GPUS["t4"], "t4", 1, 8, 1, "16-mixed", 0.4, sharded=False)
    assert "no setting was found with which it does" in remedies(
        [], Planned(torch.nn.Module(), {}, {}, [], []), counted, smaller, None
    )


REINFORCE = (
    f"--config={ROOT}/configs/mobileclip/reinforce.yaml",
    '--model.teachers=[{"model": "ViT-B-32", "weights": "openai"}, {"model": "RN50", "weights": "openai"}]',
    *("--model.captioner.model=coca_ViT-B-32", "--model.captioner.captions=2", "--data.augmentations=4"),
    *("--data.batch_size=2", "--model.forward_batch=4"),
)


@pytest.mark.slow
def test_the_plan_of_a_reinforcement_has_memory_speed_hours_and_disk():
    ran = run("plan", *REINFORCE, "--model.captioner.length=12", "--gpu=a10", "--devices=3")
    assert ran.status == 0, ran.err
    assert "6 rows a step on 3 x a10, 2 each, bf16-true." in ran.out
    found = printed(ran.out)
    with torch.device("meta"):
        networks = [create_model(name, device="meta") for name in ("ViT-B-32", "RN50", "coca_ViT-B-32")]
    sizes = [sum(each.numel() for each in (*network.parameters(), *network.buffers())) for network in networks]
    assert found["teachers"][0] == pytest.approx(2 * sum(sizes[:2]) / 2**30, abs=6e-4)
    assert found["captioners"][0] == pytest.approx(2 * sizes[2] / 2**30, abs=6e-4)
    # open_clip's profile: 4.41 and 6.12 billion multiplications of an image, 2.98 each of a text.
    assert found["augmentations"][0] == pytest.approx(4 * 2 * (4.41 + 6.12) / 1e3, rel=0.05)
    assert found["texts"][0] == pytest.approx(3 * 2 * (2.98 + 2.98) / 1e3, rel=0.05)
    tera = sum(found[kind][0] for kind in ("augmentations", "texts", "images to caption", "tokens of captions"))
    speed, hours, disk = (
        float(re.search(pattern, ran.out)[1].replace(",", ""))
        for pattern in (
            r"([\d.,]+) images/s at 40% of 125",
            r"1,000,000 pairs: ([\d.]+) hours",
            r"; ([\d.]+) GB of shards",
        )
    )
    assert 0.2 * 3 * 0.4 * 125 / tera < speed < 3 * 0.4 * 125 / tera  # the decoder's weights are read for each token
    assert hours == pytest.approx(1e6 / speed / 3600, rel=0.01)
    assert disk == pytest.approx(1e6 * stored_bytes(4, 3, 512 + 1024, "pth.gz") / 1e9, abs=0.06)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--config=configs/cocord/probe_stl10.yaml", "--precision=bf16-true"],
            "Expected one of ALBEFModule, CLIPModule",
        ),
        (
            ["--config=configs/shre/distill.yaml", "--precision=bf16-true"],
            "Expected one of 32-true, bf16-mixed, 16-mixed as",
        ),
        (["--config=configs/shre/distill.yaml", "--precision=bf16-mixed", "--gpu=t4"], "give --precision 16-mixed."),
        ([*REINFORCE, "--precision=64-true"], "Expected one of 32-true, bf16-mixed, 16-mixed, bf16-true, 16-true as"),
        ([*REINFORCE[:1], "--model.captioner=TransformersCaptioner"], "plan without it by --model.captioner null."),
    ],
)
def test_what_has_no_plan_is_refused_for_its_reason(words, sentence, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert sentence in run("plan", *words).sentence
