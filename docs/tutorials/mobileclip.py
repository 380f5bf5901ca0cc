# %% [markdown]
# # Reinforce and train a small CLIP for a phone
#
# You want to search images by texts on a phone, so the model must be small. MobileCLIP makes small models better by
# *reinforcing the data*: a large model looks at every pair **once**, and its embeddings are stored with the pair. Small
# models then learn from them in every training, and no training runs the large model again.
#
# This tutorial trains a larger CLIP, reinforces pairs by it, trains the same small CLIP without and with what is stored,
# and runs the small one without torch, as a phone does. Everything runs on a CPU, and nothing is downloaded: the images
# are drawn. The last steps need the extra `onnx` (`pip install -e ".[onnx]"`).

# %% tags=["parameters"]
PAIRS = 1600  # that are reinforced, and that small models train on
TEACHER_STEPS = 200  # of 64 pairs, once
STEPS = 50  # of 64 pairs, for each small model
TESTED = 256  # images to search

# %% [markdown]
# ## The pairs
#
# Two shapes on each image; a caption that says how they lie, and a second, *synthetic* one. MobileCLIP lets a captioner
# write synthetic captions; here they are made of the same scene. The test images show pairs of shapes that no training
# image has.

# %%
import io

import matplotlib.pyplot as plt
import pyarrow
import pyarrow.parquet

from vlightning.datamodules import ShapeClassesDataModule, ShapesDataModule

classes = list(ShapeClassesDataModule().class_names)  # such as "red circle"
shapes = ShapesDataModule(length=4 * PAIRS, eval_length=TESTED, image_size=64)
for split in ("train", "test"):
    table, rows = shapes.open_split(split), []
    for row in range(len(table)):
        scene, content = table.scene(row), io.BytesIO()
        table.image(row).save(content, "PNG")
        label = classes.index(f"{scene.first.color} {scene.first.shape}")
        texts = [str(scene), f"{scene.second} and {scene.first}"]
        pair = {"caption": texts[0], "synthetic": texts[1:], "captions": texts, "label": label}
        rows.append({"image": {"bytes": content.getvalue()}, **pair})
    if split == "train":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "more.parquet")  # the teacher's
        rows = rows[:PAIRS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), f"{split}.parquet")
    print(f"{split}: {len(rows)} images, such as '{texts[0]}', also '{texts[1]}'")

# %% [markdown]
# ## The larger CLIP
#
# The *teacher* has twice the layers of the small model, and is trained on both captions of four times as many images, the
# test images excepted. With a published CLIP in its place this step is left out: a teacher is named by its model and tag,
# as in `Teacher(model="ViT-L-14", weights="openai")`.

# %%
import json
import time
from pathlib import Path

from lightning.pytorch import Trainer, seed_everything

from vlightning.datamodules import ImageTextDataModule
from vlightning.lightning_modules import MobileCLIPModule

larger = {"image_tower": "fastvit_mci_tiny", "image_options": {"layers": [2, 2, 4, 2]}, "image_size": 64}
larger |= {"embed_dim": 128, "width": 128, "layers": 4, "mixers": True}
Path("larger.json").write_text(json.dumps(larger))
plain = {"teacher": {"distillation_weight": 0.0}}
optim = {"learning_rate": 2e-3, "warmup_steps": 20, "weight_decay": 0.05}
common = {"max_tokens": 16, "vision": {"image_size": 64}, "momentum": {"momentum": None}, "optim": optim}
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def build(model="MobileCLIP-tiny", **settings):
    """Build a model from the same random weights each time."""
    seed_everything(0, verbose=False)
    return MobileCLIPModule(model, **common, **settings)


def train(model, data, steps):
    """Train a model, and return the Trainer."""
    seed_everything(0, verbose=False)
    trainer = Trainer(max_epochs=-1, max_steps=steps, limit_val_batches=0, enable_checkpointing=False, **quiet)
    trainer.fit(model, data)
    return trainer


more = {"tokenizer": "clip", "vocab_size": 49408, "max_tokens": 16, "caption_column": "captions"}
more |= {"image_size": 64, "batch_size": 64, "num_workers": 0, "augmentation": "crop", "horizontal_flip": False}
teacher = build("larger.json", **plain)
train(teacher, ImageTextDataModule(train="more.parquet", **more), TEACHER_STEPS).save_checkpoint("teacher.ckpt")

# %% [markdown]
# ## Reinforce once
#
# The teacher embeds both captions and three random crops of each image. Turns and other colors are left out
# (`num_ops=0`), since they would make these captions false. On the command line this is `vlightning predict` with
# `configs/mobileclip/reinforce.yaml`.

# %%
import tarfile

import numpy as np

from vlightning.datamodules import ReinforcementDataModule
from vlightning.lightning_modules import ReinforcementModule
from vlightning.lightning_modules.mobileclip.ensemble import Teacher

crops = {"augmentations": 3, "crop_scale": (0.9, 1.0), "num_ops": 0, "image_size": 64}
pairs = ReinforcementDataModule(pairs="train.parquet", folder="reinforced", synthetic_column="synthetic", **crops)
start = time.perf_counter()
Trainer(**quiet).predict(
    ReinforcementModule([Teacher(weights="teacher.ckpt", model="larger.json")]), pairs, return_predictions=False
)
shard = min(Path("reinforced").glob("*.tar"))
print(f"{PAIRS} pairs in {time.perf_counter() - start:.0f} s; the first of the files: {shard.name}")

# %% [markdown]
# A row of the shard is a few files in a tar, in the layout of DataCompDR, which Apple released with MobileCLIP:

# %%
with tarfile.open(shard) as tar:
    members = tar.getmembers()
    row = [member for member in members if member.name.split(".")[0] == members[0].name.split(".")[0]]
    for member in row:
        content = tar.extractfile(member).read()
        if member.name.endswith("npz"):
            arrays = {name: value.shape for name, value in np.load(io.BytesIO(content)).items()}
            shown = ", ".join(f"{name} {shape}" for name, shape in arrays.items())
        else:
            shown = "" if member.name.endswith(("jpg", "png")) else content.decode()[:70]
        print(f"{member.name.partition('.')[2]:10} {member.size:5} bytes  {shown}")

# %% [markdown]
# ## The same small CLIP, without and with reinforcement
#
# The small model has convolutions in its image tower and two layers in its text tower. Three trainings see the same
# images in the same order: with the real captions alone, as plain CLIP; with both captions; with both captions and the
# stored embeddings. `distillation_weight` is the share of the loss that comes from the embeddings.

# %%
from vlightning.callbacks import ZeroShotClassification
from vlightning.datamodules import ImageClassificationDataModule, ReinforcedImageTextDataModule

data = ReinforcedImageTextDataModule(
    train="reinforced", test="test.parquet", image_size=64, batch_size=64, max_tokens=16, num_workers=0
)


def measure(model):
    """Return mean recall, and the share of images whose first shape is named, in %."""
    labeled = ImageClassificationDataModule(test="test.parquet", label_column="label", num_workers=0)
    callback = ZeroShotClassification(labeled, class_names=classes, templates=["a large {}", "a small {}"])
    (found,) = Trainer(callbacks=[callback], **quiet).test(model, data, verbose=False)
    return found["test/recall_mean"], found["test/zero_shot_top1"]


ways = {
    "plain CLIP": {"captions": "real", **plain},
    "synthetic captions": plain,
    "reinforced": {"teacher": {"distillation_weight": 0.75}},
}
results = {}
for way, settings in ways.items():
    student = build(**settings)
    start = time.perf_counter()
    train(student, data, STEPS).save_checkpoint(f"{way.replace(' ', '_')}.ckpt")
    seconds = time.perf_counter() - start
    results[way] = measure(student)
    print(
        f"{way:20} {results[way][0]:4.1f}% mean recall, {results[way][1]:4.1f}% zero-shot, {seconds:3.0f} s of training"
    )
results["teacher"] = measure(teacher)
print(f"{'the teacher':20} {results['teacher'][0]:4.1f}% mean recall, {results['teacher'][1]:4.1f}% zero-shot")

# %%
figure, axes = plt.subplots(1, 2, figsize=(7.2, 1.9), sharey=True)
for column, (axis, title) in enumerate(zip(axes, ("mean recall, %", "zero-shot, %"), strict=True)):
    axis.barh(list(results), [pair[column] for pair in results.values()], color=["#4472a8"] * 3 + ["#999999"])
    axis.set_xlabel(title)
axes[0].invert_yaxis()

# %% [markdown]
# One training of each, stopped early, on drawn images: repeat it with other seeds before you believe a difference of some
# points. It does not show that reinforcement pays; [a table of three seeds on
# photographs](../methods/mobileclip.md#reinforcing-your-own-data) does not either, since its synthetic captions hold the
# labels that are measured. The paper's teachers have learned from far more pairs,
# and other ones, than the small model reads; a teacher that knows no more than the pairs has little to give.
#
# ## Reparameterize
#
# In training the image tower has parallel branches and norms. For use they are folded into one convolution each: the
# same function with fewer operations.

# %%
import torch

from vlightning.lightning_modules.networks.clip.reparameterize import reparameterize

network = student.student.eval()
fused = reparameterize(network)
images = torch.rand(8, 3, 64, 64)
with torch.no_grad():
    trained, folded = network.encode_image(images), fused.encode_image(images)
print(f"largest difference of features: {(trained - folded).abs().max():.0e}")
for name, model in {"as trained": network, "folded": fused}.items():
    numbers = sum(p.numel() for p in model.visual.parameters())
    parts = sum(not list(part.children()) and bool(list(part.parameters())) for part in model.visual.modules())
    print(f"{name:10}  {numbers:,} parameters in {parts} layers of the image tower")

# %% [markdown]
# ## Export for the phone
#
# An export does the same by itself. `onnx` writes a program for each tower, `onnx_int8` the same with the weights of
# matrices in 8 bits; on the command line, `vlightning export reinforced.ckpt phone --layout onnx`.

# %%
import shutil

from vlightning.commands.export.layouts import export

for layout in ("onnx", "onnx_int8"):
    shutil.rmtree(layout, ignore_errors=True)  # of an earlier run of this page: an export replaces nothing
    export("reinforced.ckpt", layout, layout)
    sizes = {name: Path(layout, f"{name}.onnx").stat().st_size / 2**20 for name in ("image", "text")}
    print(f"{layout:10} image tower {sizes['image']:5.2f} MiB, text tower {sizes['text']:5.2f} MiB")

# %% [markdown]
# Most of the text tower is the table of CLIP's 49,408 words, which stays float32, and the image tower is mostly
# convolutions, which stay float32 too: 8 bits save little in so small a model, and more in a transformer.
#
# ## Search without torch
#
# From here on only ONNX Runtime, the library `tokenizers` and numpy run, as they do on a phone, on one thread.

# %%
import onnxruntime
from PIL import Image
from tokenizers import Tokenizer

single = onnxruntime.SessionOptions()
single.intra_op_num_threads = 1
photos = [
    Image.open(io.BytesIO(row["bytes"])) for row in pyarrow.parquet.read_table("test.parquet")["image"].to_pylist()
]
how = json.loads(Path("onnx/config.json").read_text())["preprocessing"]
pixels = np.stack([(np.asarray(photo.convert("RGB")) / 255 - how["mean"]) / how["std"] for photo in photos])
pixels = pixels.transpose(0, 3, 1, 2).astype(np.float32)
query = table.captions(0)[0]
index = {}
for layout in ("onnx", "onnx_int8"):
    image, text = (onnxruntime.InferenceSession(f"{layout}/{name}.onnx", single) for name in ("image", "text"))
    times = []
    for one in pixels:
        start = time.perf_counter()
        found = image.run(None, {"image": one[None]})[0]
        times.append(1000 * (time.perf_counter() - start))
        index.setdefault(layout, []).append(found[0])
    index[layout] = np.stack(index[layout])
    encoded = Tokenizer.from_file(f"{layout}/tokenizer.json").encode_batch([query])
    inputs = {"input_ids": [one.ids for one in encoded], "attention_mask": [one.attention_mask for one in encoded]}
    (vector,) = text.run(None, {given.name: np.array(inputs[given.name]) for given in text.get_inputs()})[0]
    scores = index[layout] @ vector
    place = int((scores > scores[0]).sum()) + 1
    print(f"{layout:10} {np.median(times):.1f} ms an image; the right image is number {place} of {len(scores)}")
print(f"least cosine of the features of both: {(index['onnx'] * index['onnx_int8']).sum(1).min():.4f}")

# %%
best = np.argsort(-scores)[:5]
figure, axes = plt.subplots(1, 5, figsize=(7.2, 1.9))
figure.suptitle(query, fontsize=9)
for axis, row in zip(axes, best, strict=True):
    axis.imshow(photos[row])
    axis.set_title(f"{scores[row]:.2f}" + (", right" if row == 0 else ""), fontsize=8)
    axis.axis("off")

# %% [markdown]
# ## Where to go on
#
# - Real pairs, published teachers, a captioner, interrupted reinforcements:
#   [reinforcing your own data](../methods/mobileclip.md#reinforcing-your-own-data).
# - Training MobileCLIP-S0 and larger, on many devices: [MobileCLIP](../methods/mobileclip.md#training).
# - Core ML, ExecuTorch and other layouts: [export](../export.md).
# - All methods on the same pairs: [results](../results.md).
