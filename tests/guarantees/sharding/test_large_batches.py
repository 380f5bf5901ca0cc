"""Formulas of `benchmarks/formulas.py` equal the allocated memory, and `docs/large_batches.md` shows their values."""

import re
from pathlib import Path

import large_batches
import pytest
import torch
from formulas import Run, batch_memory, clip_tables, describe, model_memory, sharded_traffic, traffic
from large_batches import ACTIVATIONS, METHODS, activations, ready, sizes
from lightning.pytorch import Trainer
from memory import held_bytes, saved_bytes
from torch.nn.functional import normalize
from traffic import TrafficOfSteps, totals

from support.methods.albef import tiny_albef
from support.methods.random_batches import NAMES, random_rows, rows_loader, small
from support.runs.distributed import rank_trainer, run_distributed
from vlightning.commands.plan.estimate import Estimate, Sizes
from vlightning.lightning_modules.albef.itc import Keys, image_text_contrast
from vlightning.lightning_modules.albef.network import Encoded
from vlightning.lightning_modules.cocord.losses import contrastive_loss
from vlightning.lightning_modules.losses.contrast import PairFeatures, contrast_losses

ROOT = Path(__file__).resolve().parents[3]


def unit_rows(rows, width, gradient=False):
    return normalize(torch.randn(rows, width), dim=1).requires_grad_(gradient)


def check_tables(tables, run, slice_rows, loss):
    """Return the bytes saved per entry of [rows, columns], and the peak, with narrow features."""
    shape = (run.rows, tables.columns(run))
    kept = saved_bytes(loss, lambda tensor: tensor.shape == shape)
    assert kept == (0 if slice_rows else tables.kept_bytes(run))
    most = held_bytes(lambda: loss().backward()).most
    # Beside the tables there are a few columns and rows of features.
    assert tables.most_bytes(run, slice_rows) == pytest.approx(most, rel=0.04)


@pytest.mark.parametrize("slice_rows", [None, 100])
@pytest.mark.parametrize("teachers", [0, 1, 2, 3])
@pytest.mark.parametrize("masks", [False, True])
def test_the_formula_holds_for_the_logits_of_clips_loss(teachers, masks, slice_rows):
    if teachers and masks:
        return
    run = Run(2000, 4, loss_rows=slice_rows)

    def side(gradient):
        own, everyone = ([unit_rows(rows, 2, gradient) for _ in range(2)] for rows in (run.rows, run.pairs))
        return PairFeatures(*own, *everyone, torch.tensor(10.0, requires_grad=gradient))

    student, taught = side(True), [side(False) for _ in range(teachers)]
    ids = (torch.arange(run.rows)[:, None], torch.arange(run.pairs)[:, None]) if masks else None

    def loss():
        terms = contrast_losses(student, taught, 0, slice_rows, ids)
        return terms.contrast + terms.distillation

    loss().backward()  # creates the gradients
    check_tables(clip_tables(2, teachers, masks), run, slice_rows, loss)


@pytest.mark.parametrize("slice_rows", [None, 25])
def test_the_formula_holds_for_the_logits_of_albef(slice_rows):
    module = tiny_albef(contrast={"queue_size": 6000})
    run = Run(100, 1, slice_rows)
    student = Encoded(None, None, None, unit_rows(100, 8, True), unit_rows(100, 8, True))
    teacher = Encoded(None, None, None, unit_rows(100, 8), unit_rows(100, 8))
    keys = Keys(teacher.image_features, teacher.text_features, torch.arange(200).view(100, 2), offset=0, gathered=True)

    def loss():
        return image_text_contrast(
            student, teacher, keys, module.queues(), module.temperature, 0.4, "image_id", slice_rows
        ).loss

    loss().backward()
    check_tables(describe(module).tables, run, slice_rows, loss)


def test_the_formula_holds_for_the_logits_of_cocord(tmp_path):
    module = small("cocord", tmp_path, contrast={"queue_size": 6000})
    query, key, dictionary = unit_rows(100, 4, True), unit_rows(100, 4), unit_rows(6000, 4)
    valid = torch.ones(6000, dtype=torch.bool)

    def loss():
        return contrastive_loss(query, key, dictionary, valid, 0.1)

    loss().backward()
    check_tables(describe(module).tables, Run(100, 1), None, loss)


def parts_of(module):
    """Bytes that this process holds of a module after a step, as `model_memory` names them."""
    pairs = module.momentum_pairs() if hasattr(module, "momentum_pairs") else {}
    followers = {id(p) for pair in pairs.values() for p in module.get_submodule(pair.target).parameters()}
    optimizer = module.trainer.optimizers[0]
    found = dict.fromkeys(("parameters", "gradients", "optimizer", "averages", "frozen teacher"), 0)
    for parameter in module.parameters():
        local = getattr(parameter, "_local_tensor", parameter).nbytes
        fate = "parameters" if parameter.requires_grad else "averages" if id(parameter) in followers else None
        found[fate or "frozen teacher"] += local
        if parameter.grad is not None:
            found["gradients"] += getattr(parameter.grad, "_local_tensor", parameter.grad).nbytes
        for state in optimizer.state.get(parameter, {}).values():
            local_state = getattr(state, "_local_tensor", state)
            found["optimizer"] += local_state.nbytes if local_state.dim() else 0
    queues = module.queues().values() if hasattr(module, "queues") else []
    return found | {"queue": sum(buffer.nbytes for queue in queues for buffer in queue.buffers())}


@pytest.mark.parametrize("name", NAMES)
def test_one_process_stores_the_model_and_sends_nothing(name, tmp_path):
    module = small(name, tmp_path)
    counted = TrafficOfSteps()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", max_steps=2, logger=False, callbacks=[counted], **quiet)
    trainer.fit(module, rows_loader(name, 8, 4))
    assert parts_of(module) == model_memory(describe(module), Run(4, 1))
    assert [totals(step) for step in counted.steps] == [{}, {}] == [traffic(describe(module), Run(4, 1))] * 2


def sharded_parts(name, folder):
    module = small(name, Path(folder))
    method = describe(module)
    counted = TrafficOfSteps()
    trainer = rank_trainer("sharded", max_steps=2, callbacks=[counted])
    world = trainer.world_size
    trainer.fit(module, rows_loader(name, 8 * world, 4))
    found = totals([each for each in counted.steps[1] if each.operation == "all-gather" and each.kind not in OWN])
    gathers = sum(total.bytes for total in found.values())
    gradients = totals([each for each in counted.steps[1] if each.operation == "reduce-scatter"])["gradients"].bytes
    least = {kind: each.bytes for kind, each in sharded_traffic(method, Run(4 * world, world)).items()}
    return parts_of(module), model_memory(method, Run(4, 1)), gathers, gradients, least


OWN = ("features", "keys", "ids")  # what a step itself gathers


def planned_shares(whole, processes):
    """The bytes that `vlightning plan` computes for a process, by the kinds of the document."""
    sizes = Sizes(whole["parameters"], whole["optimizer"], whole["averages"], whole["frozen teacher"], 0)
    step = dict.fromkeys(("batch", "activations", "logits"), lambda rows: 0.0)
    found = Estimate(processes, sizes, step, {}, None).memory(4, sharded=True)
    return found | {"averages": found["moving averages"], "frozen teacher": found["frozen networks"]}


@pytest.mark.parametrize(("name", "processes"), [("mobileclip", 2), ("albef", 3)])
def test_sharded_processes_divide_the_model(name, processes, tmp_path):
    ranks = run_distributed(sharded_parts, name, str(tmp_path), processes=processes)
    _, whole, gathers, gradients, least = ranks[0]
    for kind, number in whole.items():
        held = [rank[0][kind] for rank in ranks]
        assert held == [number] * processes if kind == "queue" else sum(held) == number
        planned = planned_shares(whole, processes).get(kind)
        if planned:  # `vlightning plan` divides; rows of small matrices are filled up to a multiple
            assert max(held) == pytest.approx(planned, rel=0.1 if processes == 2 else 0.25)
    assert gradients == pytest.approx(least["gradients"], rel=0.1)  # rows are filled up to a multiple
    # Blocks twice; ALBEF calls several methods of each network.
    assert least["parameters"] <= gathers <= (2.5 if name == "mobileclip" else 7) * least["parameters"]


QUEUES = {name: {"contrast": {"queue_size": 64}} for name in ("albef", "cocord")}


@pytest.mark.parametrize("name", NAMES)
def test_a_step_saves_the_measured_bytes_per_pair(name, tmp_path):
    module = ready(small(name, tmp_path, **QUEUES.get(name, {})))
    module.setup("fit")
    found = activations(module, random_rows(name, 8), random_rows(name, 16))
    rows, run = random_rows(name, 32), Run(32, 1)
    memory = held_bytes(lambda: module.training_step(rows, 0))
    method = describe(module)
    assert found.batch * 32 == sum(column.nbytes for column in rows.values())
    # `all` holds the logits of a few columns too.
    assert memory.after == pytest.approx(found.all * 32 + method.tables.kept_bytes(run), rel=0.1)


@pytest.mark.parametrize("name", ["albef", "shre"])
def test_the_peak_of_a_sliced_step_grows_as_the_formula(name, tmp_path):
    module = ready(small(name, tmp_path, **({"vision": {"width": 32}} if name == "shre" else {})))
    module.setup("fit")
    method, found = describe(module), activations(module, random_rows(name, 8), random_rows(name, 16))
    rows = random_rows(name, 64)

    def step():
        result = module.training_step(rows, 0)
        (result if isinstance(result, torch.Tensor) else result["loss"]).backward()

    step()
    most, formula = {}, {}
    for micro in (16, 32):
        slices = {"micro_batch_size": micro} | ({"loss_rows": micro} if name == "shre" else {})
        if hasattr(module, "memory"):
            module.change_settings("memory", **slices)
        else:
            module.hparams.update(slices)
        most[micro] = held_bytes(step).most
        kinds = batch_memory(method, found, Run(64, 1, micro, micro))
        formula[micro] = sum(kinds.values()) - kinds["images and tokens"]
    # Such small networks have gradients and buffers of work beside, which do not grow with the slice.
    assert most[32] - most[16] == pytest.approx(formula[32] - formula[16], rel=0.2)


def test_every_method_has_measured_activations():
    assert ACTIVATIONS.keys() == METHODS.keys()
    known = sizes()
    assert known["SHRe"].trained == 4 * (114_983_656 + 3)  # docs/methods/shre.md, and a temperature for each result
    assert known["MM-LG"].trained == 4 * 30_311_065
    assert known["MM-LG"].frozen == 4 * 149_620_737  # open_clip's ViT-B/16


def test_the_document_shows_what_the_script_prints():
    document = (ROOT / "docs/large_batches.md").read_text()
    shown = re.search(r"<!-- benchmarks/large_batches.py -->\n(.*)<!-- end -->", document, re.S)
    assert shown
    assert shown.group(1).strip() == large_batches.tables().strip()
