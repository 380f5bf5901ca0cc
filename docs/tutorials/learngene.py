# %% [markdown]
# # One learngene, models of three depths
#
# You need the same model in several sizes: a small one for a phone, a larger one for a server. Training each from its
# beginning costs each its full training. MM-LG trains **once** and keeps a *learngene*: six blocks, from which models of
# 6 to 12 layers start far ahead of random weights.
#
# Everything runs on a CPU, and nothing is downloaded: the images are drawn.

# %% tags=["parameters"]
EXTRACTION_STEPS = 200  # of 64 pairs, once
STEPS = 20  # of 64 pairs, for each model
DEPTHS = (6, 8, 12)

# %% [markdown]
# ## Train once
#
# The *auxiliary* is a CLIP of 12 layers in each tower, but its layers are no free weights: each is a weighted sum of a
# block that both towers share and a block of its own tower. What is shared is what images and texts have in common.
# (The paper lets a published CLIP teach it; here it learns from the pairs alone, so that nothing is downloaded.)

# %%
from lightning.pytorch import Trainer, seed_everything

from vlightning.callbacks import LearngeneExpansionCallback, LearngeneWriter
from vlightning.datamodules import ShapesDataModule
from vlightning.lightning_modules import MMLGModule

texts = {"tokenizer": "clip", "vocab_size": 49408, "max_tokens": 16}
data = ShapesDataModule(length=6400, image_size=48, batch_size=64, eval_batch_size=256, **texts)


def model(student, depth, warmup, rate):
    """Return a CLIP of a depth, which trains without a teacher."""
    return MMLGModule(
        student=student,
        towers={"width": 64, "heads": 2, "depth": depth, "embed_dim": 64},
        vision={"image_size": 48, "patch_size": 12},
        text={"max_tokens": 16, "vocab_size": 49408},
        teacher={"distillation_weight": 0.0},
        optim={"learning_rate": rate, "warmup_steps": warmup},
    )


def train(module, steps, *callbacks):
    """Train for some steps; return mean recall on test images."""
    seed_everything(0, verbose=False)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "limit_val_batches": 0, "accelerator": "cpu"}
    trainer = Trainer(max_epochs=-1, max_steps=steps, callbacks=list(callbacks), **quiet)
    trainer.fit(module, data)
    (found,) = trainer.test(module, data, verbose=False)
    return found["test/karpathy5/recall_mean"]


writer = LearngeneWriter(file="learngene.safetensors")
recall = train(model("MM-LG", 12, 50, 2e-3), EXTRACTION_STEPS, writer)
print(f"auxiliary of 12 layers: {recall:.1f}% mean recall")

# %% [markdown]
# ## What is in the file
#
# Shared blocks, blocks of the towers, and the 24 coefficients of the sums. Numbers count what is stored:

# %%
from safetensors.torch import load_file

stored = load_file("learngene.safetensors")
words = sum(tensor.numel() for name, tensor in stored.items() if "token_embedding" in name)
total = sum(tensor.numel() for tensor in stored.values())
print(f"{total - words:,} numbers, and {words:,} of the table of words")
for depth in DEPTHS:
    numbers = sum(
        p.numel() for name, p in model("plain", depth, 1, 1e-3).named_parameters() if "token_embedding" not in name
    )
    print(f"a plain CLIP of {depth} layers has {numbers:,}")

# %% [markdown]
# ## Models of three depths
#
# `LearngeneExpansionCallback` fills an ordinary CLIP from the file before its first step. Each model then trains for a
# few steps on the same pairs; beside it one from random weights, for the same steps.

# %%
results = {}
for depth in DEPTHS:
    start = LearngeneExpansionCallback(file="learngene.safetensors", target="student")
    results[depth] = (train(model("plain", depth, 2, 5e-4), STEPS), train(model("plain", depth, 2, 5e-4), STEPS, start))
    scratch, descendant = results[depth]
    print(
        f"{depth:2} layers after {STEPS} steps: {scratch:4.1f}% from random weights, {descendant:4.1f}% from the learngene"
    )

# %%
import matplotlib.pyplot as plt
import numpy as np

figure, axis = plt.subplots(figsize=(5, 2.6), layout="constrained")
places = np.arange(len(DEPTHS))
for shift, column, name in ((-0.2, 0, "random weights"), (0.2, 1, "learngene")):
    axis.bar(places + shift, [results[depth][column] for depth in DEPTHS], 0.4, label=name)
axis.set_xticks(places, [f"{depth} layers" for depth in DEPTHS])
axis.set_ylabel("mean recall, %")
figure.legend(loc="outside upper center", ncols=2, fontsize=8)

# %% [markdown]
# The bars are no equal race: the learngene has cost 200 steps of 12 layers, which the models from random weights do not
# have. It pays where one extraction serves several models, if it pays: training each of them for longer was not compared.
#
# The models are ordinary CLIPs: they can be exported for open_clip and transformers, and need the learngene no more.
#
# ## Where to go on
#
# - On the command line: `configs/mmlg/quickstart.yaml`, then with `configs/mmlg/quickstart_descendant.yaml`.
# - The paper's recipe with a published CLIP as the teacher, other methods of this kind: [MM-LG](../methods/mmlg.md#training).
# - A learngene in a network of your own, also in ViTs of timm's: [LearngeneExpansionCallback](../callbacks/files.md#learngeneexpansioncallback).
# - One small model, as good as can be: [MobileCLIP](../methods/mobileclip.md).
