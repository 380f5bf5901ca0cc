"""What a training reads and runs, to compare one that reads a store with one that does not."""

from lightning import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


class Losses(Callback):
    """The loss and the samples of each batch."""

    def __init__(self):
        self.losses = []
        self.samples = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.samples.append(batch["sample_index"].tolist())


class Encodings(Callback):
    """Which towers of a student encode, from the start of the training, a validation or a prediction."""

    def __init__(self):
        self.ran = set()

    def on_train_start(self, trainer, pl_module):
        if "encode_image" not in vars(pl_module.student):
            pl_module.student.encode_image = self.watched("image", pl_module.student.encode_image)
            pl_module.student.encode_text = self.watched("text", pl_module.student.encode_text)

    on_validation_start = on_predict_start = on_train_start

    def watched(self, tower, encode):
        def encodes(*args):
            self.ran.add(tower)
            return encode(*args)

        return encodes


def fit_with_losses(module, data, epochs, more=(), resumed=None, steps=-1):
    """Fit on a CPU without files, but for checkpoints of a callback among `more`; return the losses and the Trainer."""
    kept = Losses()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        max_steps=steps,
        logger=False,
        callbacks=[kept, *more],
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in more),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data, ckpt_path=resumed)
    return kept, trainer
