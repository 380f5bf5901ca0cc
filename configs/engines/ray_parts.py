"""`vlightning embed` or a reinforcement (`vlightning predict`) on Ray: each actor makes parts of the shards.

    python configs/engines/ray_parts.py --parts 256 --actors 64 --gpu \
      embed ViT-B-32 --weights laion2b_s34b_b79k --data.predict "shards/*.tar" --output /shared/stores/photos

A part is the command with `--part i/n` (`--data.part i/n` of `predict`): shards do not depend on each other, and those
that exist are skipped, so that a part that is lost with its node is made by another actor, and the same command goes on
after a stop. The files are those of one process. Every part loads the model again: give some parts an actor, not
thousands.
"""

import argparse
import os
from typing import Any

import ray
import ray.data

OPTIONS = {"embed": "--part", "predict": "--data.part"}


class Maker:
    """Make parts; an actor, with a GPU of its own.

    Args:
        words: The words of the command.
        count: Number of parts.
        folder: Folder that the command runs in.
    """

    def __init__(self, words: list[str], count: int, folder: str) -> None:
        self.words = words
        self.count = count
        os.chdir(folder)
        self.option = OPTIONS[words[0]]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Make one part.

        Raises:
            RuntimeError: If the command ends with another status than 0; its error is in the log.
        """
        from vlightning.cli import main

        (part,) = batch["id"].tolist()
        try:
            main([*self.words, f"{self.option}={part}/{self.count}"])
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"part {part} of {self.count} ended with status {stop.code}") from None
        return batch


def run() -> None:
    """Start the actors, and wait until all parts are made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--parts", type=int, required=True, help="parts of the shards, several an actor")
    parser.add_argument("--actors", type=int, default=1, help="processes, each with a model")
    parser.add_argument("--gpu", action="store_true", help="one GPU an actor")
    parser.add_argument("--cpus", type=int, default=1, help="cores of an actor, with its loader workers")
    given, words = parser.parse_known_args()
    if not words or words[0] not in OPTIONS:
        parser.error(f"Expected {' or '.join(OPTIONS)} and its words after the options.")
    # Rows of the driver: `ray.data.range` needs a core to read, which it never gets where the actors hold all of them.
    numbers = ray.data.from_items([{"id": part} for part in range(given.parts)], override_num_blocks=given.parts)
    parts = numbers.map_batches(
        Maker,
        fn_constructor_args=(words, given.parts, os.getcwd()),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=given.actors),
        num_cpus=given.cpus,
        num_gpus=int(given.gpu),
    )
    print(f"{parts.materialize().count()} parts are made.")


if __name__ == "__main__":
    run()
