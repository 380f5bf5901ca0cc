"""`vlightning fit` on Modal: one machine of eight GPUs, with data and runs on volumes.

    modal run configs/engines/modal_train.py --name albef-4m \
      --words "--config configs/albef/base.yaml --config configs/albef/pretrain_4m.yaml"

A call ends after a day at the latest; Modal then calls the function again, and the run goes on in its folder.
"""

import os
import shlex
import subprocess

import modal

GPUS = 8
app = modal.App("vlightning")
image = modal.Image.debian_slim(python_version="3.13").pip_install("vlightning")
data = modal.Volume.from_name("data", create_if_missing=True)
runs = modal.Volume.from_name("runs", create_if_missing=True)


@app.function(
    image=image,
    gpu=f"H100:{GPUS}",
    volumes={"/data": data, "/runs": runs},
    timeout=24 * 3600,
    retries=modal.Retries(max_retries=10, initial_delay=10.0),
    single_use_containers=True,
)
def fit(name: str, words: str) -> None:
    """Run the command in `torchrun`; Modal calls again after an error."""
    torchrun = ["torchrun", "--standalone", f"--nproc-per-node={GPUS}", "--max-restarts=3", "-m", "vlightning.cli"]
    subprocess.run(
        [*torchrun, "fit", *shlex.split(words), f"--trainer.devices={GPUS}"],
        cwd="/runs",
        # The last: processes that are started again must not find addresses of dead ones (pytorch/pytorch#135712).
        env=os.environ | {"VLIGHTNING_JOB": name, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        check=True,
    )


@app.local_entrypoint()
def main(name: str, words: str) -> None:
    """Call the function on Modal, and wait."""
    fit.remote(name, words)
