"""ALBEF sharded over two processes with FSDP2 equals ALBEF under DDP, and one process can load its checkpoints."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

from support.methods.albef import IMAGE_SIZE, MAX_TOKENS, SIZES, RandomPairs, random_batch, tiny_albef
from support.methods.tiny_modules import trainer
from support.runs.distributed import rank_trainer, run_distributed, whole_state
from support.runs.forked import VLIGHTNING, run_ranks
from vlightning.callbacks import AtomicCheckpointIO, consolidate_checkpoint
from vlightning.datamodules import ShapesDataModule
from vlightning.lightning_modules import ALBEFModule

STEPS = 8


def trajectory(dtype, changes, options):
    """Whole states after the same steps under DDP and sharded, and what a process held at the end of the latter."""
    states = []
    for kind in ("ddp", "sharded"):
        module = tiny_albef(changes=changes, text={"dropout": 0.0}, momentum={"momentum": 0.9}).to(dtype)
        pairs = RandomPairs(64)
        pairs.rows["image"] = pairs.rows["image"].to(dtype)
        order = DistributedSampler(pairs, shuffle=False)
        run = rank_trainer(kind, max_steps=STEPS, max_epochs=-1, **options)
        run.fit(module, DataLoader(pairs, batch_size=4, sampler=order, drop_last=True))
        assert run.global_step == STEPS
        states.append(whole_state(module))
    assert isinstance(module, ALBEFModule)
    held = sum(p.to_local().numel() for p in module.parameters())
    groups = [name for name, part in module.named_modules() if isinstance(part, FSDPModule)]
    return states, held, sum(p.numel() for p in module.parameters()), groups


# In float32 both add up in the same order, but for the norm that gradients are clipped by and accumulated gradients;
# there Adam amplifies the noise, as it does between any two orders, and float64 shows that there is nothing else.
@pytest.mark.parametrize(
    ("dtype", "changes", "options"),
    [
        pytest.param(torch.float32, {"mlm": False}, {"precision": "bf16-mixed"}, id="bf16_without_words"),
        pytest.param(
            torch.float32,
            {"memory": {"micro_batch_size": 3, "activation_checkpointing": True}},
            {},
            id="slices_and_checkpointing",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            torch.float64,
            {"memory": {"micro_batch_size": 2}},
            {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0},
            id="slices_accumulation_and_clipping",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_eight_sharded_steps_equal_ddp(dtype, changes, options):
    start = tiny_albef(changes=changes, text={"dropout": 0.0}).state_dict()
    ranks = run_distributed(trajectory, dtype, changes, options)
    for (plain, sharded), *_ in ranks:
        assert plain.keys() == sharded.keys() == start.keys()
        for name, tensor in plain.items():
            torch.testing.assert_close(sharded[name], tensor, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    words = "student.text_encoder.bert.embeddings.word_embeddings.weight"
    for name in ("temperature", "teacher.text_proj.weight", words):
        assert (sharded[name] - start[name]).abs().max() > 1e-4, name
    assert int(sharded["image_queue.filled"]) == SIZES["contrast"]["queue_size"]
    (_, first, whole, groups), (_, second, _, _) = ranks
    assert first + second == whole
    assert abs(first - second) < 0.1 * whole
    blocks = SIZES["vision"]["depth"] + SIZES["text"]["depth"] + SIZES["text"]["fusion_depth"]
    assert len(groups) == 2 * (blocks + 1) + 1


def albef():
    return tiny_albef(text={"vocab_size": 200, "fusion_depth": 2}, rerank={"when": "always", "k": 10})


def answers(module):
    """Call every public method of the networks and of the module with resharded parameters."""
    batch = random_batch(2)
    image, ids, mask = (batch[name] for name in ("image", "input_ids", "attention_mask"))
    found = {}

    def ask(part, method, *inputs):
        for group in module.modules():
            if isinstance(group, FSDPModule):
                group.reshard()
        found[f"{type(part).__name__.removeprefix('FSDP')}.{method}"] = answer = getattr(part, method)(*inputs)
        return answer

    _, tokens = ask(module, "encode_images", image)
    ask(module, "encode_texts", ids, mask)
    states = ask(module, "text_states", ids, mask)
    ask(module, "match_scores", states[:1], mask[:1], tokens[:1])
    ask(module, "word_maps", image, ids, mask)
    tokens, states = ask(module.teacher, "encode_image", image), ask(module.teacher, "encode_text", ids, mask)
    ask(module.teacher, "project_image", tokens)
    ask(module.teacher, "project_text", states)
    ask(module.teacher, "predict_words", ask(module.teacher, "fuse", states, mask, tokens)[:, 0])
    return found


def sharded_answers():
    module = albef().eval()
    names = ("data_parallel", "tensor_parallel")
    module._device_mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=names)
    module.configure_model()
    with torch.no_grad():
        return answers(module)


# Evaluation


def shapes(**changes):
    return ShapesDataModule(
        **{
            "length": 48,
            "eval_length": 13,
            "batch_size": 4,
            "eval_batch_size": 4,
            "num_workers": 0,
            "image_size": IMAGE_SIZE,
            "vocab_size": 200,
            "max_tokens": MAX_TOKENS,
        }
        | changes
    )


def evaluated(run, module, ckpt_path=None):
    run.validate(module, datamodule=shapes(), verbose=False, ckpt_path=ckpt_path)
    batch = random_batch(2)
    maps = module.eval().word_maps(batch["image"], batch["input_ids"], batch["attention_mask"])
    result = module.evaluation.result
    near = result.near_images
    tensors = result.image_features, result.text_features, near.index, near.match_score, maps.detach()
    return {name: value.item() for name, value in run.callback_metrics.items()}, [t.clone() for t in tensors]


# Checkpoints


def state_of(run):
    optimizer = run.optimizers[0].state_dict()
    moments = {
        f"{number}.{name}": value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for number, state in optimizer["state"].items()
        for name, value in state.items()
    }
    rates = [group["lr"] for group in optimizer["param_groups"]]
    return whole_state(run.lightning_module), moments, rates, run.global_step


def assert_same(one, other):
    for tensors, others in zip(one[:2], other[:2], strict=True):
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, others[name]), name
    assert one[2:] == other[2:]


class Keep(Checkpoint):
    """Saves after the eighth step, the second one of an epoch, after all other callbacks."""

    def __init__(self, path):
        self.path, self.state = path, None

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 8 and self.state is None:
            trainer.save_checkpoint(self.path)
            self.state = state_of(trainer)


def fit_sharded(path):
    keep = Keep(path)
    run = rank_trainer("sharded", callbacks=[keep], max_steps=11, limit_val_batches=0, enable_checkpointing=True)
    run.fit(albef(), datamodule=shapes())
    return keep.state, state_of(run)


def resume_sharded(path, steps):
    run = rank_trainer("sharded", max_steps=steps, limit_val_batches=0)
    run.fit(albef(), datamodule=shapes(), ckpt_path=path)
    return state_of(run)


class Ranks(NamedTuple):
    """What a rank of two found, in the order in which it was done."""

    answers: dict[str, Any]
    evaluation: tuple[dict[str, float], list[torch.Tensor]]
    saved: tuple[Any, ...]
    """The state when the rank saved its part of the folder, in passing."""
    end: tuple[Any, ...]
    resumed: tuple[Any, ...]
    """The state at the end of a run that was resumed from the folder."""
    resumed_from_file: tuple[Any, ...]
    """The state after resuming from the file of one process."""
    evaluation_of_folder: tuple[dict[str, float], list[torch.Tensor]]


def on_rank(folder, file):
    found = sharded_answers()
    evaluation = evaluated(rank_trainer("sharded"), albef())
    ends = *fit_sharded(folder), resume_sharded(folder, 11), resume_sharded(file, 8)
    return found, evaluation, *ends, evaluated(rank_trainer("sharded"), albef(), folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the two ranks save in passing."""
    return tmp_path_factory.mktemp("run") / "last.ckpt"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file of one process after eight steps, and the state that it had."""
    keep = Keep(tmp_path_factory.mktemp("one") / "one.ckpt")
    run = trainer(keep, max_steps=8, max_epochs=-1, limit_val_batches=0, enable_checkpointing=True)
    run.fit(albef(), datamodule=shapes(batch_size=8))
    return keep


@pytest.fixture(scope="module")
def ranks(folder, file):
    return [Ranks(*found) for found in run_distributed(on_rank, str(folder), str(file.path))]


@pytest.mark.slow
def test_every_method_gathers_what_it_needs(ranks):
    with torch.no_grad():
        expected = answers(albef().eval())
    for found in ranks:
        torch.testing.assert_close(found.answers, expected, rtol=1e-5, atol=1e-6)


def assert_same_evaluations(found, expected):
    assert found[0] == pytest.approx(expected[0])
    for tensor, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def untrained():
    return evaluated(trainer(), albef())


def test_reranked_evaluation_equals_one_process(ranks, untrained):
    assert "val/rerank_recall_mean" in untrained[0]
    for found in ranks:
        assert_same_evaluations(found.evaluation, untrained)


def test_a_resumed_sharded_run_equals_the_uninterrupted_run(ranks):
    assert_same(ranks[0].saved, ranks[1].saved)
    assert_same(ranks[0].end, ranks[1].end)
    for found in ranks:
        assert_same(found.resumed, found.end)


def test_one_process_resumes_from_the_folder(ranks, folder, tmp_path):
    state = ranks[0].saved
    run = trainer(max_steps=8, max_epochs=-1, limit_val_batches=0, plugins=[AtomicCheckpointIO()])
    run.fit(albef(), datamodule=shapes(), ckpt_path=folder)
    assert_same(state_of(run), state)

    consolidate_checkpoint(folder, tmp_path / "one.ckpt")
    loaded = ALBEFModule.load_from_checkpoint(tmp_path / "one.ckpt")
    assert all(torch.equal(tensor, state[0][name]) for name, tensor in loaded.state_dict().items())
    assert loaded.hparams == albef().hparams


def test_evaluations_of_the_folder_agree(ranks, folder, untrained):
    expected = evaluated(trainer(plugins=[AtomicCheckpointIO()]), albef(), folder)
    for found in ranks:
        assert_same_evaluations(found.evaluation_of_folder, expected)
    assert (untrained[1][0] - expected[1][0]).abs().max() > 1e-3


def test_sharded_processes_resume_from_the_file_of_one_process(ranks, file):
    for found in ranks:
        assert_same(found.resumed_from_file, file.state)


# The command line

ROOT = Path(__file__).resolve().parents[3]
SMALL = {"length": 64, "eval_length": 12, "batch_size": 16, "num_workers": 0}


def vlightning(folder, subcommand, *words, processes=2):
    ranks = run_ranks([VLIGHTNING, subcommand, *words], processes, cwd=folder)
    for done in ranks:
        assert done.returncode == 0, done.stdout + done.stderr
    return ranks[0].stdout


@pytest.mark.slow
def test_the_command_line_trains_resumes_and_evaluates(tmp_path):
    configs = (f"--config={ROOT / 'configs' / name}" for name in ("albef/quickstart.yaml", "strategy/fsdp.yaml"))
    fit = (*configs, "--trainer.devices=2", *(f"--data.{name}={value}" for name, value in SMALL.items()))
    vlightning(tmp_path, "fit", *fit, "--trainer.max_steps=3")
    first, second = (tmp_path / f"runs/albef_quickstart/version_{n}/checkpoints/last.ckpt" for n in (0, 1))
    assert sorted(os.listdir(first)) == ["meta.pt", "shard-00000.pt", "shard-00001.pt"]
    vlightning(tmp_path, "fit", *fit, "--trainer.max_steps=4", "--ckpt_path", first)
    reached = [AtomicCheckpointIO().load_checkpoint(path) for path in (first, second)]
    assert [checkpoint["global_step"] for checkpoint in reached] == [3, 4]
    assert reached[1]["hyper_parameters"]["_class_path"].endswith(".ALBEFModule")
    moved = [checkpoint["state_dict"]["student.vision_proj.weight"] for checkpoint in reached]
    assert 0 < (moved[0] - moved[1]).abs().max() < 0.01

    words = ("--ckpt_path", second, "--data=ShapesDataModule", "--data.eval_length=12")
    table = vlightning(tmp_path, "test", *words, processes=1)
    assert "test/recall_mean" in table
