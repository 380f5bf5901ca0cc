"""What the blocks of the pages did; each check is named as its section and gets the names of the page's blocks."""

import contextlib
import csv
import json
import os
import signal
from pathlib import Path

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from data import Colors
from lightning.pytorch import Callback
from model import Model
from start import trainer

ROWS = 12  # of Colors


def equal_on_all(tensor):
    """Check that every process has the same tensor."""
    if dist.is_initialized():
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor)


def EMACallback(page, processes):
    moco = page["moco"]
    for average, weight in zip(moco.teacher.parameters(), moco.student.parameters(), strict=True):
        assert not torch.equal(average, weight)
        equal_on_all(average)


def QueueCallback(page, processes):
    queue = page["queued"].queue
    assert int(queue.filled) == queue.size
    assert torch.allclose(queue.features.norm(dim=1), torch.ones(queue.size))
    equal_on_all(queue.features)


def OptimizerStepCallback(page, processes):
    assert page["counted"].steps == {1: 2, 2: 1}[processes]


class _Loss(Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(torch.rand(()) + outputs["loss"].detach())


def StepSeedCallback(page, processes):
    seen = []
    for _ in range(2):
        torch.manual_seed(1)
        module, losses = Model(), _Loss()
        torch.manual_seed(len(seen))  # the state of the generator does not matter
        trainer(losses, page["StepSeedCallback"](seed=5)).fit(module, Colors())
        seen.append(torch.stack(losses.losses))
    assert torch.equal(*seen)


class _Signal(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == 0 and trainer.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def StopOnSignal(page, processes):
    assert torch.load("last.ckpt", weights_only=True)["global_step"] == 4 // processes
    with contextlib.suppress(SystemExit):
        trainer(_Signal(), page["StopOnSignal"](dirpath="stopped")).fit(Model(), Colors())
    assert torch.load("stopped/last.ckpt", weights_only=True)["global_step"] == 1
    resumed = trainer(page["StopOnSignal"]())
    resumed.fit(Model(), Colors(), ckpt_path="stopped/last.ckpt")
    assert resumed.global_step > 1


def AtomicCheckpointIO(page, processes):
    before, after = (torch.load(name, weights_only=True)["state_dict"] for name in ("last.ckpt", "atomic.ckpt"))
    assert all(torch.equal(before[name], after[name]) for name in before)  # the run was complete
    assert not list(Path().glob(".*"))


def SkipNonFiniteSteps(page, processes):
    assert page["skipping"].skipped_steps == 1
    for weight in page["once"].parameters():
        assert weight.isfinite().all()
        equal_on_all(weight)


def CompileCallback(page, processes):
    assert page["compiled"].images._compiled_call_impl is not None
    assert sorted(page["compiled"].state_dict()) == sorted(Model().state_dict())


def ShardedStrategy(page, processes):
    assert (processes > 1) == Path("sharded.ckpt").is_dir()
    if processes > 1:
        weights = page["AtomicCheckpointIO"]().load_checkpoint("sharded.ckpt")["state_dict"]
        assert {name: tensor.shape for name, tensor in weights.items()} == {
            name: tensor.shape for name, tensor in Model().state_dict().items()
        }


def SpeedMonitor(page, processes):
    (file,) = Path("speed").rglob("metrics.csv")
    with file.open() as lines:
        logged = [(row["train/samples_per_second"], row["train/mfu"]) for row in csv.DictReader(lines)]
    speeds = [(float(speed), float(mfu)) for speed, mfu in logged if speed]  # the other rows are of the validation
    assert len(speeds) == 4 // processes
    # 3 x 16 and 16 x 8 weights, and 8 x 3 for a row of similarities; the gradient of the image is not computed.
    of_sample = 2 * (2 * 3 * 16 + 3 * 16 * 8 + 3 * 8 * 3) / processes
    for speed, mfu in speeds:
        assert speed > 0
        assert abs(mfu * 1e9 / speed / of_sample - 1) < 1e-6


def StarvedStepWarning(page, processes):
    watching = page["StarvedStepWarning"](seconds=0)
    before = watching._since
    trainer(watching).fit(Model(), Colors())
    assert watching._since > before  # it has read the times of the threads


def ProgressLines(page, processes):
    printed = page["printed"].getvalue().splitlines()
    if int(os.environ.get("RANK", "0")) == 0:
        steps = 4 // processes
        assert printed[0].startswith(f"Epoch 0/0, step 1/{steps}")
        assert printed[-1].startswith(f"Epoch 0/0, step {steps}/{steps}")
    else:
        assert not printed


def OnlineLinearProbe(page, processes):
    metrics = page["probed"].callback_metrics
    assert 0 <= metrics["val/probe_top1"] <= 100
    equal_on_all(metrics["val/probe_top1"])


def NearestNeighbourClassification(page, processes):
    assert page["measured"].callback_metrics["val/neighbours_top1"] == 100  # of images it knows


def OwnClassification(page, processes):
    assert 0 <= page["classified"].callback_metrics["val/supervised_teacher_top1"] <= 100


def ZeroShotClassification(page, processes):
    assert page["zero_shot"].callback_metrics["val/zero_shot_top1"] >= 33


def StartingPoint(page, processes):
    assert page["before_and_after"].before["val/loss"] > 0


def StuckLossWarning(page, processes):
    assert page["watched"]._count == {1: 0, 2: 2}[processes]  # read after four batches


def FinalExport(page, processes):
    exported = torch.load("exported/images.pt", weights_only=True)
    assert {tensor.dtype for tensor in exported.values()} == {torch.float16}


def LearngeneWriter(page, processes):
    from vlightning.callbacks.learngene.file import load_learngene

    learngene = load_learngene("learngene.safetensors")
    assert learngene.data["class"] == "Colors"
    assert learngene.step == 4 // processes
    assert all(bool((tensor == 1).all()) for tensor in learngene.tensors.values())


def LearngeneExpansionCallback(page, processes):
    for block in page["descendant"].vit.blocks:
        assert bool((block.mlp.fc1.weight == 1).all())


def _drawn(name, figure):
    (file,) = Path("drawn", name).rglob("*.png")
    assert str(file).endswith(figure)
    assert file.stat().st_size > 1000


def RetrievalFigures(page, processes):
    _drawn("RetrievalFigures", "figures/val/retrieval-step0.png")


def WordMapFigures(page, processes):
    _drawn("WordMapFigures", "figures/val/words-step0.png")


def GroundingFigures(page, processes):
    _drawn("GroundingFigures", "figures/val/grounding-step0.png")


def AnswerFigures(page, processes):
    _drawn("AnswerFigures", "figures/val/answers-step0.png")


def PredictionFigures(page, processes):
    _drawn("PredictionFigures", "figures/val/predictions-step0.png")


def LearngeneFigures(page, processes):
    drawn = {file.name for file in Path("drawn/LearngeneFigures").rglob("*.png")}
    steps = 4 // processes
    assert drawn == {f"coefficients-step{steps}.png", f"summand_norms-step{steps}.png"}
    assert list(page["summed"].history) == list(range(steps + 1))


def EmbeddingProjector(page, processes):
    (labels,) = Path("drawn/EmbeddingProjector").rglob("metadata.tsv")
    assert len(labels.read_text().splitlines()) == 1 + 2 * 4  # a header, images and texts


def _rows(folder, name, index="sample_index"):
    """Return the table, after checking that each sample has one row, in order."""
    table = pq.read_table(f"{folder}/{name}.parquet").to_pydict()
    assert table[index] == list(range(ROWS))
    return table


def ClassPredictionWriter(page, processes):
    table = _rows("classes", "predictions")
    assert {len(row) for row in table["top_labels"]} == {2}
    assert table["name"] == [Colors.class_names[label] for label in table["label"]]


def TextClassPredictionWriter(page, processes):
    table = _rows("text_classes", "text_predictions", "text_index")
    assert len(set(table["label"][::3])) == 1  # of equal texts


def CaptionWriter(page, processes):
    assert _rows("captions", "captions")["caption"] == [Colors().caption(number) for number in range(ROWS)]


def AnswerWriter(page, processes):
    assert set(_rows("answers", "answers")["answer"]) == {"red"}
    answers = json.loads(Path("answers/answers.json").read_text())
    assert answers == [{"question_id": number, "answer": "red"} for number in range(ROWS)]


def GroundingWriter(page, processes):
    table = _rows("boxes", "boxes")
    assert table["itm_box"] == [[1.0] * 4] * ROWS
    assert table["itc_box"] == [None] * ROWS


def RetrievalPredictionWriter(page, processes):
    table = pq.read_table("matches/text_to_image.parquet").to_pydict()
    assert table["rank"] == [1, 2, 3] * ROWS
    assert len(pq.read_table("matches/image_embeddings.parquet")) == ROWS


def ReinforcementWriter(page, processes):
    manifest = json.loads(Path("reinforced/manifest.json").read_text())
    assert (manifest["complete"], manifest["shards"], manifest["samples"]) == (True, 2, 8)
    assert manifest["self_check"]["samples"] == 2
