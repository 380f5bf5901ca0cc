import pytest
from lightning.pytorch import Callback

from support.methods.tiny_modules import Student, loader, trainer
from vlightning.callbacks import EMACallback, EMAPair, QueueCallback, missing_callbacks


class Mine(EMACallback):
    pass


def test_present_classes_and_subclasses_are_not_returned():
    ema, queue = EMACallback(), QueueCallback()
    assert missing_callbacks([], ema, queue) == [ema, queue]
    assert missing_callbacks([Callback(), EMACallback()], ema, queue) == [queue]
    assert missing_callbacks([Mine(), QueueCallback()], ema, queue) == []
    mine = Mine()
    assert missing_callbacks([EMACallback()], mine) == [mine]


class Supplies(Student):
    def configure_callbacks(self):
        return missing_callbacks(self.trainer.callbacks, EMACallback())


@pytest.mark.parametrize("kind", [EMACallback, Mine])
def test_the_users_callback_is_kept(kind):
    own = kind({"own": EMAPair("student", "teacher", 0.1)})
    run = trainer(own)
    run.fit(Supplies(), loader(2))
    assert [callback for callback in run.callbacks if isinstance(callback, EMACallback)] == [own]
    assert own.updates == {"own": 2}


def test_supplied_callbacks_exist_once_after_two_fits():
    run, module = trainer(), Supplies()
    for _ in range(2):
        run.fit(module, loader(2))
        run.fit_loop.max_epochs += 1
    supplied = [callback for callback in run.callbacks if isinstance(callback, EMACallback)]
    assert len(supplied) == 1
    assert supplied[0].updates == {"teacher": 4}
