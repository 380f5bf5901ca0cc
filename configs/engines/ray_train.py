"""`vlightning fit` in the workers of Ray Train; arguments after the options of this script are those of `fit`.

    python configs/engines/ray_train.py --name albef-4m --workers 8 --gpu --storage /shared/ray \
      --config configs/albef/base.yaml --config configs/albef/pretrain_4m.yaml

Ray starts the workers, and all of them again when one dies; they go on from the newest checkpoint in the run's folder,
which all nodes must see. With `--sharded` the strategy is this package's, since Ray's `RayFSDPStrategy` is FSDP1.
"""

import argparse
import os
from typing import Any

import ray.train
from ray.train.torch import TorchTrainer

OPTION = "--trainer.strategy"


def fit(given: dict[str, Any]) -> int:
    """Run `vlightning fit` in this worker; return 2 for words that it refuses, which another start does not mend.

    Raises:
        RuntimeError: If it ends with another status; Ray then starts the workers again.
    """
    os.chdir(given["folder"])  # that of Ray's own files is another
    os.environ["VLIGHTNING_JOB"] = ray.train.get_context().get_experiment_name()
    from vlightning.cli import main

    try:
        main(["fit", *given["words"]])
    except SystemExit as stop:
        if stop.code == 2:
            return 2
        if stop.code:
            raise RuntimeError(f"vlightning fit ended with status {stop.code}") from stop
    return 0


def run() -> None:
    """Start the workers, and wait for their end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--name", required=True, help="of the job, and of the run's folder")
    parser.add_argument("--workers", type=int, default=2, help="processes on all nodes")
    parser.add_argument("--gpu", action="store_true", help="one GPU a worker")
    parser.add_argument("--cpus", type=int, default=1, help="cores of a worker, with its loader workers")
    parser.add_argument("--storage", help="folder of Ray's own files, which all nodes see; by default ~/ray_results")
    parser.add_argument("--max_failures", type=int, default=3, help="times that the workers are started again")
    parser.add_argument("--sharded", action="store_true", help="FSDP2 by this package's ShardedStrategy")
    given, words = parser.parse_known_args()
    replicated = (f"{OPTION}.class_path=ray.train.lightning.RayDDPStrategy", f"{OPTION}.gradient_as_bucket_view=true")
    words += [f"{OPTION}=ShardedStrategy"] if given.sharded else replicated
    words += ["--trainer.plugins+=ray.train.lightning.RayLightningEnvironment", "--trainer.devices=auto"]
    words += ["--trainer.use_distributed_sampler=false"]
    result = TorchTrainer(
        fit,
        train_loop_config={"words": words, "folder": os.getcwd()},
        scaling_config=ray.train.ScalingConfig(
            num_workers=given.workers, use_gpu=given.gpu, resources_per_worker=resources(given)
        ),
        run_config=ray.train.RunConfig(
            name=given.name,
            storage_path=given.storage,
            failure_config=ray.train.FailureConfig(max_failures=given.max_failures),
        ),
    ).fit()
    raise SystemExit(result.return_value)


def resources(given: argparse.Namespace) -> dict[str, float]:
    """Return what Ray keeps free for a worker."""
    return {"CPU": given.cpus, "GPU": 1} if given.gpu else {"CPU": given.cpus}


if __name__ == "__main__":
    run()
