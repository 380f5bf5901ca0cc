"""History of the coefficients, norms of the terms, and both figures in TensorBoard."""

import math
import warnings

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from support.methods.clip import LENGTH, SIZE, WORDS, reinforced_batch
from support.methods.mmlg import tiny_extraction
from support.methods.random_batches import Rows
from support.methods.tiny_modules import trainer
from support.runs.distributed import run_sharded_fit
from vlightning.callbacks import LearngeneFigures
from vlightning.callbacks.figures.learngene import draw_coefficients, draw_norms
from vlightning.callbacks.learngene.sizes import LINEARS
from vlightning.common.errors import UserError
from vlightning.datamodules import ShapesDataModule

NAMES = ["vision", "vision_multimodal", "text", "text_multimodal"]


FEW = 30  # words


def pairs(steps=4):
    """A batch so many times: a run that is resumed in an epoch sees what the others see."""
    batch = reinforced_batch(4, dtype=torch.float32, words=FEW)
    rows = Rows({name: batch[name].repeat(steps, *[1] * (batch[name].dim() - 1)) for name in ("image", "input_ids")})
    return DataLoader(rows, batch_size=4)


def extraction(seed=0, words=FEW):
    return tiny_extraction(None, seed, learning_rate=0.1, vocab_size=words)


def fit(module, *callbacks, folder=None, ckpt_path=None, **options):
    logger = {"logger": TensorBoardLogger(folder, name="", version="")} if folder else {}
    fitted = trainer(*callbacks, limit_val_batches=0, **logger, **options)
    fitted.fit(module, pairs(), ckpt_path=ckpt_path)
    return fitted


class Recorded(Callback):
    """Records the coefficients at each step."""

    def __init__(self):
        self.found = {}

    def on_train_start(self, trainer, module):
        self.found[trainer.global_step] = {
            name: value.detach().tolist() for name, value in module.student.coefficients.items()
        }

    def on_train_batch_end(self, trainer, module, *_):
        self.on_train_start(trainer, module)


@pytest.mark.parametrize(("every", "accumulate"), [(1, 1), (2, 1), (1, 2)])
def test_the_history_holds_the_coefficients(every, accumulate):
    figures, recorded = LearngeneFigures(every_n_steps=every), Recorded()
    fit(extraction(), figures, recorded, max_epochs=2, accumulate_grad_batches=accumulate)
    assert list(figures.history) == list(range(0, 8 // accumulate + 1, every))
    assert figures.history == {step: recorded.found[step] for step in figures.history}
    assert figures.history[0]["vision"] == pytest.approx([0.5**0.5] * 2)
    assert figures.history[4]["vision"] != figures.history[0]["vision"]


def test_a_long_history_is_thinned_evenly():
    figures, recorded = LearngeneFigures(every_n_steps=1, points=5), Recorded()
    fit(extraction(), figures, recorded, max_epochs=6)
    assert (list(figures.history), figures.interval) == ([0, 8, 16, 24], 8)
    assert figures.history == {step: recorded.found[step] for step in figures.history}


def test_a_resumed_run_has_the_history_of_the_uninterrupted_run(tmp_path):
    whole, resumed = (LearngeneFigures(every_n_steps=1, points=6) for _ in range(2))
    checkpoints = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(extraction(), whole, checkpoints, max_epochs=3, enable_checkpointing=True)
    assert list(whole.history) == [0, 4, 8, 12]
    for step in (3, 8, 11):
        path = tmp_path / f"step={step}.ckpt"
        torch.load(path, weights_only=True)
        fit(extraction(seed=1), resumed, max_epochs=3, ckpt_path=path)
        assert resumed.state_dict() == whole.state_dict()
    fit(extraction(seed=1), resumed, max_epochs=1)
    assert max(resumed.history) <= 4, "a new training keeps the history of an earlier one"


def products(module):
    """Norms of c theta, one tensor after the other, straight from the definition."""
    state, norms = module.state_dict(), {}
    for name in NAMES:
        kind = "multimodal" if "multimodal" in name else name
        norms[name] = []
        for pair, coefficient in enumerate(state[f"student.coefficients.{name}"]):
            block = f"student.blocks.{kind}.{pair % 2 + 1}."
            parts = [coefficient * state[f"{block}{linear}.{end}"] for linear in LINEARS for end in ("weight", "bias")]
            norms[name].append(torch.cat([part.flatten() for part in parts]).norm().item())
    return norms


def scrambled():
    """No two blocks and no two coefficients alike, one of them negative."""
    module = tiny_extraction(None, depth=6, vocab_size=FEW)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_((1 + number) * torch.randn(parameter.shape, generator=generator))
        module.student.coefficients["text"][1] = -2.0
    return module


def test_terms_are_the_coefficients_and_the_norms_of_the_products():
    module = scrambled()
    terms = module.learngene_terms()
    assert terms.coefficients == {name: module.student.coefficients[name].tolist() for name in NAMES}
    expected = products(module)
    assert terms.norms.keys() == expected.keys()
    for name, values in expected.items():
        assert terms.norms[name] == pytest.approx(values, rel=1e-5), name
    assert min(map(min, terms.norms.values())) > 0


class Kept(Callback):
    """Return actual and expected values of a process."""

    def __init__(self):
        self.kept = []

    def on_train_batch_end(self, trainer, module, *_):
        sharded = hasattr(module.student.logit_scale, "full_tensor")
        terms = vars(module.learngene_terms())
        whole, state = extraction(words=WORDS), module.state_dict()
        whole.load_state_dict({name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in state.items()})
        self.kept.append({"sharded": sharded, "terms": terms, "expected": products(whole)})

    def on_train_end(self, trainer, module):
        self.on_train_batch_end(trainer, module)


def sharded_run():
    sizes = {"batch_size": 4, "length": 8, "eval_length": 4, "image_size": SIZE, "max_tokens": LENGTH}
    return extraction(words=WORDS), ShapesDataModule(tokenizer="clip", vocab_size=WORDS, num_workers=0, seed=0, **sizes)


def collect(trainer):
    figures, kept = (next(c for c in trainer.callbacks if isinstance(c, kind)) for kind in (LearngeneFigures, Kept))
    return kept.kept, figures.history


@pytest.mark.slow
def test_sharded_processes_have_full_values_and_rank_0_draws(tmp_path):
    options = {"max_epochs": 2, "limit_val_batches": 1, "logger": TensorBoardLogger(tmp_path, name="", version="")}
    callbacks = [LearngeneFigures(every_n_steps=1), Kept()]
    results = run_sharded_fit(sharded_run, {**options, "callbacks": callbacks}, collect=collect)
    for kept, history in results:
        assert [one["sharded"] for one in kept] == [True, True, False]  # validation leaves the network gathered
        for one in kept:
            for name, values in one["expected"].items():
                assert one["terms"]["norms"][name] == pytest.approx(values, rel=1e-5), name
        assert list(history) == [0, 1, 2]
        assert history == results[0][1]
        assert [history[step] for step in (1, 2)] == [one["terms"]["coefficients"] for one in kept[:2]]
    assert steps(tmp_path, "train/summand_norms") == [1, 2]


def steps(folder, tag):
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    if tag not in events.Tags()["images"]:
        return []
    assert all(image.height > 250 and image.width > 900 for image in events.Images(tag))
    return [image.step for image in events.Images(tag)]


@pytest.mark.parametrize(("every", "expected"), [(1, [4, 8, 12]), (2, [8, 12]), (5, [12])])
def test_tensorboard_gets_both_figures_at_the_interval_and_at_the_end(tmp_path, every, expected):
    fit(extraction(), LearngeneFigures(every), folder=tmp_path, max_epochs=3)
    assert steps(tmp_path, "train/coefficients") == steps(tmp_path, "train/summand_norms") == expected


def test_coefficients_are_lines_over_the_steps():
    history = {step: {name: [step + n, 10.0 * n] for n, name in enumerate(NAMES)} for step in (0, 7, 9)}
    figure = draw_coefficients(history)
    titles = [f"coefficients, {name.replace('_', ', ')}" for name in NAMES]
    assert [axes.get_title() for axes in figure.axes] == titles
    for n, axes in enumerate(figure.axes):
        assert axes.get_xlabel() == "optimizer step"
        assert [list(line.get_xdata()) for line in axes.lines] == [[0, 7, 9]] * 2
        assert [list(line.get_ydata()) for line in axes.lines] == [[n, 7 + n, 9 + n], [10 * n] * 3]
        assert axes.get_ylim() == figure.axes[0].get_ylim()
    assert [text.get_text() for text in figure.legends[0].texts] == ["layers 0 and 1", "layers 2 and 3"]


def test_norms_are_bars_of_each_tower():
    figure = draw_norms({name: [1.0 + n, 20.0 + n] for n, name in enumerate(NAMES)})
    assert [axes.get_title() for axes in figure.axes] == [f"norms of the summands, {t}" for t in ("vision", "text")]
    for first, axes in zip((0, 2), figure.axes, strict=True):
        assert [bar.get_height() for bar in axes.patches] == [1 + first, 20 + first, 2 + first, 21 + first]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["0 and 1", "2 and 3"]
        assert axes.get_ylim()[0] == 0
    assert [text.get_text() for text in figure.legends[0].texts] == ["tower's own block", "multimodal block"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_are_left_out(value):
    values = {name: [value, 2.0] for name in NAMES}
    assert all(math.isnan(axes.lines[0].get_ydata()[0]) for axes in draw_coefficients({0: values}).axes)
    figure = draw_norms(values)
    assert all(math.isnan(axes.patches[0].get_height()) for axes in figure.axes)
    assert 2 < figure.axes[0].get_ylim()[1] < 3


def test_training_is_equal_with_and_without_figures(tmp_path):
    ends = []
    for number, callbacks in enumerate(([], [LearngeneFigures(every_n_steps=1)])):
        module = extraction()
        torch.manual_seed(3)
        fit(module, *callbacks, folder=tmp_path / str(number))
        ends.append((module.state_dict(), torch.get_rng_state()))
    assert torch.equal(ends[0][1], ends[1][1])
    for name, tensor in ends[0][0].items():
        assert torch.equal(tensor, ends[1][0][name]), name


def test_a_missing_logger_is_one_warning(tmp_path):
    figures = LearngeneFigures()
    with pytest.warns(UserWarning, match="LearngeneFigures draws nothing: the run has no TensorBoardLogger"):
        fit(extraction(), figures)
    with warnings.catch_warnings(record=True) as warned:
        trainer(figures, logger=False, limit_val_batches=0).fit(extraction(), pairs())
    assert not any("LearngeneFigures" in str(one.message) for one in warned)
    with pytest.raises(
        UserError, match=r"Expected a module with a method learngene_terms\(\) for LearngeneFigures, got BoringModel"
    ):
        trainer(LearngeneFigures()).fit(BoringModel())


@pytest.mark.parametrize("options", [{"every_n_epochs": 0}, {"every_n_steps": 0}, {"points": 1}])
def test_invalid_arguments_are_named(options):
    ((name, value),) = options.items()
    with pytest.raises(UserError, match=rf"Expected {name} of LearngeneFigures of at least \d, got {value}"):
        LearngeneFigures(**options)


@pytest.mark.parametrize("student", ["TLEG", "plain"])
def test_a_student_without_terms_warns_and_trains(tmp_path, student):
    figures = LearngeneFigures(every_n_steps=1)
    with pytest.warns(UserWarning, match="LearngeneFigures draws nothing: the student has no such sums"):
        fit(tiny_extraction(None, student=student, vocab_size=FEW), figures, folder=tmp_path, max_steps=2)
    assert figures.history == {}
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["images"] == []
