"""The command `vlightning data`."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...callbacks.figures.grid import draw_sheet, missing_glyphs
from ...common.absent_network import leave_out_networks
from ...common.errors import UserError
from ...common.files import replacing
from ...datamodules.pairs.datamodule import PairDataModule
from ...datamodules.pairs.rows import CaptionRows
from ..cli.command_parser import CommandParser
from ..plan.configuration import build, build_without_weights, parse_fit
from .counts import Counts, count_split, lines_of, shared_images
from .reading import STREAMED, read_split
from .sheet import samples_of


def run_data(words: list[str]) -> str:
    """Run `vlightning data`, and return the report.

    Raises:
        UserError: If an argument is wrong, or the data cannot be opened.
    """
    typed, others = parser_of_data().parse_known_args(words)
    if typed.limit is not None and typed.limit < 1:
        raise UserError(f"Expected at least one image after --limit, got {typed.limit}: increase it.")
    data = open_data([*(f"--config={config}" for config in typed.config), *others])
    return report(data, Path(typed.out), typed.limit)


def parser_of_data() -> CommandParser:
    """Return the parser of the arguments after `data`."""
    parser = CommandParser(
        "data",
        description="Count the images and texts of a `vlightning fit` with the same configs, its duplicates, and what "
        "cannot be read, without training; and draw training samples as the model will see them. Other options of "
        "`vlightning fit`, such as --data.train pairs.csv, work too. All images are read and decoded once.",
    )
    parser.add_argument("--config", action="append", default=[], help="a config; may be repeated")
    parser.add_argument(
        "--limit",
        type=int,
        help=f"read at most this many images of a split, evenly spaced; of a stream the first rows, {STREAMED} without "
        "this option",
    )
    parser.add_argument("--out", default="data_report", help="folder of report.json and samples.png; data_report")
    return parser


def open_data(words: list[str]) -> PairDataModule:
    """Parse the arguments of a fit, and open the data as the fit does, with the preprocessing that its model expects.

    Raises:
        UserError: As `vlightning fit`, or if the data are no images with texts.
    """
    cli = parse_fit(words)
    if not (cli.config["fit"].get("data") or {}).get("class_path"):
        raise UserError("Expected data in the configs, got none: add --config with your data, or --data.train.")
    data = build(cli, "data")
    if not isinstance(data, PairDataModule):
        raise UserError(
            f"Expected a datamodule of images with texts, such as ImageTextDataModule, got {type(data).__name__}: give "
            "one of these."
        )
    leave_out_networks(cli.config["fit"]["model"]["init_args"])
    return opened(data, build_without_weights(cli))


def opened(data: PairDataModule, module: Any) -> PairDataModule:
    """Set up a datamodule for fitting without a Trainer.

    Of the module, only the expected preprocessing, tokenizer and prefix of texts are read.
    """
    read: dict[str, Any] = {"expected_preprocessing": getattr(module, "expected_preprocessing", dict)}
    read |= {name: getattr(module, name) for name in ("expected_tokenizer", "text_prefix") if hasattr(module, name)}
    trainer: Any = SimpleNamespace(
        lightning_module=SimpleNamespace(**read),
        state=SimpleNamespace(fn="fit", status=None),
        distributed_sampler_kwargs=None,
    )
    data.trainer = trainer
    data.pin_memory = False
    data.max_bad_share = 1.0
    data.prepare_data()
    data.setup("fit")
    return data


def report(data: PairDataModule, folder: Path, limit: int | None = None) -> str:
    """Count the splits of a fit, write `report.json` and `samples.png`, and return the report as text."""
    splits: dict[str, Any] = {}
    counts: dict[str, Counts] = {}
    encoder = data.encoder()
    size = getattr(data, "image_size", None)
    for split in ("train", "validation"):
        if (rows := data.opened_rows(split)) is None:
            continue
        reading = read_split(rows, limit, data.num_workers, data.decoder)
        splits[split], counts[split] = count_split(reading, encoder, size)
    if sources := _sources(data):
        splits["train"]["sources"] = sources
    if "validation" in counts:
        splits["validation"]["also_in_train"] = shared_images(counts["validation"], counts["train"].hashes)
    lines = [line for split, content in splits.items() for line in lines_of(split, content)]
    with replacing(folder / "report.json") as staged:
        staged.write_text(json.dumps(splits, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    samples = samples_of(data)
    with replacing(folder / "samples.png") as staged, missing_glyphs():
        draw_sheet(samples).savefig(staged, format="png", dpi=120)
    lines.append(f"{folder / 'report.json'}: these counts; {folder / 'samples.png'}: {len(samples)} training samples")
    return "\n".join(lines)


def _sources(data: PairDataModule) -> list[dict[str, Any]]:
    """Return rows, and rows in an epoch, of each of several training sources; empty for one, and for streams."""
    rows: Any = data.opened_rows("train")
    table = rows.table if isinstance(rows, CaptionRows) else rows
    layouts = getattr(table, "layouts", [])
    mix = data.epoch_mix(rows)
    if len(layouts) < 2 or len(layouts) != len(mix.sizes):
        return []
    return [
        {"source": layout.origin, "rows": size, "epoch": count}
        for layout, size, count in zip(layouts, mix.sizes, mix.counts, strict=True)
    ]
