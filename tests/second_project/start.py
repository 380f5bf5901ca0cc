"""Short runs."""

import os

from lightning.pytorch import Trainer


def trainer(*callbacks, **options):
    """A Trainer of one process, or of those that torchrun has started."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "num_sanity_val_steps": 0, "max_epochs": 1, "accelerator": "cpu"}
    strategy = "ddp" if processes > 1 else "auto"
    return Trainer(**{**quiet, "devices": processes, "strategy": strategy, **options}, callbacks=list(callbacks))
