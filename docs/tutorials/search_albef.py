# %% [markdown]
# # Search your images with ALBEF
#
# You have a folder of images and want to find one by describing it. This tutorial trains a small image-text model,
# embeds a folder of images once, and answers queries in plain English. Everything runs on a CPU, and nothing is
# downloaded: the images are drawn. On photographs the steps are the same, with a model that was trained on photographs.
#
# You need a little Python, and no knowledge of Lightning. You will see how a model is trained, written to a folder and
# used without a Trainer; and what the second look of ALBEF, *re-ranking*, adds to a search by embeddings.
#
# First, how much to train. With these numbers the tutorial takes a few minutes.

# %% tags=["parameters"]
IMAGES = 6400  # images that are drawn for training
EPOCHS = 6  # passes over them
FOLDER = 200  # images to search

# %% [markdown]
# ## The data
#
# `ShapesDataModule` draws images of two shapes, each with its caption. A datamodule knows how to read images and
# captions, how to prepare them, and how to put them into batches. Here are three captions of its test images, which
# show pairs of objects that training never shows:

# %%
from vlightning.datamodules import ShapesDataModule

data = ShapesDataModule(length=IMAGES, eval_length=FOLDER, image_size=48, batch_size=64)
data.setup("test")
for (caption,) in data.captions("test", [0, 1, 2]):
    print(caption)

# %% [markdown]
# ## The model
#
# ALBEF has three parts. An *image encoder* turns an image into a few dozen vectors, one for each patch. A *text encoder*
# does so with the words of a caption. A *fusion encoder* reads both together and says whether they match. The first two
# are fast, since each image and each text passes once; the third must see every pair.
#
# The sizes are those of `configs/albef/quickstart.yaml`. A published ALBEF is a hundred times as large.

# %%
from vlightning.lightning_modules import ALBEFModule

words = {"vocab_size": 320, "max_positions": 32, "width": 128, "heads": 4, "ffn_width": 512}
model = ALBEFModule(
    vision={"image_size": 48, "patch_size": 8, "width": 128, "depth": 3, "heads": 4},
    text={**words, "depth": 2, "fusion_depth": 1, "dropout": 0.0},
    contrast={"embed_dim": 64, "queue_size": 256, "temperature_min": 0.04},
    optim={"learning_rate": 1e-3, "warmup_steps": 50},
)
print(f"{sum(p.numel() for p in model.student.parameters()) / 1e6:.1f} million parameters")

# %% [markdown]
# ## Train
#
# A Trainer of Lightning runs the training. The momentum teacher and the queues that ALBEF needs are callbacks, which the
# model adds by itself. `FinalExport` writes the trained model to a folder at the end.
#
# On the command line, `vlightning fit --config configs/albef/quickstart.yaml` does the same, with logs, checkpoints and
# resume.

# %%
from lightning.pytorch import Trainer, seed_everything

from vlightning.callbacks import FinalExport

seed_everything(0)
quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
trainer = Trainer(max_epochs=EPOCHS, accelerator="cpu", logger=False, callbacks=[FinalExport("my_albef")], **quiet)
trainer.fit(model, data)
print(f"loss after {trainer.global_step} steps: {float(trainer.callback_metrics['train/loss']):.2f}")

# %% [markdown]
# ## How good is it?
#
# `test` gives each of the images to search its own caption as a query, and the reverse. *Recall at 1* is the share of
# queries whose right answer comes first; `rerank_` stands before the numbers after the second look.

# %%
(measured,) = trainer.test(model, data, verbose=False)
for name in ("text_to_image_r1", "image_to_text_r1"):
    print(f"{name}: {measured[f'test/{name}']:.0f}%, re-ranked {measured[f'test/rerank_{name}']:.0f}%")
print(f"by chance: {100 / FOLDER:.1f}%")

# %% [markdown]
# ## Embed a folder of images, once
#
# Now the use. First a folder of images, as you have one: the test images as PNG files. Then the model is read from its
# folder with what belongs to it: the preparation of images and the tokenizer. No Trainer is needed from here on.

# %%
from pathlib import Path

from PIL import Image

table = data.open_split("test")
Path("my_images").mkdir(exist_ok=True)
for row in range(FOLDER):
    table.image(row).save(f"my_images/{row:04}.png")

# %%
import torch

from vlightning.commands.export import from_pretrained

albef, prepare, tokenize = from_pretrained("my_albef")
files = sorted(Path("my_images").glob("*.png"))
with torch.no_grad():
    images = torch.stack([prepare(Image.open(file).convert("RGB")) for file in files])
    features, patches = albef.encode_images(images)
torch.save({"files": [file.name for file in files], "features": features}, "index.pt")
print(f"{len(files)} images, {features.shape[1]} numbers each: {Path('index.pt').stat().st_size / 1024:.0f} KiB")

# %% [markdown]
# The index is small: one vector for each image. A query is embedded in the same space, and the best images are those
# whose vectors have the largest product with the query's.
#
# ## Search

# %%
import matplotlib.pyplot as plt


def search(query, count=5):
    """Return the numbers of the best images, and their cosines with the query."""
    with torch.no_grad():
        cosines = features @ albef.encode_texts(**tokenize([query]))[0]
    return cosines.topk(count)


def show(title, rows):
    """Draw images in a row, each with its score."""
    figure, axes = plt.subplots(1, len(rows), figsize=(1.5 * len(rows), 1.9))
    figure.suptitle(title, fontsize=9)
    for axis, (number, score) in zip(axes, rows, strict=True):
        axis.imshow(Image.open(files[number]))
        axis.set_title(f"{score:.2f}", fontsize=8)
        axis.axis("off")


query = str(table.scene(7))
best = search(query)
show(query, list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))

# %% [markdown]
# The right image is first. The others share a part of the query, an object, a color or a place, and their cosines are
# close: one number compares the whole text with the whole image.
#
# ## Look twice
#
# Re-ranking takes the first candidates, here 20, and lets the fusion encoder read query and image together. It costs one
# pass for each candidate, which is why only the first ones get it.


# %%
def search_twice(query, candidates=20, count=5):
    """Return the numbers of the best images by the matching head, with the probability of a match."""
    tokens = tokenize([query])
    near = search(query, candidates).indices
    with torch.no_grad():
        states = albef.text_states(**tokens)
        scores = [albef.match_scores(states, tokens["attention_mask"], patches[row : row + 1]) for row in near.tolist()]
    order = torch.cat(scores).topk(count)
    return [
        (int(near[place]), float(score.sigmoid())) for place, score in zip(order.indices, order.values, strict=True)
    ]


show(query, search_twice(query))

# %% [markdown]
# The score now is a judgement of the pair, from 0 to 1, and falls faster from one image to the next. It is not always
# right: this model has trained for a few minutes. Over all queries recall is higher, as measured above.
#
# ## Where to go on
#
# - Your own pairs: [data formats](../data.md); `vlightning data` checks them before you train.
# - A model for some thousand photographs: `configs/albef/tiny.yaml`, in [getting started](../getting_started.md#your-own-data).
# - Published weights, re-ranking and its cost, other tasks: [ALBEF](../methods/albef.md).
# - The same search without Python: `vlightning predict`, in [getting started](../getting_started.md#search-your-images).
