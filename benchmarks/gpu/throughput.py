"""Images per second and share of the matrix-product rate of every method, eager and compiled, on batches in memory.

The rate of open_clip's own step (its model, its loss, fused AdamW) stands beside CLIP's.
"""

from typing import Any

import torch
from cases import chosen
from runs import COUNTED, TOY_IMAGES, WARM_UP, release, train
from setting import Setting, Table

from vlightning.callbacks import CompileCallback

PEAK = 989e12  # bf16, dense, of an H100 or H200 (vendor's data sheet)


def main() -> None:
    """Write the table."""
    setting = Setting.parsed(__doc__)
    rate = setting.matmul_rate()
    setting.say(
        f"Matrix product in bf16: {rate / 1e12:.3g} TFLOP/s. Steps in bf16-mixed, with all callbacks of a run.\n"
    )
    columns = (
        "step",
        "images",
        "way",
        "images/s",
        "TFLOP a step",
        "share of the measured rate",
        "share of 989 TFLOP/s",
    )
    table = setting.table(columns)
    compiling = {"backend": "aot_eager"} if setting.pretend else {}
    for name, case in chosen(setting.only).items():
        ways: dict[str, dict[str, Any]] = {
            "eager": {},
            "eager, batch copied from the host": {"resident": False},
            "compiled": {"callbacks": [CompileCallback(**compiling)]},
        }
        flops = 0
        for way, options in ways.items():
            try:
                clock = train(setting, case, **options)
            except Exception as error:
                table.failed(f"{name}, {way}", error)
                continue
            finally:
                release(setting)
            flops = flops or clock.flops  # a compiled step hides some
            add(table, name, TOY_IMAGES if setting.pretend else case.images, way, clock.seconds, flops, rate)
        if name.startswith("CLIP"):
            for compiled in (False, True):
                way = f"open_clip, {'compiled' if compiled else 'eager'}"
                try:
                    add(table, name, *open_clip_step(setting, case.images, compiled, way), flops, rate)
                except Exception as error:
                    table.failed(f"{name}, {way}", error)
                release(setting)


def add(table: Table, name: str, images: int, way: str, seconds: float, flops: int, rate: float) -> None:
    """Append a row."""
    done = flops / seconds
    table.row(name, images, way, images / seconds, flops / 1e12, f"{done / rate:.1%}", f"{done / PEAK:.1%}")


def open_clip_step(setting: Setting, images: int, compiled: bool, way: str) -> tuple[int, str, float]:
    """Measure forward, loss, backward and fused AdamW of open_clip's CLIP ViT-B/16 on the same batch."""
    import open_clip

    device = setting.device
    images = TOY_IMAGES if setting.pretend else images
    name, size, length = "ViT-B-16", 224, 77
    if setting.pretend:
        from support.clip import LENGTH, SIZE, add_tiny_clip

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

    warm_up, counted = (1, 1) if setting.pretend else (WARM_UP, COUNTED)
    for _ in range(warm_up):
        step()

    def steps() -> None:
        for _ in range(counted):
            step()

    return images, way, setting.seconds(steps) / counted


if __name__ == "__main__":
    main()
