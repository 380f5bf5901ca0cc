"""What every run gets, and when a default steps back."""

from lightning.pytorch.callbacks import LearningRateMonitor, ThroughputMonitor, TQDMProgressBar
from lightning.pytorch.plugins import AsyncCheckpointIO

from vlightning.callbacks import (
    AtomicCheckpointIO,
    ProgressLines,
    SkipNonFiniteSteps,
    SpeedMonitor,
    StarvedStepWarning,
    StopOnSignal,
)
from vlightning.callbacks.progress_bar import OneLineProgressBar, progress_of_output
from vlightning.commands.cli.checkpoints import BestCheckpoint, LastCheckpoint
from vlightning.commands.cli.defaults import with_defaults
from vlightning.commands.cli.run_report import RunReport


def added(**config: object) -> list[type]:
    _, extra = with_defaults({"logger": object(), **config}, [BestCheckpoint(), LastCheckpoint()])
    return [type(callback) for callback in extra]


def test_the_defaults():
    kinds = [ProgressLines, LearningRateMonitor, SpeedMonitor, StarvedStepWarning, SkipNonFiniteSteps, StopOnSignal]
    assert added() == [*kinds, RunReport, BestCheckpoint, LastCheckpoint]


def test_a_bar_is_for_terminals_that_can_redraw_a_line(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for terminal, kind in {"xterm": OneLineProgressBar, "dumb": ProgressLines}.items():
        monkeypatch.setenv("TERM", terminal)
        assert type(progress_of_output()) is kind


def test_a_default_steps_back_for_one_of_its_kind_and_for_a_switch():
    assert ProgressLines not in added(callbacks=[TQDMProgressBar()])
    assert ProgressLines not in added(enable_progress_bar=False)
    assert LearningRateMonitor not in added(callbacks=LearningRateMonitor())
    assert LearningRateMonitor not in added(logger=False)
    assert SpeedMonitor not in added(logger=False)
    assert SpeedMonitor not in added(callbacks=ThroughputMonitor(len))
    left = [ProgressLines, LearningRateMonitor, SpeedMonitor, StarvedStepWarning, SkipNonFiniteSteps, RunReport]
    assert added(enable_checkpointing=False) == left
    assert SkipNonFiniteSteps not in added(callbacks=SkipNonFiniteSteps(3))
    assert StopOnSignal not in added(callbacks=StopOnSignal(requeue=False))


def test_the_users_callbacks_stay_first():
    bar = TQDMProgressBar()
    config, _ = with_defaults({"callbacks": bar}, [])
    assert config["callbacks"] == [bar]


def test_checkpoints_are_written_atomically_unless_another_way_was_chosen():
    config, _ = with_defaults({}, [])
    assert [type(plugin) for plugin in config["plugins"]] == [AtomicCheckpointIO]
    own = AsyncCheckpointIO()
    config, _ = with_defaults({"plugins": own}, [])
    assert config["plugins"] == [own]
