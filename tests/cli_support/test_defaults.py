"""What every run gets, and when a default steps back."""

from lightning.pytorch.callbacks import LearningRateMonitor, TQDMProgressBar
from lightning.pytorch.plugins import AsyncCheckpointIO

from vlightning.callbacks import AtomicCheckpointIO, SkipNonFiniteSteps, StopOnSignal
from vlightning.callbacks.checkpoints.best import BestCheckpoint
from vlightning.callbacks.checkpoints.last import LastCheckpoint
from vlightning.callbacks.progress_bar import OneLineProgressBar
from vlightning.callbacks.run_report import RunReport
from vlightning.cli_support.defaults import with_defaults


def added(**config: object) -> list[type]:
    _, extra = with_defaults({"logger": object(), **config}, [BestCheckpoint(), LastCheckpoint()])
    return [type(callback) for callback in extra]


def test_the_defaults():
    kinds = [OneLineProgressBar, LearningRateMonitor, SkipNonFiniteSteps, StopOnSignal, RunReport]
    assert added() == [*kinds, BestCheckpoint, LastCheckpoint]


def test_a_default_steps_back_for_one_of_its_kind_and_for_a_switch():
    assert OneLineProgressBar not in added(callbacks=[TQDMProgressBar()])
    assert OneLineProgressBar not in added(enable_progress_bar=False)
    assert LearningRateMonitor not in added(callbacks=LearningRateMonitor())
    assert LearningRateMonitor not in added(logger=False)
    assert added(enable_checkpointing=False) == [OneLineProgressBar, LearningRateMonitor, SkipNonFiniteSteps, RunReport]
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
