"""Images per second and share of the matrix product's rate of every method: eager, compiled, and with the loader.

CLIP and ALBEF are also compiled with towers as one program.

open_clip's own step (its model, its loss, fused AdamW) and ALBEF's plain formulation alternate with ours in rounds of
five steps. "EMA and queue" is the share of the step in which moving averages are updated and queues filled.
"""

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from cases import CASES, chosen
from files import loader, workers
from rivals import images_of, rivals_of
from runs import WARM_UP, Clock, release, train
from setting import Setting, Table

from vlightning.callbacks import CompileCallback

PEAK = 989e12  # bf16, dense, of an H100 or H200 (vendor's data sheet)
COLUMNS = (
    "step",
    "images",
    "way",
    "images/s",
    "TFLOP a step",
    "share of the measured rate",
    "share of 989 TFLOP/s",
    "EMA and queue",
    "against",
)
GOALS = {"CLIP": (PEAK, 0.36), "ALBEF": (None, 0.45)}
"""Rate and share of it that a compiled step should reach; None is the measured rate."""
READ_AHEAD = 2
"""Batches that a worker of a loader reads ahead."""
SECONDS = {"eager": 25.0, "compiled": 60.0, "compiled towers": 75.0, "loader": 40.0}
"""Of the first measurement of a kind, before it is known."""


class Rows:
    """The rows of all measurements.

    Args:
        setting: of the part.
        table: their table.
        rate: measured rate of matrix products, flop/s.
    """

    def __init__(self, setting: Setting, table: Table, rate: float) -> None:
        self.setting, self.table, self.rate = setting, table, rate
        self.flops: dict[str, int] = {}

    def step(self, name: str, way: str) -> None:
        """Measure a step and its rivals on a batch on the device."""
        compiled, images = way.startswith("compiled"), images_of(self.setting, name)
        backend = {"backend": "aot_eager"} if self.setting.pretend else {}
        rivals = []
        try:
            rivals = rivals_of(self.setting, name, images, compiled)
        except ImportError as error:
            self.table.failed(f"{name}, rival", error)
        own = [CompileCallback("towers" if "towers" in way else "default", **backend)] if compiled else []
        steps = {rival.name: rival.step for rival in rivals}
        clock = train(self.setting, CASES[name], own, rivals=steps)
        self.flops.setdefault(name, clock.flops)  # a compiled step hides some
        against = []
        for rival in rivals:
            seconds = sorted(clock.rounds[rival.name])[len(clock.rounds[rival.name]) // 2]
            self.row(name, images, rival.name, seconds)
            ratio = seconds / clock.seconds
            against.append(f"{ratio:.2f}x {rival.name} (goal {rival.goal}x{self.met(ratio >= rival.goal)})")
        rate, share = GOALS.get(name.split()[0], (None, 0.0))
        if compiled and share:
            reached = self.flops[name] / clock.seconds / (rate or self.rate)
            whole = "989 TFLOP/s" if rate else "the measured rate"
            against.append(f"{reached:.0%} of {whole} (goal {share:.0%}{self.met(reached >= share)})")
        self.row(name, images, way, clock.seconds, self.averages(clock), "; ".join(against))

    def read(self, name: str) -> None:
        """Measure a step with batches from files, after those that the workers have read ahead."""
        images = images_of(self.setting, name)
        warm_up = WARM_UP + READ_AHEAD * workers(self.setting)
        with tempfile.TemporaryDirectory() as folder:
            data = loader(self.setting, name, images, 2 * warm_up, Path(folder))
            if data is None:
                self.table.row(name, images, "loader included", "left out: its batches need files of their own")
                return
            clock = train(self.setting, CASES[name], loader=data, steps=warm_up, warm_up=warm_up)
        # Workers deliver in bursts, of which a median would show the best.
        seconds = statistics.mean(clock.rounds["own"])
        self.row(name, images, "eager, loader included", seconds, "", f"{data.num_workers} loader workers")

    def averages(self, clock: Clock) -> str:
        """Return the share of the step of moving averages and queues."""
        share = clock.share_of_averages
        return f"{share:.2%} (goal 1%{self.met(share < 0.01)})"

    def met(self, reached: bool) -> str:
        """Return whether a goal was reached; nothing at toy sizes, which have none."""
        return "" if self.setting.pretend else ": met" if reached else ": missed"

    def row(self, name: str, images: int, way: str, seconds: float, *more: Any) -> None:
        """Append a row."""
        done = self.flops.get(name, 0) / seconds
        shares = [f"{done / self.rate:.1%}", f"{done / PEAK:.1%}"]
        self.table.row(name, images, way, images / seconds, self.flops.get(name, 0) / 1e12, *shares, *more)


def main() -> None:
    """Write the table: first the steps with goals, then all eager, with their loaders, then the others compiled."""
    setting = Setting.parsed(__doc__)
    rate = setting.matmul_rate()
    setting.say(
        f"Matrix product in bf16: {rate / 1e12:.3g} TFLOP/s. Steps in bf16-mixed, with all callbacks of a run.\n"
    )
    names = chosen(setting)
    table = setting.table(COLUMNS)
    rows = Rows(setting, table, rate)
    first = [name for name in names if name.split()[0] in GOALS]
    others = [name for name in names if name not in first]
    order = [(name, way) for name in first for way in ("eager", "compiled", "compiled towers")]
    order += [(name, "eager") for name in others] + [(name, "loader") for name in names]
    order += [(name, "compiled") for name in others]
    for name, way in order:
        measure = partial(rows.read, name) if way == "loader" else partial(rows.step, name, way)
        setting.measured(way, SECONDS[way], measure, table, f"{name}, {way}")
        release(setting)


if __name__ == "__main__":
    main()
