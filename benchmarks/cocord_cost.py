"""Latency, multiply-adds, memory and size of CoCoRD's teachers and students, and of memory banks (Tables 9 to 12).

    python benchmarks/cocord_cost.py
    python benchmarks/cocord_cost.py --pairs resnet110/resnet32 --repeats 50

A forward pass of one image in eval mode on the CPU: 32 pixels for CIFAR-100's pairs, 224 for ImageNet's.

- latency: median of interleaved calls, contiguous float32, beside the paper's on an Intel Core i7-8700; share of the
  teacher's latency that the student saves (the paper's speed-up), and the ratio of both.
- multiply-adds: half of the operations of convolutions and linear layers, by `CountFlops`.
- memory: bytes that the pass allocates, in total and at most at a time. (The paper's are of its version of torch.)
- parameters, and the size of the state dict.
- memory banks: CRD's two banks of 128 values for each training image, and CoCoRD's dictionary of 2,048 values a key.

The paper's ResNet50 has torchvision's stem for ImageNet; the teacher of its accuracy, and of this package, has CIFAR's.
"""

import argparse
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from latency import device_name
from memory import Held, held_bytes
from timing import medians

from vlightning.callbacks.speed import CountFlops
from vlightning.lightning_modules.networks.cifar import Classifier
from vlightning.lightning_modules.networks.classifiers import build_classifier


class Pair(NamedTuple):
    """A teacher and a student, and their numbers in the paper."""

    teacher: str
    student: str
    latency: str  # milliseconds
    memory: str  # megabytes
    multiply_adds: str
    parameters: str  # thousands


PAIRS = [
    Pair("wrn_40_2", "wrn_16_2", "21.28/7.98", "11.73/4.39", "327.62M/101.12M", "2255/703"),
    Pair("wrn_40_2", "wrn_40_1", "21.28/10.51", "11.73/5.87", "327.62M/83.29M", "2255/570"),
    Pair("resnet56", "resnet20", "21.75/11.48", "8.72/3.21", "125.76M/40.82M", "862/278"),
    Pair("resnet110", "resnet20", "56.09/11.48", "16.97/3.21", "253.16M/40.82M", "1737/278"),
    Pair("resnet110", "resnet32", "56.09/17.01", "16.97/5.05", "253.16M/69.13M", "1737/473"),
    Pair("resnet32x4", "resnet8x4", "24.93/7.52", "20.71/6.03", "1.08G/177.07M", "7434/1234"),
    Pair("vgg13", "vgg8", "8.72/3.89", "4.20/2.10", "285.2M/96.33M", "9462/3965"),
    Pair("vgg13", "MobileNetV2", "8.72/14.97", "4.20/3.39", "285.2M/6.54M", "9462/813"),
    Pair("ResNet50", "MobileNetV2", "17.01/14.97", "3.63/3.39", "83.67M/6.54M", "23713/813"),
    Pair("ResNet50", "vgg8", "17.01/3.89", "3.63/2.10", "83.67M/96.33M", "23713/3965"),
    Pair("resnet32x4", "ShuffleV1", "24.93/31.84", "20.71/13.90", "1.08G/38.72M", "7434/949"),
    Pair("resnet32x4", "ShuffleV2", "24.93/19.01", "20.71/9.01", "1.08G/44.52M", "7434/1356"),
    Pair("wrn_40_2", "ShuffleV1", "21.28/31.84", "11.73/13.90", "327.62M/38.72M", "2255/949"),
    Pair("torchvision/resnet34", "torchvision/resnet18", "43.97/28.52", "59.82/39.75", "3.66G/1.81G", "21800/11690"),
    Pair(
        "torchvision/resnet101", "torchvision/resnet50", "104.37/50.84", "259.72/177.83", "7.80G/4.09G", "44550/25560"
    ),
]
"""The paper's Tables 9, 10 and 11."""
IMAGES = {"CIFAR-100": 50_000, "ImageNet": 1_281_167}
KEYS = {"CIFAR-100": 2048, "ImageNet": 65_536}
CRD_DIM, KEY_DIM, FLOAT = 128, 2048, 4


class Cost(NamedTuple):
    """Cost of a network that needs no measurement of time."""

    multiply_adds: int
    parameters: int
    size: int  # bytes of the state dict


def build(name: str) -> Classifier:
    """Return a network in eval mode, with random weights."""
    return build_classifier(name, 1000 if "/" in name else 100).eval()


def image(name: str) -> torch.Tensor:
    """Return an image of the network's data set."""
    side = 224 if "/" in name else 32
    return torch.rand(1, 3, side, side)


def cost(name: str) -> Cost:
    """Count, without computing."""
    with torch.device("meta"), torch.no_grad():
        network = build(name)
        with CountFlops() as counter:
            network(image(name))
        size = sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())
        parameters = sum(parameter.numel() for parameter in network.parameters())
    return Cost(counter.flops // 2, parameters, size)


def bank_bytes(data: str) -> tuple[int, int]:
    """Return the bytes of CRD's two banks and of CoCoRD's dictionary for a data set."""
    return 2 * IMAGES[data] * CRD_DIM * FLOAT, KEYS[data] * KEY_DIM * FLOAT


@torch.no_grad()
def measure(names: list[str], repeats: int) -> tuple[dict[str, float], dict[str, Held]]:
    """Return the seconds and the memory of a forward pass by network."""
    calls = {name: partial(build(name), image(name)) for name in names}
    return medians(calls, repeats), {name: held_bytes(call) for name, call in calls.items()}


def both(values: Iterable[float], unit: float, digits: int = 2) -> str:
    """Format the values of teacher and student in a unit."""
    return "/".join(f"{value / unit:.{digits}f}" for value in values)


def row(name: str, pair: Pair, seconds: Mapping[str, float], held: Mapping[str, Held]) -> str:
    """Return the Markdown row of a pair."""
    two = (pair.teacher, pair.student)
    counted = [cost(part) for part in two]
    slow, fast = (seconds[part] for part in two)
    cells = [
        name,
        both((slow, fast), 1e-3),
        pair.latency,
        f"{1 - fast / slow:.1%}",
        f"{slow / fast:.2f}",
        both((each.multiply_adds for each in counted), 1e6),
        pair.multiply_adds,
        both((held[part].total for part in two), 1e6),
        pair.memory,
        both((held[part].most for part in two), 1e6),
        both((each.parameters for each in counted), 1e3, 0),
        pair.parameters,
        both((each.size for each in counted), 1e6),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, and print the tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {f"{pair.teacher}/{pair.student}".replace("torchvision/", ""): pair for pair in PAIRS}
    parser.add_argument("--pairs", nargs="+", choices=known, default=list(known))
    parser.add_argument("--repeats", type=int, default=20, help="calls of each network")
    parser.add_argument("--threads", type=int, help="by default torch's")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    pairs = [known[name] for name in options.pairs]
    names = list(dict.fromkeys(name for pair in pairs for name in (pair.teacher, pair.student)))
    measured = measure(names, options.repeats)
    print(f"{device_name(torch.device('cpu'))}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| teacher/student | latency, ms | paper | saved | ratio | multiply-adds, M | paper |", end="")
    print(" allocated, MB | paper | peak, MB | parameters, K | paper | size, MB |")
    print("|---" * 13 + "|")
    for name, pair in zip(options.pairs, pairs, strict=True):
        print(row(name, pair, *measured))
    print("\n| memory banks | CRD, MB | CoCoRD, MB | relative |\n|---|---|---|---|")
    for data in IMAGES:
        crd, cocord = bank_bytes(data)
        print(f"| {data} | {crd / 1e6:.2f} | {cocord / 1e6:.2f} | {cocord / crd:.2%} |")


if __name__ == "__main__":
    main()
