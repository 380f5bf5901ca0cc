"""Steps that ours are measured against: open_clip's own, and ALBEF's in the plain formulation of its authors."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from cases import CASES
from runs import TOY_IMAGES, Step
from setting import Setting


class Rival(NamedTuple):
    """A step to measure against.

    Attributes:
        name: of the step.
        step: runs it.
        goal: least ratio of our rate to its rate.
    """

    name: str
    step: Step
    goal: float


def rivals_of(setting: Setting, case: str, images: int, compiled: bool) -> list[Rival]:
    """Return the rivals of a case, with the batch on the device.

    Args:
        setting: of the part.
        case: a name of `CASES`.
        images: images of a batch.
        compiled: whether our step is compiled; open_clip's then is too.
    """
    if case.startswith("CLIP"):
        return [
            Rival(f"open_clip, {'compiled' if compiled else 'eager'}", open_clip_step(setting, images, compiled), 1)
        ]
    return [Rival("plain formulation", plain_albef_step(setting, images), 3)] if case.startswith("ALBEF") else []


def open_clip_step(setting: Setting, images: int, compiled: bool) -> Step:
    """Return forward, loss, backward and fused AdamW of open_clip's CLIP ViT-B/16."""
    import open_clip

    device = setting.device
    name, size, length = "ViT-B-16", 224, 77
    if setting.pretend:
        from support.methods.clip import LENGTH, SIZE, add_tiny_clip

        name, size, length = add_tiny_clip(), SIZE, LENGTH
    model: Any = open_clip.create_model(name, output_dict=True)
    model = model.to(device)
    forward = torch.compile(model, backend="aot_eager" if setting.pretend else "inductor") if compiled else model
    loss_of = open_clip.ClipLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    image = torch.randn(images, 3, size, size, device=device)
    text = torch.randint(1, 49407, (images, length), device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(**forward(image, text))
        loss.backward()
        optimizer.step()

    return step


def plain_albef_step(setting: Setting, images: int) -> Step:
    """Return ALBEF's step as its authors write it, without dropout of attention, with torch's default AdamW."""
    from support.methods.plain_albef import PlainALBEF

    device, case = setting.device, CASES["ALBEF base, 256 px"]
    module: Any = case.build(Path(), setting.pretend).to(device)
    plain = PlainALBEF(module)
    optimizer = torch.optim.AdamW(module.parameter_groups(), lr=1e-4, foreach=None, fused=False)
    batch = {name: tensor.to(device) for name, tensor in case.batch(images, setting.pretend).items()}
    return lambda: plain.step(batch, 0.4, optimizer, torch.autocast(device.type, torch.bfloat16))


def images_of(setting: Setting, case: str) -> int:
    """Return the number of images of a case's batch."""
    return TOY_IMAGES if setting.pretend else CASES[case].images
