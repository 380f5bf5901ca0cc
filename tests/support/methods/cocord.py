"""A CoCoRD small enough for tests, its teacher's file, batches for it, and the paper's pairs."""

import torch

from support.methods.groups import in_groups, merged
from vlightning.lightning_modules import CoCoRDModule
from vlightning.lightning_modules.networks.cifar import CIFAR_NETWORKS

CLASSES = 5
HEADS = {"heads": {"embed_dim": 16, "hidden": 12, "predictor_hidden": 8}}
OFF = {"contrast": {"weight": 0}, "prediction": {"weight": 0}}
"""Arguments of plain training, and of KD."""

PAIRS = [  # teacher and student, of the paper's tables 1 and 2
    ("wrn_40_2", "wrn_16_2"),
    ("wrn_40_2", "wrn_40_1"),
    ("resnet56", "resnet20"),
    ("resnet110", "resnet20"),
    ("resnet110", "resnet32"),
    ("resnet32x4", "resnet8x4"),
    ("vgg13", "vgg8"),
    ("vgg13", "MobileNetV2"),
    ("ResNet50", "MobileNetV2"),
    ("ResNet50", "vgg8"),
    ("resnet32x4", "ShuffleV1"),
    ("resnet32x4", "ShuffleV2"),
    ("wrn_40_2", "ShuffleV1"),
]


def teacher_file(folder, name="resnet14", classes=CLASSES, seed=1):
    """A public checkpoint of a random network whose BatchNorm statistics are not the initial ones."""
    torch.manual_seed(seed)
    network = CIFAR_NETWORKS[name](classes)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)
    path = folder / f"{name}_{seed}.pth"
    torch.save({"model": network.state_dict()}, path)
    return str(path)


def tiny_cocord(folder=None, **changes):
    """resnet14 -> resnet8 with narrow heads; its teacher is loaded if a folder for the file is given."""
    torch.manual_seed(0)
    sizes = {"student": "resnet8", "num_classes": CLASSES, "contrast": {"queue_size": 32}}
    arguments = merged(sizes, {"teacher": {"name": "resnet14"}}, HEADS, in_groups(CoCoRDModule, changes))
    if folder is not None:
        arguments["teacher"]["weights"] = teacher_file(folder, arguments["teacher"]["name"])
    module = CoCoRDModule(**arguments)
    if folder is not None:
        module.setup("fit")
    return module


def random_batch(size=8, dtype=torch.float32, seed=3, image_size=32):
    generator = torch.Generator().manual_seed(seed)
    views = {
        name: torch.randn(size, 3, image_size, image_size, generator=generator, dtype=dtype)
        for name in ("image", "image_slow", "image_teacher")
    }
    label = torch.randint(CLASSES, (size,), generator=generator)
    return views | {"label": label, "sample_index": torch.arange(size)}
