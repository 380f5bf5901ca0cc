"""Reinforced shards, and a datamodule over them."""

from support.methods import reinforced as made
from vlightning.datamodules import ReinforcedImageTextDataModule
from vlightning.datamodules.reinforced.writer import ReinforcedRecord
from vlightning.datamodules.transforms.replay import parse_augmentation

COUNT = 12


def shards(folder, count=COUNT, change=None, **layout):
    """Two tar files; `change` edits the members of a sample by number."""
    samples = {f"key{number}": made.sample(number, **layout) for number in range(count)}
    for number, members in enumerate(samples.values()):
        if change is not None:
            change(number, members)
    named = list(samples.items())
    made.write_tar(folder / "00000000.tar", dict(named[: count // 2]))
    made.write_tar(folder / "00000001.tar", dict(named[count // 2 :]))
    return str(folder)


def module(tmp_path, folder, **options):
    defaults = {"batch_size": 4, "num_workers": 0, "image_size": 24, "max_tokens": 16, "seed": 5}
    data = ReinforcedImageTextDataModule(folder, **{**defaults, "cache_dir": str(tmp_path / "cache"), **options})
    data.prepare_data()
    data.setup("fit")
    return data


def batches(data, epochs=1):
    loader = data.train_dataloader()
    return [batch for _ in range(epochs) for batch in loader]


def record(number, kinds=("syn_text",)):
    return ReinforcedRecord(
        key=f"key{number}",
        image=made.sample(number)["jpg"],
        suffix="jpg",
        caption=f"image number {number}",
        synthetic={kind: [f"{kind} {number} {place}" for place in range(made.SYNTHETIC)] for kind in kinds},
        augmentations=[parse_augmentation(entry) for entry in made.augmentations(number)],
        size=(32, 40),
        image_embeddings=made.embeddings(number, made.AUGMENTATIONS, 0),
        text_embeddings=made.embeddings(number, 1, 1),
        synthetic_embeddings={
            kind: made.embeddings(number, made.SYNTHETIC, 2 + index) for index, kind in enumerate(kinds)
        },
    )
