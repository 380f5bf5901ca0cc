"""Random access to WebDataset shards: where each sample stands in its tar file, and its members on request.

A tar file has no table of contents, so its headers are read once and the places kept in a cache. From then on a sample
is one read, in any order: no copy of the data, and no stream whose position would have to be restored.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import logging
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...common.files import replacing
from ..core.decode import BadSample, read_regular
from .records import TAR_ERRORS

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"  # beside shards that were reinforced here
_BLOCK = 512  # tar's unit, bytes
_INDEX_VERSION = 1
_LONGEST_UID = 1024  # they are kept in an array of fixed width
STALE = "another sample than the index says"

Arrays = dict[str, np.ndarray]


class TarIndex(NamedTuple):
    """Where the samples of a shard are, in their order."""

    start: np.ndarray  # int64 [N], byte of the first header
    stop: np.ndarray  # int64 [N], byte after the last member
    keys: np.ndarray  # bytes [N], what the members' names begin with


def find_shards(sources: Sequence[str]) -> list[str]:
    """Tar files of files, glob patterns and folders, absolute, in the order of the sources and of their names.

    Raises:
        ValueError: a source gives none.
    """
    files: list[str] = []
    for source in sources:
        path = os.path.expanduser(source)
        if os.path.isdir(path):
            found = sorted(str(file) for file in Path(path).rglob("*.tar"))
        else:
            found = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else [path]
        if not found or not all(os.path.isfile(file) for file in found):
            raise ValueError(f"found no tar file under {source!r}, expected shards: correct the path or the pattern")
        files += [os.path.abspath(file) for file in found]
    return files


def teachers_of(shards: Sequence[str]) -> dict[str, Any] | None:
    """Who reinforced shards, by `manifest.json` in their folders.

    Args:
        shards: absolute paths.

    Returns:
        Width (``dims``) and scale (``scales``) of each teacher, and the manifest's path (``source``); None without one.

    Raises:
        ValueError: a manifest cannot be read, or several differ.
    """
    found: list[dict[str, Any]] = []
    for folder in dict.fromkeys(Path(shard).parent for shard in shards):
        path = folder / MANIFEST
        if not path.is_file():
            continue
        try:
            teachers = json.loads(path.read_text(encoding="utf-8"))["teachers"]
            dims, scales = ([kind(one[name]) for one in teachers] for name, kind in (("width", int), ("scale", float)))
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"found no width and scale of teachers in {str(path)!r} ({error}), expected what the reinforcement "
                "wrote: get the file again, or remove it and set model.teacher.dims and model.teacher.scales"
            ) from None
        found.append({"dims": dims, "scales": scales, "source": repr(str(path))})
        if (dims, scales) != (found[0]["dims"], found[0]["scales"]):
            raise ValueError(
                f"found teachers {dims} wide with scales {scales} by {str(path)!r}, expected those of "
                f"{found[0]['source']}: train on shards that were reinforced by the same teachers"
            )
    return found[0] if found else None


def tar_index(file: str, cache: Path) -> TarIndex:
    """The index of a shard: the one beside it, or from the cache if the file has not changed, else made and put there.

    One that stands beside may come with the shard from elsewhere, so it is not judged by times but by what it says:
    some samples are looked for here, and :func:`read_members` checks each one that is read.

    Args:
        file: absolute path.
        cache: folder for indexes.

    Raises:
        ValueError: the file is no tar file, ends too early, or is damaged in the middle.
    """
    beside = _index_beside(file)
    return beside or TarIndex(**cached_arrays(file, cache, "index", lambda: _read_index(file)._asdict()))


def index_cache(cache_dir: str | None) -> Path:
    """Where the places of samples in shards are kept."""
    if cache_dir is not None:
        return Path(os.path.expanduser(cache_dir)).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vlightning"


def index_beside(path: Path) -> Path:
    """Where the writer of a shard puts its index."""
    return path.with_name(f"{path.stem}.index.json")


def _index_beside(file: str) -> TarIndex | None:
    """The index that the writer of a shard has put beside it; None if there is none, or it is of another file."""
    try:
        kept = json.loads(index_beside(Path(file)).read_bytes())
        size = os.path.getsize(file)
        if kept["bytes"] != size:
            return None
        start, stop = (np.array(kept[name], np.int64) for name in ("start", "stop"))
        index = TarIndex(start, stop, np.array([os.fsencode(key) for key in kept["keys"]], np.bytes_))
        return index if _is_of(index, file, size) else None
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None


def _is_of(index: TarIndex, file: str, size: int) -> bool:
    """Whether an index can be a shard's: its places are inside, and at some of them is what it says."""
    start, stop, keys = index
    if not start.shape == stop.shape == keys.shape == (len(keys),):
        return False
    if not len(keys):
        return True
    if (start < 0).any() or (stop <= start).any() or (start[1:] < stop[:-1]).any() or stop[-1] > size:
        return False
    with open(file, "rb") as content:
        for place in {0, len(keys) // 2, len(keys) - 1}:
            content.seek(int(start[place]))
            if _stem(content.read(_BLOCK)) != keys[place]:
                return False
    return True


def tar_uids(file: str, index: TarIndex, cache: Path) -> np.ndarray:
    """The entry ``uid`` of each sample's ``json``, bytes [N], empty where there is none; cached like the index."""

    def read() -> Arrays:
        spans = zip(index.start.tolist(), index.stop.tolist(), index.keys.tolist(), strict=True)
        return {"uids": np.array([uid(*span) for span in spans], np.bytes_)}

    def uid(start: int, stop: int, key: bytes) -> bytes:
        try:
            return uid_of(read_members(file, start, stop, file, key)).encode(errors="surrogatepass")
        except BadSample:
            return b""  # it is counted when it is read

    return cached_arrays(file, cache, "uids", read)["uids"]


def cached_arrays(file: str, cache: Path, what: str, make: Callable[[], Arrays]) -> Arrays:
    """Arrays made of a file, kept for as long as it does not change.

    Args:
        file: absolute path.
        cache: folder to keep them in.
        what: tells the several arrays of a file apart, also in messages.
        make: makes them.
    """
    state = os.stat(file)
    stamp = hashlib.sha1(f"{_INDEX_VERSION}\0{file}\0{state.st_mtime_ns}\0{state.st_size}\0{what}".encode()).hexdigest()
    kept = cache / f"{stamp}.npz"
    try:
        with np.load(kept, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        pass
    made = make()
    try:
        with replacing(kept) as staged, open(staged, "wb") as content:
            np.savez(content, **made)  # type: ignore[arg-type]
    except OSError as error:  # the next run makes them again
        log.warning("the %s of %s was not kept (%s)", what, file, error)
    return made


def _read_index(file: str) -> TarIndex:
    starts: list[int] = []
    stops: list[int] = []
    keys: list[bytes] = []
    for key, start, stop in _members(file):
        if keys and keys[-1] == key:
            stops[-1] = stop
        else:
            keys.append(key)
            starts.append(start)
            stops.append(stop)
    return TarIndex(np.array(starts, np.int64), np.array(stops, np.int64), np.array(keys, np.bytes_))


def _members(file: str) -> Iterator[tuple[bytes, int, int]]:
    """Sample, first byte and byte after the end of each member."""
    size = os.path.getsize(file)
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                stop = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
                if member.offset_data + member.size > size:
                    raise tarfile.ReadError("it ends too early")
                stem = split_name(member.name)
                if member.isfile() and stem is not None:
                    yield os.fsencode(stem[0]), member.offset, stop  # names need not be UTF-8
            end = tar.offset
        with open(file, "rb") as content:
            # The library takes a damaged header for the end of the archive.
            content.seek(end)
            if content.read(_BLOCK).strip(b"\0"):
                raise tarfile.ReadError(f"a damaged header at byte {end}")
    except TAR_ERRORS as error:
        raise ValueError(f"found no readable tar file in {file!r} ({error}), expected a shard: copy it anew") from error


def split_name(name: str) -> tuple[str, str] | None:
    """A member's name as sample and kind, such as ``("00/12", "syn.json")``; None where it is of no sample."""
    folder, slash, base = name.rpartition("/")
    stem, dot, kind = base.partition(".")
    return (f"{folder}{slash}{stem}", kind.lower()) if stem and dot else None


def read_members(file: str, start: int, stop: int, name: str, key: bytes) -> dict[str, bytes]:
    """The members of a sample by kind, such as ``jpg`` and ``syn.json``.

    Args:
        file: the shard.
        start: first byte.
        stop: byte after the last.
        name: what messages call the sample.
        key: what the names of its members begin with.

    Raises:
        BadSample: the file has changed, or cannot be read.
    """
    try:
        with open(file, "rb") as content:
            content.seek(start)
            block = content.read(stop - start)
        found = _plain_members(block)
        if found is None:
            found = []
            with tarfile.open(fileobj=io.BytesIO(block), mode="r:") as tar:
                for member in tar:
                    stem = split_name(member.name)
                    if member.isfile() and stem is not None:
                        data = block[member.offset_data : member.offset_data + member.size]
                        found.append((os.fsencode(stem[0]), stem[1], data))
    except (OSError, MemoryError, *TAR_ERRORS):
        raise BadSample("unreadable shard", name) from None
    if {stem for stem, _, _ in found} != {key}:  # the shard was replaced by one of equal size
        raise BadSample(STALE, name)
    return {kind: content for _, kind, content in found}


def _plain_members(block: bytes) -> list[tuple[bytes, str, bytes]] | None:
    """The same of a block of plain files with names and sizes in their own headers; None where there is anything else.

    (The library's reader takes half a millisecond for a sample, an eighth of what decoding the image takes.)
    """
    members: list[tuple[bytes, str, bytes]] = []
    place = 0
    while place < len(block):
        header = block[place : place + _BLOCK]
        try:
            size, total = int(header[124:135], 8), int(header[148:154], 8)
        except ValueError:
            return None
        if header[156:157] not in (b"0", b"\0") or total != sum(header) - sum(header[148:156]) + 8 * 32:
            return None
        stem = split_name(_name_in(header))
        start = place + _BLOCK
        place = start + -(-size // _BLOCK) * _BLOCK
        if stem is None or place > len(block):
            return None
        members.append((os.fsencode(stem[0]), stem[1], block[start : start + size]))
    return members


def _name_in(header: bytes) -> str:
    """The name of a plain file by its own header."""
    name, prefix = (part.partition(b"\0")[0] for part in (header[:100], header[345:500]))
    return os.fsdecode(prefix + b"/" + name if prefix else name)


def _stem(header: bytes) -> bytes:
    """What the name in a header begins with, empty where it is of no sample."""
    stem = split_name(_name_in(header))
    return os.fsencode(stem[0]) if stem is not None else b""


class Shards:
    """Samples of tar files, one after another.

    Args:
        files: absolute paths.
        cache: folder for indexes.
    """

    def __init__(self, files: Sequence[str], cache: Path) -> None:
        self.files = list(files)
        self.indexes = [tar_index(file, cache) for file in self.files]
        self.first = np.cumsum([0, *(len(index.start) for index in self.indexes)])

    def __len__(self) -> int:
        return int(self.first[-1])

    def locate(self, sample: int) -> tuple[int, int]:
        """Number of the shard, and place in it."""
        shard = int(np.searchsorted(self.first, sample, side="right")) - 1
        return shard, sample - int(self.first[shard])

    def key(self, sample: int) -> str:
        """What the names of a sample's members begin with."""
        shard, place = self.locate(sample)
        return os.fsdecode(bytes(self.indexes[shard].keys[place]))

    def name(self, sample: int) -> str:
        """What messages call a sample."""
        return f"{self.files[self.locate(sample)[0]]}, {self.key(sample)}"

    def members(self, sample: int) -> dict[str, bytes]:
        """The members of a sample; raises :class:`BadSample`."""
        shard, place = self.locate(sample)
        index = self.indexes[shard]
        span = int(index.start[place]), int(index.stop[place])
        return read_members(self.files[shard], *span, self.name(sample), bytes(index.keys[place]))


class BesideShards:
    """Images that stand beside the shards: in tar files of the same names, or in files.

    An image belongs to a sample whose key it has, or whose ``uid``. A ``uid`` that leads out of the folder finds none.

    Args:
        folder: of tar files with the names of the shards, or of files ``<key>.jpg`` or ``<shard>/<key>.jpg``.
        shards: the shards.
        cache: folder for indexes.
        suffixes: what images may end with.
    """

    def __init__(self, folder: str, shards: Shards, cache: Path, suffixes: Sequence[str]) -> None:
        self.folder = Path(os.path.abspath(os.path.expanduser(folder)))
        if not self.folder.is_dir():
            raise ValueError(f"found no folder {folder!r}, expected that of the images: correct data.images")
        self.shards = shards
        self.suffixes = suffixes
        self.cache = cache
        tars = {file.name: str(file) for file in sorted(self.folder.rglob("*.tar"))}
        names = [Path(file).name for file in shards.files]
        missing = [name for name in names if name not in tars]
        self.tars: list[Shards] | None = None
        if tars and missing:
            raise ValueError(
                f"found {len(tars)} tar files in {folder!r} but no {missing[0]!r} among them, expected one for each of "
                f"the {len(names)} shards: complete the images, or name the shards that have some in data.train"
            )
        if tars:
            self.tars = [Shards([tars[name]], cache) for name in names]
            self.places = [self._places(number, images) for number, images in enumerate(self.tars)]

    def _places(self, number: int, images: Shards) -> np.ndarray:
        """For each sample of a shard, its place in the tar file of the images, -1 where it has none."""
        wanted = self.shards.indexes[number].keys
        places = _lookup(wanted, images.indexes[0].keys)
        if len(wanted) and (places < 0).all():
            # Keys that are running numbers of each file have nothing to do with each other.
            uids = tar_uids(self.shards.files[number], self.shards.indexes[number], self.cache)
            others = tar_uids(images.files[0], images.indexes[0], self.cache)
            places = np.where(uids == b"", -1, _lookup(uids, others))
        return places

    def members(self, sample: int, key: str, uid: str) -> dict[str, bytes]:
        """The members that stand beside a sample, none where there is no such image; raises :class:`BadSample`."""
        shard, place = self.shards.locate(sample)
        if self.tars is not None:
            other = int(self.places[shard][place])
            return self.tars[shard].members(other) if other >= 0 else {}
        stem = Path(self.shards.files[shard]).stem
        for name in dict.fromkeys(name for name in (key, uid) if name):
            # Shards that were downloaded may say anything, such as "../../home/me/photo" or an absolute path.
            if not Path(os.path.normpath(self.folder / name)).is_relative_to(self.folder) or ".." in Path(name).parts:
                continue
            for base in (self.folder / name, self.folder / stem / name):
                for suffix in self.suffixes:
                    if (image := base.parent / f"{base.name}{suffix}").is_file():
                        kinds = {suffix.removeprefix("."): image}
                        kinds |= {kind: base.parent / f"{base.name}.{kind}" for kind in ("txt", "json")}
                        return {kind: read_regular(file, str(file)) for kind, file in kinds.items() if file.is_file()}
        return {}


def uid_of(members: dict[str, bytes]) -> str:
    """The entry ``uid`` of a sample's ``json``, empty where there is none or where it is none."""
    uid = json_of(members, "json").get("uid")
    return str(uid) if isinstance(uid, (str, int)) and len(str(uid)) <= _LONGEST_UID else ""


def json_of(members: dict[str, bytes], kind: str) -> dict[str, object]:
    """What a member says, empty where there is none or where it is no JSON object."""
    try:
        value = json.loads(members.get(kind, b"{}"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _lookup(wanted: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Where each of the wanted keys stands among those present, -1 where it does not."""
    if not len(present) or not len(wanted):
        return np.full(len(wanted), -1)
    order = np.argsort(present, kind="stable")
    at = np.minimum(np.searchsorted(present, wanted, sorter=order), len(present) - 1)
    places = order[at]
    return np.where(present[places] == wanted, places, -1)
