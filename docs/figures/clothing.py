"""Draw real images: found by text, with maps of words, and as a map of embeddings.

    python docs/figures/clothing.py pairs clothing/ pairs/
    vlightning fit --config configs/albef/quickstart.yaml --config docs/figures/clothing.yaml
    vlightning export runs/clothing/version_0/checkpoints/last.ckpt clothing-albef
    python docs/figures/clothing.py draw clothing-albef clothing/test.parquet docs/images

`clothing/` has the files train, validation and test.parquet (image, label) of the "clothing dataset small" by Alexey
Grigorev and contributors, CC0 1.0. The pictures show at most forty of its images.
"""

import argparse
import io
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor

from vlightning.callbacks.figures.grid import Panel, Row, draw_rows
from vlightning.callbacks.figures.word_maps import content_words
from vlightning.commands.export import from_pretrained

GARMENTS = (
    "a dress",
    "a hat",
    "a long sleeve",
    "a coat or jacket",
    "pants",
    "a shirt",
    "shoes",
    "shorts",
    "a skirt",
    "a t-shirt",
)
"""Words for each label, in the order of the labels."""
QUERIES, BEST = 6, 4  # the first garments, and the images of each: 24
MAPPED = 8  # images with maps, one of each of the first garments


def captions() -> list[str]:
    """Return the caption of each label."""
    return [f"a photo of {garment}" for garment in GARMENTS]


def write_pairs(source: Path, target: Path) -> None:
    """Write the three splits with a caption in place of the label."""
    target.mkdir(parents=True)
    for file in sorted(source.glob("*.parquet")):
        table = pq.read_table(file)
        texts = [captions()[label] for label in table["label"].to_pylist()]
        pq.write_table(pa.table({"image": table["image"], "caption": texts}), target / file.name)


def read(file: Path) -> tuple[list[Image.Image], Tensor]:
    """Return the images of a split and their labels."""
    table = pq.read_table(file)
    images = [Image.open(io.BytesIO(row["bytes"])).convert("RGB") for row in table["image"].to_pylist()]
    return images, torch.tensor(table["label"].to_pylist())


def found(images: list[Image.Image], labels: Tensor, cosines: Tensor) -> list[Row]:
    """Return a row for each query: the images with the highest cosines, the right ones marked.

    Args:
        images: the images.
        labels: their labels [N].
        cosines: cosines of each caption with each image [10, N].
    """
    rows = []
    for query in range(QUERIES):
        best = cosines[query].topk(BEST)
        panels = [
            Panel(images[place], f"{score:.2f}", right=bool(labels[place] == query))
            for score, place in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
        rows.append(Row(captions()[query], panels=panels))
    return rows


def mapped(model: Any, transform: Any, tokenizer: Any, images: list[Image.Image], labels: Tensor) -> list[Row]:
    """Return rows of an image, the map of its caption, and that of each content word: the first image of a garment."""
    rows = []
    for label in range(MAPPED):
        image, texts = images[int((labels == label).int().argmax())], tokenizer([captions()[label]])
        heat = model.word_maps(transform(image)[None], texts["input_ids"], texts["attention_mask"])[0]
        tokens = tokenizer.tokenizer.convert_ids_to_tokens(texts["input_ids"][0].tolist())
        words = content_words(tokens, set(tokenizer.tokenizer.all_special_tokens))
        panels = [Panel(image), Panel(image, "whole text", heat=heat[: len(tokens)].mean(0))]
        panels += [Panel(image, word, heat=heat[places].mean(0)) for word, places in words[-1:]]
        rows.append(Row(captions()[label], panels=panels))
    return rows


def draw_map(features: Tensor, labels: Tensor, file: Path) -> None:
    """Draw the two principal components of image embeddings [N, E], a color for each garment."""
    _, _, directions = torch.pca_lowrank(features, 2)
    places = (features - features.mean(0)) @ directions
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for label, garment in enumerate(GARMENTS):
        own = places[labels == label]
        axes.scatter(own[:, 0], own[:, 1], s=10, color=f"C{label}", label=garment)
    axes.set(xticks=[], yticks=[], xlabel="first principal component", ylabel="second")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    figure.savefig(file, dpi=100)
    plt.close(figure)


@torch.no_grad()
def draw(model_folder: Path, file: Path, target: Path) -> str:
    """Draw all pictures, and return a sentence about the model."""
    torch.manual_seed(0)  # of the randomized PCA
    images, labels = read(file)
    model, transform, tokenizer = from_pretrained(str(model_folder))
    features = model.encode_images(torch.stack([transform(image) for image in images]))[0]
    cosines = model.encode_texts(**tokenizer(captions())) @ features.T
    draw_rows(found(images, labels, cosines)).savefig(target / "clothing_found.png", dpi=70)
    with torch.enable_grad():  # of Grad-CAM
        rows = mapped(model, transform, tokenizer, images, labels)
    draw_rows(rows).savefig(target / "clothing_words.png", dpi=70)
    draw_map(features, labels, target / "clothing_map.png")
    share = 100 * float((cosines.argmax(0) == labels).float().mean())
    return f"{share:.1f}% of {len(images)} images have the highest cosine with their own caption of {len(GARMENTS)}."


def main() -> None:
    """Write pairs, or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    pairs, pictures = parts.add_parser("pairs"), parts.add_parser("draw")
    for name in ("source", "target"):
        pairs.add_argument(name, type=Path)
    for name in ("model", "images", "target"):
        pictures.add_argument(name, type=Path)
    options = parser.parse_args()
    if options.part == "pairs":
        write_pairs(options.source, options.target)
    else:
        print(draw(options.model, options.images, options.target))


if __name__ == "__main__":
    main()
