"""Reinforced samples in the layout of the vendor's shards, written without the project's writer."""

import gzip
import io
import json
import tarfile

import numpy as np
import torch
from torchvision.transforms import InterpolationMode, RandAugment, RandomResizedCrop

from support.data.images import draw_image, encoded

WIDTH, AUGMENTATIONS, SYNTHETIC = 12, 4, 3
SIZE = (40, 32)  # width and height of the images


def embeddings(number, rows, kind):
    """Return unit rows that are unique to sample, row and kind."""
    generator = torch.Generator().manual_seed(1000 * number + kind)
    return torch.nn.functional.normalize(torch.randn(rows, WIDTH, generator=generator), dim=-1)


def augmentations(number, size=SIZE):
    """Return boxes inside an image of a size, each with two operations, some of them missing or without effect."""
    draws = np.random.default_rng(number)
    entries = []
    for _ in range(AUGMENTATIONS):
        height, width = (int(draws.integers(side // 2, side)) for side in (size[1], size[0]))
        top, left = int(draws.integers(size[1] - height)), int(draws.integers(size[0] - width))
        entries.append([[top, left, height, width], [[5, 9.0], None]])
    entries[0] = [[0, 0, size[1], size[0]], [[0, 0.0], [6, -0.27]]]
    return entries


def npz(arrays, compressed=True):
    content = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(content, **{name: rows.numpy() for name, rows in arrays.items()})
    return content.getvalue()


def pth_gz(arrays):
    content = io.BytesIO()
    torch.save({name: rows.to(torch.bfloat16) for name, rows in arrays.items()}, content)
    return gzip.compress(content.getvalue())


def sample(number, version=1, store="npz", as_string=False, kinds=("syn_text",)):
    """Return the members of a sample by kind."""
    entries = augmentations(number)
    synthetic = {kind: [f"{kind} {number} {place}" for place in range(SYNTHETIC)] for kind in kinds}
    arrays = {"image_emb": embeddings(number, AUGMENTATIONS, 0), "text_emb": embeddings(number, 1, 1)}
    for index, kind in enumerate(kinds):
        arrays[f"{kind}_emb"] = embeddings(number, SYNTHETIC, 2 + index)
    if version == 1:
        arrays["text_emb"] = torch.cat([arrays["text_emb"], arrays.pop("syn_text_emb")])
    return {
        "url.txt": b"http://example.org/image.jpg",
        "jpg": encoded(draw_image(number, SIZE), "JPEG", quality=90),
        "txt": f"image number {number}".encode(),
        "syn.json": json.dumps(synthetic).encode(),
        "paug.json": json.dumps({"param_aug": json.dumps(entries) if as_string else entries}).encode(),
        store: npz(arrays) if store == "npz" else pth_gz(arrays),
        "json": json.dumps({"uid": f"uid{number}", "sha256": "0"}).encode(),
    }


def write_tar(path, samples):
    """Write a tar file of samples by key, each with members by kind, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, members in samples.items():
            for kind, content in members.items():
                info = tarfile.TarInfo(f"{key}.{kind}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def torchvision_augmentation(image, size, seed):
    """Apply the released configuration's augmentation with torchvision and a seed."""
    torch.manual_seed(seed)
    crop = RandomResizedCrop(size, interpolation=InterpolationMode.BICUBIC)
    return RandAugment()(crop(image))
