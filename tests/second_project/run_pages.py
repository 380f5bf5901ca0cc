"""Run the Python blocks of the pages in this folder, once in one process and once in two processes of DDP.

Usage: python run_pages.py blocks.json

`blocks.json` has the blocks of each page: [section, code, error], where the error is what follows the code on the page.
What each process found is written to `found-<processes>-<rank>.json`: for each block its page, section, error and the
warnings that vlightning or the Trainer gave.
"""

import faulthandler
import importlib
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import checks
import lightning
import torch
import torch.distributed as dist

import vlightning.callbacks
from vlightning.common.errors import UserError

TIMEOUT = 280
"""Seconds after which a process that waits for the other one says where, and ends."""


def run(pages, folder, processes, rank):
    os.chdir(folder)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(TIMEOUT, exit=True)
    if processes > 1:
        ranks = {"WORLD_SIZE": processes, "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
        os.environ |= {name: str(value) for name, value in ranks.items()}  # as torchrun sets them
        os.environ |= {"TORCHELASTIC_RUN_ID": "pages", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    found = []
    for page, blocks in pages.items():
        names = {"__name__": page}
        last = {section: number for number, (section, _, error) in enumerate(blocks) if error is None}
        for number, (section, code, expected) in enumerate(blocks):
            torch.manual_seed(0)
            said = run_block(code, names, f"{page}:{section}:{number}", isolated=expected is not None)
            if processes > 1:
                dist.barrier()
            if said["error"] is None and last.get(section) == number:
                said |= checked(section, names, processes)
            if said["error"] and (expected is None or not said["error"].startswith("UserError")):
                sys.stderr.write(f"process {rank} of {processes}, {page}, {section}: {said['error']}")
            found.append({"page": page, "section": section, **said})
            if processes > 1:
                dist.barrier()
    loaded = [str(module.__file__) for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
    answer = {"blocks": found, "loaded": loaded, "vlightning": vlightning.__file__, "lightning": lightning.__file__}
    Path(f"../found-{processes}-{rank}.json").write_text(json.dumps(answer))


def run_block(code, names, place, isolated):
    """Run a block; one that fails on purpose leaves no names behind."""
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(compile(code, place, "exec"), dict(names) if isolated else names)
        except UserError as raised:
            error = f"UserError: {raised}"
        except BaseException:
            error = traceback.format_exc()
    return {"error": error, "warnings": [f"{each.category.__name__}: {each.message}" for each in caught]}


def checked(section, names, processes):
    """Check what the block of a section did; the check has the section's name."""
    check = getattr(checks, section, None)
    if check is None:
        return {"checked": False}
    try:
        check(names, processes)
    except BaseException:
        return {"checked": True, "error": traceback.format_exc()}
    return {"checked": True}


def main():
    pages = json.loads(Path(sys.argv[1]).read_text())
    vlightning.callbacks.load_all()
    for name in ("timm", "pyarrow.parquet", "torch.utils.tensorboard", "matplotlib.figure", "vlightning.datamodules"):
        importlib.import_module(name)
    started = []
    for processes in (1, 2):
        folder = Path(f"processes-{processes}").absolute()
        folder.mkdir()
        for rank in range(processes):
            pid = os.fork()  # the imports take longer than the runs
            if pid == 0:
                run(pages, folder, processes, rank)
                sys.stdout.flush()
                os._exit(0)
            started.append(pid)
    sys.exit(any(os.waitpid(pid, 0)[1] for pid in started))


if __name__ == "__main__":
    main()
