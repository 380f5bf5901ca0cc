# %% [markdown]
# # One callback in your own project
#
# You have a LightningModule of your own and want one part of this package: here a moving average of the weights, which
# is often better than the weights themselves; a classifier that watches how good your features are while you train; and
# an exact resume after a crash. None of the methods is needed, and your training step stays as it is.
#
# The project of this tutorial learns features without labels: it turns images, takes a color channel away, and has to
# tell which. Put yours in its place.

# %% tags=["parameters"]
IMAGES = 1600  # images of 40 classes to train on
EPOCHS = 6

# %% [markdown]
# ## Your project
#
# A network, a training step, an optimizer: plain Lightning. The images come from a datamodule that draws one colored
# shape on each; a datamodule or loader of your own does as well, if its batches are dicts with an `image` and a `label`.

# %%
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn.functional import cross_entropy

from vlightning.datamodules import ShapeClassesDataModule


class Rotations(LightningModule):
    """Learns features by telling by how many quarters an image was turned, and which color channel was lost."""

    def __init__(self):
        super().__init__()
        layers = []
        for width, next_width in ((3, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(width, next_width, 3, stride=2, padding=1), nn.BatchNorm2d(next_width), nn.ReLU()]
        self.network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Linear(512, 12)

    def encode_images(self, image):
        return self.network(image)

    def training_step(self, batch, batch_idx):
        image = batch["image"]
        turn, lost = torch.randint(4, (1,)).item(), torch.randint(3, (len(image),), device=image.device)
        image = torch.rot90(image, turn, dims=(2, 3)).clone()
        image[torch.arange(len(image)), lost] = 0
        loss = cross_entropy(self.head(self.encode_images(image)), 3 * turn + lost)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


data = ShapeClassesDataModule(length=IMAGES, eval_length=800, noise=0, batch_size=64)

# %% [markdown]
# ## Watch the features: `OnlineLinearProbe`
#
# The loss falls, but are the features of any use? `OnlineLinearProbe` trains a linear classifier on them beside the training.
# It reads `encode_images` of your module and the labels in your batches; it sends no gradient back, and the training
# stays bit for bit the same.

# %%
from vlightning.callbacks import OnlineLinearProbe


def train(*callbacks, epochs=EPOCHS, checkpoint=None, **options):
    """Train the project from the same start, and return the Trainer."""
    seed_everything(0, verbose=False)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "num_sanity_val_steps": 0}
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", callbacks=list(callbacks), **(quiet | options))
    trainer.fit(Rotations(), data, ckpt_path=checkpoint)
    return trainer


probed = train(OnlineLinearProbe(num_classes=40))
print(f"loss {float(probed.callback_metrics['train/loss']):.2f}")
print(f"the probe is right in {float(probed.callback_metrics['val/probe_top1']):.0f}% of 40 classes; chance is 2.5%")

# %% [markdown]
# ## An average of the weights: `EMACallback`
#
# An exponential moving average smooths the noise of the last steps. Give the network a copy to move, and say by a path
# which part it follows. The callback counts optimizer steps, not batches, so it is right with accumulation too.

# %%
import copy

from vlightning.callbacks import EMACallback, EMAPair


class Averaged(Rotations):
    """The same project with a copy of its network."""

    def __init__(self):
        super().__init__()
        self.average = copy.deepcopy(self.network).requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.average.eval()
        return self


pair = EMAPair(source="network", target="average", momentum=0.99, buffers="average", warmup="always")
seed_everything(0, verbose=False)
model = Averaged()
quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
averaging = Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[EMACallback(pairs={"average": pair})], **quiet)
averaging.fit(model, data)
moved = sum((a - b).norm() for a, b in zip(model.network.parameters(), model.average.parameters(), strict=True))
print(f"{averaging.global_step} steps; the average is {float(moved):.2f} away from the weights")

# %% [markdown]
# The average is a part of the module: checkpoints contain it, and `model.average` is what you evaluate and export.
#
# ## Stop and go on as if nothing had happened
#
# A run that was killed usually goes on with other random numbers and another order of images. `StepSeedCallback` makes
# the random numbers of each step a function of the step, and the datamodule goes on at the next image. To see it, one run
# goes through and writes a checkpoint in the middle of its second epoch; another starts from that checkpoint, as after a
# crash.

# %%
from lightning.pytorch.callbacks import ModelCheckpoint

from vlightning.callbacks import StepSeedCallback

middle = 3 * IMAGES // (2 * 64)
writer = ModelCheckpoint(".", "middle", every_n_train_steps=middle, save_top_k=-1)
whole = train(StepSeedCallback(seed=0), writer, epochs=2, enable_checkpointing=True)
resumed = train(StepSeedCallback(seed=0), epochs=2, checkpoint="middle.ckpt")
same = [torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True)]
print(f"from step {middle} to {resumed.global_step}: {sum(same)} of {len(same)} tensors are equal")

# %% [markdown]
# Equal means equal in every bit. With `AtomicCheckpointIO`, a crash while a checkpoint is written leaves the one before
# it whole; `StopOnSignal` writes one on Ctrl-C or when a cluster takes the machine away.
#
# ## Where to go on
#
# - All callbacks, each with a block of code to copy: [callbacks](../callbacks.md).
# - Which faults a run survives, and how it is tested: [faults](../faults.md).
# - Make your project known to the command line: [adding a method](../adding_a_method.md).
