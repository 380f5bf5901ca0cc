"""What the server of the runs imports once, before it forks a process for each run."""

import proof.training  # noqa: F401
from vlightning import callbacks, lightning_modules

callbacks.load_all()
lightning_modules.load_all()
