"""Download of sets from the Hugging Face hub into the root folder."""

import ast
import csv
import json
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path

from ..common.errors import UserError
from ..common.files import replacing
from ..common.messages import say
from ..datamodules.sources.hub import hub_is_reachable, reason_refused
from .image_sets import is_complete
from .row_sets import find_table
from .tasks import Task


def download(tasks: Sequence[Task], root: Path) -> None:
    """Download the sets that a folder lacks; those that the hub does not give are named, and the others evaluated.

    Raises:
        UserError: If sets are missing and the hub cannot be reached.
    """
    missing = [task for task in tasks if not _is_here(task, root)]
    if missing and not hub_is_reachable():
        raise UserError(
            f"Expected the Hugging Face hub for the {len(missing)} sets that {str(root)!r} lacks, got no connection: "
            "put them there, or leave --download out."
        )
    for number, task in enumerate(missing, start=1):
        say(f"Download {number} of {len(missing)}: {task.hub_name}")
        if why := _download(task, root / task.folder):
            say(
                f"Expected the data set {task.hub_name} of {task.key} on the hub, got none ({why}): put the set into "
                f"{str(root / task.folder)!r}."
            )


def _is_here(task: Task, root: Path) -> bool:
    if task.kind in ("classification", "attributes"):
        return is_complete(root / task.folder)  # a download that was stopped goes on
    return find_table(root, task.folder) is not None


def _download(task: Task, folder: Path) -> str | None:
    """Download a set; return why there is none."""
    from huggingface_hub import snapshot_download

    fresh = folder if task.kind in ("classification", "attributes") else folder.with_name(f"{folder.name}.download")
    try:
        snapshot_download(task.hub_name, repo_type="dataset", local_dir=fresh)
    except Exception as error:  # of the HTTP library, whose types depend on the version
        return reason_refused(error, "data set")
    if fresh != folder:
        shutil.rmtree(fresh / ".cache", ignore_errors=True)  # JSON files of the hub's library, which are no table
        unpack_table(fresh)
        fresh.rename(folder)
    return None


def unpack_table(folder: Path) -> None:
    """Turn a table of CSV and zip files into `<folder>.jsonl` and `images/`; other folders stay as they are.

    Flickr, MSCOCO and WinoGAViL are so on the hub. Lists in cells are written as Python or JSON.

    Raises:
        UserError: If the CSV file has other columns.
    """
    tables, archives = sorted(folder.glob("*.csv")), sorted(folder.glob("*.zip"))
    if not tables or not archives or any(folder.rglob("*.parquet")):
        return
    with tables[0].open(newline="", encoding="utf-8") as content:
        rows = [_row(row, tables[0]) for row in csv.DictReader(content)]
    (folder / "images").mkdir(exist_ok=True)
    for archive in archives:
        with zipfile.ZipFile(archive) as packed:
            for member in packed.infolist():
                # Without its folders, which a name could leave this one by.
                name = Path(member.filename).name
                if not member.is_dir() and not name.startswith("."):
                    with packed.open(member) as source, (folder / "images" / name).open("wb") as target:
                        shutil.copyfileobj(source, target)
    with replacing(folder / f"{folder.name.removesuffix('.download')}.jsonl") as staged:
        staged.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    for file in (*tables, *archives):
        file.unlink()


def _row(row: dict[str, str], file: Path) -> dict[str, object]:
    if {"cue", "candidates", "associations"} <= row.keys():
        return {"cue": row["cue"], **{name: _listed(row[name]) for name in ("candidates", "associations")}}
    if {"filename", "raw"} <= row.keys():
        return {"image": f"images/{Path(row['filename']).name}", "caption": _listed(row["raw"])}
    raise UserError(
        f"Expected columns filename and raw, or cue, candidates and associations in {str(file)!r}, got "
        f"{', '.join(row)}: write the rows as JSON lines."
    )


def _listed(cell: str) -> list[str]:
    try:
        found = json.loads(cell)
    except ValueError:
        found = ast.literal_eval(cell)
    return [str(part) for part in found]
