"""A simulated SLURM job: its environment and `scontrol`."""

import os


def pretend_slurm(monkeypatch, folder, restarts=0, job=41, status=0):
    """Return a function that returns the arguments of the calls of `scontrol`."""
    values = {
        "SLURM_NTASKS": "1",
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NAME": "train",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    programs, log = folder / "bin", folder / "scontrol.txt"
    programs.mkdir(exist_ok=True)
    says = f"echo not today >&2; exit {status}" if status else "exit 0"
    (programs / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {log}\n{says}\n')
    (programs / "scontrol").chmod(0o755)
    if str(programs) not in os.environ["PATH"]:
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return lambda: log.read_text().splitlines() if log.exists() else []
