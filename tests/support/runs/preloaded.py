"""What the server of `support.runs.fork_server` has imported before it forks.

None of it may start a thread, which a fork does not have, and whose locks are never released there.
"""

import atexit
import gc
import os
import sys
from importlib import import_module
from pathlib import Path

MODULES = (
    "attrs",  # jsonargparse looks whether a class is one of attrs
    "datasets",
    "pytest",
    "support.runs.forked",
    "support.runs.killed_run",
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "vlightning.commands.cli.commands",
    "vlightning.commands.data.command",
    "vlightning.commands.export.command",
    "vlightning.commands.plan.command",
    "vlightning.datamodules",
)

_before = dict(os.environ)
for _name in MODULES:
    import_module(_name)
for _name in ("vlightning.callbacks", "vlightning.lightning_modules"):
    import_module(_name).load_all()

SET_BY_IMPORTS = {name: value for name, value in os.environ.items() if _before.get(name) != value}
PATH = [entry for entry in sys.path if entry and entry not in _before.get("PYTHONPATH", "").split(os.pathsep)]
"""Where an interpreter looks for modules, without the script's folder and the environment's."""

_threads = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
if [name for name in _threads if name != "jemalloc_bg_thd"][1:]:  # pyarrow's allocator, which is made for forks
    raise RuntimeError(f"Expected no thread beside the first, got {_threads}: find the import that starts it.")

sys.stdout.flush()
os.chdir("/")
gc.collect()
gc.freeze()  # a collection in a fork would write to, and so copy, every page of what is imported
atexit.register(gc.unfreeze)  # or triton reports leaks
