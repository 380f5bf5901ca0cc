"""Print as JSON where steps on a GPU make the host wait, on a simulated GPU: `python device_questions.py FOLDER`."""

import json
import os
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import timm
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from support.devices.pretend_cuda import Questions, pretended_cuda, questions
from support.methods import random_batches
from support.methods.clip import DIMS, SCALES, reinforced_batch
from support.methods.methods import OTHERS
from support.methods.published import pairs, tiny_clip
from support.methods.shre import CLASSES, random_batch, tiny_shre
from support.methods.tasks import random_task_batch, tiny_task
from support.runs.collectives import RecordCollectives
from vlightning.callbacks import SkipNonFiniteSteps, SpeedMonitor, StepSeedCallback, StopOnSignal
from vlightning.callbacks.distributed import collectives as distributed
from vlightning.datamodules import ALBEFTrainTransform
from vlightning.datamodules.base.images import ImageTransforms
from vlightning.lightning_modules import MobileCLIPModule

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
ROWS, SLICE = 8, 4


@contextmanager
def over_nccl():
    """A process group of two on GPUs, of which this is the first, and which sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    changes = (
        patch.object(distributed.dist, "get_backend", lambda *_: "nccl"),
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
    )
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for change in changes:
            stack.enter_context(change)
        yield


SHALLOW = {"albef": {"vision": {"depth": 1}}, "shre": {"vision": {"depth": 1}, "text": {"depth": 1}}}
"""Networks with every kind of layer once."""


def steps(folder):
    """Every method in every precision, the memory settings in turn: all pairs of two of these.

    As the first of two processes, which send over NCCL; the devices of what is sent are counted too.
    """
    found = {}
    for number, name in enumerate(random_batches.NAMES):
        for place, precision in enumerate(PRECISIONS):
            memory = ("whole", "slices", "accumulation")[(number + place) % 3]
            if name == "cocord" and memory == "slices":  # it has none
                memory = "whole"
            changes = SHALLOW.get(name, {}) | ({"memory": {"micro_batch_size": SLICE}} if memory == "slices" else {})
            own = folder / f"{name}-{precision}"
            own.mkdir()
            sent = RecordCollectives()
            with over_nccl():
                asked = questions(
                    random_batches.small(name, own, **changes),
                    random_batches.random_rows(name, ROWS),
                    sent,
                    SkipNonFiniteSteps(),
                    StopOnSignal(),
                    StepSeedCallback(),
                    SpeedMonitor(peak_flops=989e12),
                    folder=own,
                    precision=precision,
                    accumulate=2 if memory == "accumulation" else 1,
                )
            found[f"{name} {memory} {precision}"] = {"asked": asked, "devices": devices(sent)}
    return found


def devices(sent):
    """Return the devices of all tensors that were sent, with their number."""
    return Counter(device for _, tensors, _ in sent.recorded.calls for _, device, _ in tensors)


def evaluations(folder):
    """Every method in validation and prediction, in all pairs of stage, precision and memory settings.

    ALBEF keeps the tokens of images for re-ranking, whose own copies `tests/lightning_modules/evaluation/` counts.
    """
    found = {}
    for number, name in enumerate(random_batches.NAMES):
        for place, stage in enumerate(("validate", "predict")):
            precision = PRECISIONS[(number + place) % 3]
            memory = ("whole", "slices", "accumulation")[(number + 2 * place) % 3]
            changes = dict(SHALLOW.get(name, {}))
            changes |= {"rerank": {"when": "always", "k": 10}} if name == "albef" else {}
            if memory == "slices" and name != "cocord":
                changes["memory"] = {"micro_batch_size": SLICE}
            own = folder / f"{name}-{stage}"
            own.mkdir()
            batch = random_batches.random_rows(name, ROWS)
            if name != "cocord":
                ids = torch.arange(ROWS)
                mask = torch.ones_like(batch["input_ids"])
                batch |= {key: ids for key in ("image_id", "sample_index", "text_image_id", "text_id")}
                batch = {"attention_mask": mask} | batch
            found[f"{name} {stage} {memory} {precision}"] = questions(
                random_batches.small(name, own, **changes),
                batch,
                folder=own,
                precision=precision,
                accumulate=2 if memory == "accumulation" else 1,
                stage=stage,
            )
    return found


def tasks(folder):
    """ALBEF's fine-tuning for tasks, in slices, and its validation."""
    found = {}
    for name in ("entailment", "nlvr", "assignment"):
        for stage in ("fit", "validate")[: 1 if name == "assignment" else 2]:
            own = folder / f"{name}-{stage}"
            own.mkdir()
            module = tiny_task(name, memory={"micro_batch_size": SLICE})
            options = {"stage": stage} if stage != "fit" else {}
            found[f"{name} {stage}"] = questions(
                module,
                random_task_batch(name, ROWS),
                SkipNonFiniteSteps(),
                StopOnSignal(),
                StepSeedCallback(),
                folder=own,
                **options,
            )
    return found


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


def clip(folder):
    """Fine-tuning of a CLIP: both losses, and adapters, in two slices."""
    kinds = {"softmax": {}, "sigmoid": {"loss": {"name": "sigmoid"}}, "adapters": {"tuning": {"lora": {"rank": 2}}}}
    found = {}
    for kind, options in kinds.items():
        module = tiny_clip(memory={"micro_batch_size": 2}, **options)
        vars(module).pop("log"), vars(module).pop("log_dict")
        (folder / kind).mkdir()
        batch = pairs(4, dtype=torch.float32)
        found[kind] = questions(module, batch, SkipNonFiniteSteps(), StopOnSignal(), folder=folder / kind)
    return found


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


class Pixels(ImageTransforms):
    """Batches with uint8 images, which are normalized on the device."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch
        self._train_transform = ALBEFTrainTransform(batch["image"].shape[-1])

    def train_dataloader(self):
        self.worker_transform(training=True)
        return DataLoader([self.batch] * 2, batch_size=None)


class ConstantsInEachStep(Pixels):
    """The fault of constants that are copied to the device in each step."""

    def normalized_batch(self, batch, training):
        self._train_finish._constants.clear()
        return super().normalized_batch(batch, training)


def pixels(folder):
    """Conversion of bytes to normalized images after their transfer, and with a planted fault."""
    found = {}
    for kind in (Pixels, ConstantsInEachStep):
        (folder / kind.__name__).mkdir()
        batch = random_batches.random_rows("mobileclip", ROWS)
        data = kind(batch | {"image": batch["image"].mul(40).clamp(0, 255).to(torch.uint8)})
        module = random_batches.small("mobileclip", folder / kind.__name__)
        found[kind.__name__] = questions(module, data, SkipNonFiniteSteps(), folder=folder / kind.__name__)
    return found


def albef_vqa(folder):
    """Answers of several lengths, in two slices of images and questions."""
    module, data = OTHERS["albef_vqa"].build(None, 0, {"memory": {"micro_batch_size": 2}}, batch_size=4, num_workers=0)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    return questions(module, batch, SkipNonFiniteSteps(), StopOnSignal(), folder=folder)


def _planted_faults(module, batch):
    """Faults that make the host wait, each in its own function."""
    rows = batch["image"].flatten(1)

    def planted_index_from_the_host():
        return rows[torch.arange(2)]

    def planted_number():
        return int(rows.sum())

    def planted_mask():
        return rows[rows[:, 0] > 0]

    def planted_constant():
        return rows * torch.ones(rows.shape[1]).to(rows.device)

    def planted_draw():
        return torch.multinomial(rows.softmax(-1), 1)

    for plant in (
        planted_index_from_the_host,
        planted_number,
        planted_mask,
        planted_constant,
        planted_draw,
    ):
        plant()
    module.log("train/planted", torch.zeros(()))


def planted(folder):
    """A training step with faults."""
    module = random_batches.small("mobileclip", folder)
    step = module.training_step

    def training_step(batch, batch_idx):
        _planted_faults(module, batch)
        return step(batch, batch_idx)

    module.training_step = training_step
    return questions(module, random_batches.random_rows("mobileclip", ROWS), folder=folder)


def mixed_devices(folder):
    """The error of a training step that adds a tensor on the host to one on the device."""
    module = random_batches.small("mobileclip", folder)
    step = module.training_step
    module.training_step = lambda batch, batch_idx: step(batch, batch_idx) + torch.ones(ROWS).mean(0, keepdim=True)
    try:
        return questions(module, random_batches.random_rows("mobileclip", ROWS), folder=folder)
    except RuntimeError as error:
        return {str(error).splitlines()[0]: 1}


def sent_from_the_host(folder):
    """The devices of what is sent in two steps with a tensor on the host."""
    module, sent = random_batches.small("mobileclip", folder), RecordCollectives()
    step = module.training_step
    module.training_step = lambda *given: dist.all_reduce(torch.ones(1)) or step(*given)
    with over_nccl():
        questions(module, random_batches.random_rows("mobileclip", ROWS), sent, folder=folder, precision="32-true")
    return devices(sent)


def stop_on_signal_of_two(folder):
    """Count the waits of two processes that agree over NCCL in six steps."""
    stop, counted = StopOnSignal(), Questions()
    with over_nccl(), pretended_cuda(), counted:
        counted.on = True
        for _ in range(6):
            stop._stop_if_asked(None)
    return dict(counted.found)


if __name__ == "__main__":
    found = {}
    cases = (steps, evaluations, tasks, mobileclip, clip, shre, albef_vqa, pixels, planted, mixed_devices)
    for case in (*cases, sent_from_the_host, stop_on_signal_of_two):
        place = Path(sys.argv[1]) / case.__name__
        place.mkdir()
        found[case.__name__] = case(place)
    Path(sys.argv[1], "questions.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)
