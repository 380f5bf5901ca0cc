"""The command `vlightning embed`."""

from ..cli.command_parser import CommandParser


def run_embed(words: list[str]) -> str:
    """Run `vlightning embed`.

    Args:
        words: The arguments after `embed`.

    Returns:
        A message that names the store; empty in processes beside the first.

    Raises:
        UserError: If an argument is wrong, the data or the model cannot be used, or the folder holds another store.
    """
    # Not by the parser, which would take the value of one of the data's options for the model.
    model = words[0] if words and not words[0].startswith("-") else None
    typed, others = parser_of_embed().parse_known_args(words[0 if model is None else 1 :])
    typed.model = model
    from .work import work  # the other commands need none of its imports

    return work(typed, others)


def parser_of_embed() -> CommandParser:
    """Return the parser of the arguments, of which those of the data are left."""
    parser = CommandParser(
        "embed",
        usage="vlightning embed [MODEL] --output FOLDER [--config FILE.yaml ...] [--data.train pairs.csv ...]",
        description="Run the towers of a model once over a data set, and store the features: for trainings with locked "
        "towers (data.store), and for search. Options of the data are those of `vlightning fit`, such as --data.train "
        "pairs.csv, or a config with them. MODEL is a run's folder, a checkpoint, an export, a folder of open_clip's, "
        "or a model's name with --weights; without it the locked towers of the config's model run with its initial "
        "weights. "
        "A stopped command goes on where it was when it is given again.",
    )
    add = parser.add_argument
    add("--weights", help="a tag of open_clip's, a file, or random (to try the command), for a model's name")
    add("--output", required=True, help="folder of the store")
    add("--config", action="append", default=[], help="a config with the data; may be repeated")
    add("--split", choices=("train", "validation", "test", "predict"), help="by default the first that has a source")
    add("--views", type=int, default=0, help="augmented views of each image, as training draws them; 0: the plain one")
    add("--of", nargs="+", choices=("images", "texts"), help="by default both, or those of locked towers")
    add("--seed", type=int, help="of the augmented views; by default seed_everything of the config, or 0")
    add("--shard_size", type=int, default=1000, help="rows of a file, which a killed process repeats at most; 1000")
    add("--part", help="i/n: the shards of part i, from 0, of n, for commands that start apart; by default all")
    add("--batch_size", type=int, default=64, help="images, or texts, in a pass of a tower; 64")
    add("--num_workers", type=int, default=2, help="loader workers of a process; 2")
    add("--accelerator", default="auto", help="cpu, cuda, ...; by default what there is")
    add("--devices", type=int, default=1, help="processes of a node; 1")
    add("--num_nodes", type=int, default=1, help="nodes; 1")
    return parser
