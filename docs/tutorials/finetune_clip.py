# %% [markdown]
# # Fine-tune and evaluate a CLIP
#
# A published CLIP knows a little of everything. You have pairs of one domain, and want a model that is better there and
# still knows the rest. This tutorial fine-tunes a CLIP, measures what it has gained **and what it has forgotten**, and
# looks for a model between both.
#
# So that nothing is downloaded, the "published" model is made first: a small CLIP that has learned the words of single
# shapes. With a real one, its name and its tag take its place; all later steps are the same.

# %% tags=["parameters"]
PUBLISHED_STEPS = 150  # of 64 pairs, to make the published model
STEPS = 60  # of 64 pairs, to fine-tune it
TESTED = 200  # images of each evaluation

# %% [markdown]
# ## Two domains
#
# The published model sees one shape in an image, with captions such as "a red circle". Your own images have two shapes,
# and captions with their sizes and their relation. Both are written as Parquet files with the columns `image` and
# `caption`: a form that you can make of your own pairs, too.

# %%
import io

import pyarrow
import pyarrow.parquet

from vlightning.datamodules import ShapeClassesDataModule, ShapesDataModule


def write(file, images, captions):
    """Write pairs to a Parquet file."""
    rows = []
    for image, caption in zip(images, captions, strict=True):
        content = io.BytesIO()
        image.save(content, "PNG")
        rows.append({"image": {"bytes": content.getvalue()}, "caption": caption})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


singles = ShapeClassesDataModule(length=3200, eval_length=TESTED, image_size=48, noise=0, num_workers=0)
table = singles.open_split("train")
rows = range(len(table))
names = [singles.class_names[table.label(row)] for row in rows]
write("singles.parquet", map(table.image, rows), [f"a {name}" for name in names])

own = ShapesDataModule(length=3200, eval_length=TESTED, image_size=48)
for split in ("train", "validation", "test"):
    table = own.open_split(split)
    rows = range(len(table))
    write(f"{split}.parquet", map(table.image, rows), [table.captions(row)[0] for row in rows])

# %% [markdown]
# ## The published model
#
# A CLIP is two towers: one for images, one for texts. `CLIPModule` takes the names of published models
# (`model="ViT-B-32", weights="laion2b_s34b_b79k"`); the shape of a model of your own is a file. The trained model is
# exported in the form of open_clip, as published ones are.

# %%
import json
from pathlib import Path

from lightning.pytorch import Trainer, seed_everything

from vlightning.commands.export.layouts import export
from vlightning.datamodules import ImageTextDataModule
from vlightning.lightning_modules import CLIPModule

vision = {"image_size": 48, "patch_size": 12, "width": 64, "head_width": 32, "layers": 4}
text = {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 4}
shape = {"name": "small", "config": {"embed_dim": 64, "vision_cfg": vision, "text_cfg": text}}
Path("small.json").write_text(json.dumps(shape))

quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
clip_texts = {"tokenizer": "clip", "vocab_size": 49408, "max_tokens": 16, "num_workers": 0, "batch_size": 64}
clip_texts |= {"augmentation": "crop", "horizontal_flip": False}


def train(model, data, steps, **options):
    """Train a model, and return the Trainer."""
    seed_everything(0, verbose=False)
    trainer = Trainer(max_epochs=-1, max_steps=steps, accelerator="cpu", limit_val_batches=0, **quiet, **options)
    trainer.fit(model, data)
    return trainer


published = CLIPModule(model="small.json", max_tokens=16, optim={"learning_rate": 1e-3})
data = ImageTextDataModule(train="singles.parquet", image_size=48, **clip_texts)
train(published, data, PUBLISHED_STEPS).save_checkpoint("published.ckpt")
print(export("published.ckpt", "published", "open_clip").split(";")[0])

# %% [markdown]
# ## Fine-tune it
#
# Three ways, each from the published weights: all weights; the text tower alone, with the image tower locked; all
# weights with low rates for the lower layers. A real published model is fine-tuned with rates of 1e-5; this one is a
# thousandth of its size and takes more.

# %%
from vlightning.callbacks import ZeroShotClassification

guard = {"name": "guard", "templates": ["a {}"], "class_names": list(singles.class_names)}
data = ImageTextDataModule(train="train.parquet", test="test.parquet", **clip_texts)


def measure(model):
    """Return recall on the own test images, and accuracy on the domain that the published model knows."""
    callback = ZeroShotClassification(singles, **guard)
    trainer = Trainer(accelerator="cpu", callbacks=[callback], **quiet)
    (found,) = trainer.test(model, data, verbose=False)
    return found["test/recall_mean"], found["test/guard_top1"]


ways = {
    "all weights": {},
    "image tower locked": {"lock_image": "all"},
    "layer-wise decay": {"layer_decay": 0.7},
}
start = CLIPModule(weights="published", max_tokens=16, match_equal_texts=True)
start.load_initial_weights()
points = {"published": measure(start)}
for way, tuning in ways.items():
    options = {"optim": {"learning_rate": 5e-4}, "tuning": tuning, "match_equal_texts": True}
    model = CLIPModule(weights="published", max_tokens=16, **options)
    trainer = train(model, data, STEPS)
    trainer.save_checkpoint(f"{way.replace(' ', '_')}.ckpt")
    points[way] = measure(model)
for name, (recall, accuracy) in points.items():
    print(f"{name:20} own images: {recall:4.1f}% mean recall    what it knew: {accuracy:4.1f}%")

# %% [markdown]
# The first number should rise, and the second should not fall. Training all weights gains most on the own images.
#
# ## Between both
#
# A model between the published and the tuned weights often keeps much of both (WiSE-FT). No training is needed, only
# a mean of the weights.

# %%
import torch

tuned = torch.load("all_weights.ckpt", weights_only=True)["state_dict"]
line = []
for ratio in (0.0, 0.25, 0.5, 0.75, 1.0):
    mixed = {name: torch.lerp(old, tuned[name], ratio) for name, old in start.state_dict().items()}
    model = CLIPModule(weights="published", max_tokens=16, match_equal_texts=True)
    model.load_state_dict(mixed)
    line.append(measure(model))

# %%
import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(5, 3.2))
for name, (recall, accuracy) in points.items():
    axis.scatter(accuracy, recall, label=name)
axis.plot(
    [accuracy for _, accuracy in line], [recall for recall, _ in line], ":", color="grey", label="between", zorder=0
)
axis.set_xlabel("what it knew: accuracy on single shapes, %")
axis.set_ylabel("own images: mean recall, %")
axis.legend(fontsize=8)

# %% [markdown]
# Up and to the right is better. Choose on a validation split, not on the test images as here, and by what your use needs.
#
# ## Where to go on
#
# - On the command line, with a table of before and after: [one command](../methods/clip.md#one-command).
# - Low-rank adapters, the sigmoid loss, large batches in little memory: [CLIP](../methods/clip.md#what-trains).
# - The same trade-off on photographs, with three seeds: [gained and forgotten](../methods/clip.md#what-is-gained-and-what-is-forgotten).
# - Evaluation on many public sets: [evaluation](../evaluation.md).
