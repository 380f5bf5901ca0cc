"""RangeAugment: its operations, what the ranges learn, the student's images alone, exact resumption."""

import lightning.pytorch as pl
import pytest
import torch

from support.methods.clip import LENGTH, SIZE, add_tiny_clip, reinforced_batch, tiny_module
from vlightning.common.errors import UserError
from vlightning.common.preprocessing import Normalization
from vlightning.datamodules import ReinforcedShapesDataModule
from vlightning.lightning_modules import MobileCLIPModule
from vlightning.lightning_modules.mobileclip.range_augment import RangeAugment

MEAN, STD = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)


def images(rows=8):
    """Images on the 0-1 scale."""
    return 0.2 + 0.2 * torch.rand(rows, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


def augmenting(**fixed):
    """Return the augmentation of images on the 0-1 scale with fixed magnitudes."""
    augment = RangeAugment((40.0, 20.0))
    augment.start(Normalization(MEAN, STD))
    wanted = {"brightness": 1.0, "contrast": 1.0, "noise": 0.0} | fixed
    if fixed:
        augment.ranges = lambda: torch.tensor([list(wanted.values())] * 2)
    mean, std = (torch.tensor(part)[:, None, None] for part in (MEAN, STD))

    def apply(image, progress=0.0):
        found, loss = augment((image - mean) / std, progress)
        return found * std + mean, loss

    return augment, apply


@pytest.mark.parametrize("name", ["brightness", "contrast", "noise"])
def test_each_operation_changes_half_of_the_images(name):
    torch.manual_seed(0)
    image = images()
    _, apply = augmenting(**{name: 0.5 if name != "noise" else 0.02})
    found, loss = apply(image)
    changed = (found - image).abs().amax((1, 2, 3)) > 1e-5
    assert changed.sum() == 4
    torch.testing.assert_close(found[~changed], image[~changed])
    before, after = image[changed], found[changed]
    if name == "brightness":
        torch.testing.assert_close(after, 0.5 * before)
    elif name == "contrast":
        torch.testing.assert_close(after, (before + before.mean((2, 3), keepdim=True)) / 2)
    else:
        assert (after - before).std() == pytest.approx(0.02, rel=0.05)
    errors = (255 * (found - image)).square().mean((1, 2, 3))
    target = 255**2 / 10**4  # 40 dB
    distance = [abs(float(error) - target) for error in errors]
    smooth = [one - 0.5 if one > 1 else one**2 / 2 for one in distance]
    assert float(loss) == pytest.approx(100 / 255**2 * sum(smooth) / len(smooth), rel=1e-3)


def test_results_are_clipped_to_the_range_of_images():
    _, apply = augmenting(brightness=10.0)
    found, _ = apply(images())
    assert found.max() == pytest.approx(1.0)
    assert found.min() > 0.1


def test_the_target_follows_a_cosine():
    augment = RangeAugment((40.0, 20.0))
    start, end = (255**2 / 10 ** (psnr / 10) for psnr in (40, 20))
    expected = [start, (3 * start + end) / 4 + (start - end) * (2**0.5 / 4 - 1 / 4), (start + end) / 2, end, end]
    found = [augment.target_error(progress) for progress in (0.0, 0.25, 0.5, 1.0, 2.0)]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("progress", [0.5, 1.0])
def test_the_ranges_learn_the_target(progress):
    """The mean squared error moves to the target, from the released code's strong start."""
    torch.manual_seed(0)
    augment, apply = augmenting()
    optimizer = torch.optim.Adam(augment.parameters(), lr=0.05)
    image, target = images(32), augment.target_error(progress)

    def error():
        with torch.no_grad():
            return float((255 * (apply(image)[0] - image)).square().mean())

    first = error()
    for _ in range(300):
        optimizer.zero_grad()
        apply(image, progress)[1].backward()
        optimizer.step()
    ranges = augment.ranges()
    assert (ranges[0] < ranges[1]).all()
    assert first > 4 * target
    assert error() < first / 4


def test_only_the_student_sees_the_augmentation(monkeypatch):
    module, batch, seen = tiny_module(vision={"range_augment": [40.0, 20.0]}), reinforced_batch(6), {}
    module.double().student.visual.register_forward_hook(lambda _, inputs, __: seen.update(student=inputs[0]))
    targets = module.teachers.targets
    monkeypatch.setattr(
        module.teachers, "targets", lambda batch, *rest: seen.update(teacher=batch["image"]) or targets(batch, *rest)
    )
    torch.manual_seed(0)
    loss = module.training_step(batch, 0)
    assert seen["teacher"] is batch["image"]
    assert not torch.equal(seen["student"], batch["image"])
    loss.backward()
    assert module.augment.ends.grad.abs().min() > 0
    torch.manual_seed(0)
    torch.testing.assert_close(module.training_step(batch, 0), loss, rtol=1e-12, atol=0)
    module.encode_images(batch["image"])
    assert seen["student"] is not batch["image"]  # the average is evaluated
    module.student.encode_image(batch["image"])
    assert seen["student"] is batch["image"]


def test_it_is_off_by_default_and_has_two_targets():
    assert not list(tiny_module().augment.state_dict())
    assert "augment.ends" in tiny_module(vision={"range_augment": [40.0, 20.0]}).state_dict()
    with pytest.raises(UserError, match=r"vision\.range_augment of more than 0, got .*40\.0, 0\.0"):
        tiny_module(vision={"range_augment": [40.0, 0.0]})


def test_slices_see_the_same_images():
    batch = reinforced_batch(6, dtype=torch.float32)
    found = []
    for size in (None, 2):
        module = tiny_module(vision={"range_augment": [40.0, 20.0]}, memory={"micro_batch_size": size})
        torch.manual_seed(0)
        loss = module.training_step(batch, 0)
        loss.backward()
        found.append((loss, module.augment.ends.grad))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
    def run(steps, path=None):
        torch.manual_seed(0)
        teacher = {"dims": [64, 96], "scales": [30.0, 30.0]}
        vision = {"image_size": SIZE, "range_augment": [40.0, 20.0]}
        module = MobileCLIPModule(add_tiny_clip(), max_tokens=LENGTH, vision=vision, teacher=teacher)
        sizes = {"length": 32, "eval_length": 4, "augmentations": 2, "image_size": SIZE, "batch_size": 8}
        data = ReinforcedShapesDataModule(str(tmp_path / "shapes"), num_workers=0, max_tokens=LENGTH, **sizes)
        silent = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        short = {"max_steps": 4, "limit_val_batches": 0, "enable_checkpointing": False}
        trainer = pl.Trainer(accelerator="cpu", default_root_dir=tmp_path, callbacks=[Stop(steps)], **silent, **short)
        trainer.fit(module, data, ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return module.state_dict()

    run(2)
    resumed, whole = run(4, tmp_path / "2.ckpt"), run(4)
    assert "augment.ends" in whole
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


class Stop(pl.Callback):
    """End the run after some steps, without a change of its planned length."""

    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.should_stop or trainer.global_step >= self.steps
