"""Print as JSON where steps on a GPU make the host wait, on a simulated GPU: `python device_questions.py FOLDER`."""

import json
import os
import sys
from pathlib import Path

import timm
import torch

from support.clip import DIMS, SCALES, reinforced_batch
from support.pretend_cuda import Questions, pretended_cuda, questions
from support.shre import CLASSES, random_batch, tiny_shre
from vlightning.callbacks import SkipNonFiniteSteps, StopOnSignal
from vlightning.callbacks.distributed import collectives as distributed
from vlightning.lightning_modules import MobileCLIPModule


def mobileclip(folder):
    """With BatchNorm, in two slices."""
    module = MobileCLIPModule(
        "MobileCLIP-tiny",
        max_tokens=16,
        vision={"image_size": 32},
        teacher={"dims": DIMS, "scales": SCALES},
        memory={"micro_batch_size": 2},
    )
    norms = sum(isinstance(part, torch.nn.BatchNorm2d) for part in module.student.modules())
    assert norms > 10, norms
    batch = reinforced_batch(4, dtype=torch.float32, size=32, length=16)
    return questions(module, batch, SkipNonFiniteSteps(), StopOnSignal(), folder=folder)


def shre(folder):
    """With a teacher of timm that requires other images, in two slices."""
    torch.save(timm.create_model("test_resnet", num_classes=CLASSES).state_dict(), folder / "teacher.pth")
    module = tiny_shre(
        teacher={
            "name": "timm/test_resnet",
            "weights": str(folder / "teacher.pth"),
            "image_mean": (0.1, 0.2, 0.3),
            "image_std": (0.5, 0.6, 0.7),
        },
        kl={"weight": 1.0},
        memory={"micro_batch_size": 2},
    )
    return questions(module, random_batch(4, dtype=torch.float32), SkipNonFiniteSteps(), StopOnSignal(), folder=folder)


class _Event:
    """An event on a simulated stream."""

    waited = 0

    def record(self):
        pass

    def synchronize(self):
        _Event.waited += 1


def stop_on_signal_of_two(folder):
    """Count the waits of two processes that agree over NCCL in six steps, and the reads of earlier answers."""
    distributed.world_size = lambda: 2
    distributed.dist.get_backend = lambda: "nccl"
    distributed.dist.all_reduce = lambda *_: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.Event = _Event
    empty = torch.empty
    torch.empty = lambda *sizes, pin_memory=False, **options: empty(*sizes, **options)
    stop, counted = StopOnSignal(), Questions()
    with pretended_cuda(), counted:
        counted.on = True
        for _ in range(6):
            stop._stop_if_asked(None)
    return dict(counted.found) | {"answers": _Event.waited}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    found = {case.__name__: case(place) for case in (mobileclip, shre, stop_on_signal_of_two)}
    (place / "questions.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)
