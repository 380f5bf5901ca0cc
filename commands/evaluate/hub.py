"""Download of sets from the Hugging Face hub into the root folder."""

import ast
import json
import shutil
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from ...common.errors import UserError
from ...common.files import replacing
from ...common.hub import hub_is_reachable, reason_refused
from ...common.messages import say
from ...datamodules.base.faults import BadSample
from ...datamodules.reading.csv_rows import read_csv
from .image_sets import is_complete
from .row_sets import find_table
from .tasks import Task

_MOST_UNPACKED = 20
"""Largest ratio of the sizes of unpacked and packed images: those of JPEG and PNG do not shrink, bitmaps do."""


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
        UserError: If the CSV file has other columns or a row that cannot be read, or an archive cannot be unpacked.
    """
    tables = sorted(folder.glob("*.csv"))
    archives = sorted(folder.glob("*.zip"))
    if not tables or not archives or any(folder.rglob("*.parquet")):
        return
    with tables[0].open(newline="", encoding="utf-8") as content:
        rows = [_row(read, number, tables[0]) for number, read in enumerate(read_csv(content, str(tables[0])), 1)]
    (folder / "images").mkdir(exist_ok=True)
    unpacked: dict[str, tuple[int, int]] = {}
    for archive in archives:
        try:
            _unpack(archive, folder / "images", unpacked)
        except (zipfile.BadZipFile, EOFError, zlib.error, NotImplementedError, RuntimeError) as error:
            raise UserError(
                f"Expected a zip file of images, got {str(archive)!r}, which cannot be unpacked ({error}): remove it, "
                "and download the set again."
            ) from error
    with replacing(folder / f"{folder.name.removesuffix('.download')}.jsonl") as staged:
        staged.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    for file in (*tables, *archives):
        file.unlink()


def _unpack(archive: Path, folder: Path, unpacked: dict[str, tuple[int, int]]) -> None:
    """Unpack the files of an archive into a folder, without their own folders, which a name could leave this one by.

    Raises:
        UserError: If the files are larger than images in a zip file can be, or two of a name differ.
    """
    with zipfile.ZipFile(archive) as packed:
        files = [member for member in packed.infolist() if not member.is_dir()]
        size = sum(member.file_size for member in files)  # more than this is not read, whatever is packed
        limit = _MOST_UNPACKED * archive.stat().st_size
        if size > limit:
            raise UserError(
                f"Expected at most {limit:,} bytes of images in {str(archive)!r}, got {size:,}: the archive is no set "
                "of images; do not use it."
            )
        for member in files:
            name = Path(member.filename).name
            if name.startswith("."):
                continue
            content = member.CRC, member.file_size
            if unpacked.setdefault(name, content) != content:
                raise UserError(
                    f"Expected one image of each name, got different ones of the name {name!r} in {str(archive)!r} and "
                    "before: give the images of the set names of their own."
                )
            with packed.open(member) as source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target)


def _row(read: Callable[[], dict[str | None, str]], number: int, file: Path) -> dict[str, object]:
    """Return one row of a table of the hub.

    Raises:
        UserError: If the row cannot be read: metrics of a set with fewer rows are not comparable.
    """
    try:
        return _columns(read(), file)
    except (BadSample, ValueError, SyntaxError, TypeError) as error:  # the last three of a cell that is no list
        cause = error.fault.cause if isinstance(error, BadSample) else error
        raise UserError(
            f"Expected row {number} of {str(file)!r} to be whole, got one that cannot be read ({cause}): remove the "
            "file, and download the set again."
        ) from error


def _columns(row: dict[str | None, str], file: Path) -> dict[str, object]:
    if {"cue", "candidates", "associations"} <= row.keys():
        return {"cue": row["cue"], **{name: _listed(row[name]) for name in ("candidates", "associations")}}
    if {"filename", "raw"} <= row.keys():
        return {"image": f"images/{Path(row['filename']).name}", "caption": _listed(row["raw"])}
    raise UserError(
        f"Expected columns filename and raw, or cue, candidates and associations in {str(file)!r}, got "
        f"{', '.join(map(str, row))}: write the rows as JSON lines."
    )


def _listed(cell: str) -> list[str]:
    try:
        values = json.loads(cell)
    except ValueError:
        values = ast.literal_eval(cell)
    return [str(value) for value in values]
