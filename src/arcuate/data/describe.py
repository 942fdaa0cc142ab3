"""List the contents of an HDF5, NWB or MATLAB file, and guess a mapping for `arcuate prepare --layout nwb`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import yaml
from scipy.io import whosmat

from arcuate.data.readers.hdf5 import has_entry
from arcuate.data.readers.nwb import NwbMapping, open_path
from arcuate.data.readers.process import call_watched
from arcuate.data.readers.source import FILE_ERRORS, UnreadableFile, summarise_error
from arcuate.errors import UserError, check_resources

_MAX_ENTRIES = 2000
_MAX_DEPTH = 12
_TEXT_COLUMNS = ("cue", "sentence", "transcript", "text", "transcription", "prompt", "label")
_BLOCK_COLUMNS = ("block_num", "block", "block_number", "block_id", "blocks")
_HANDWRITING = (">", "~")
_SCHEMAS = "specifications"  # group of an NWB file that describes the format itself
_CROSSINGS = ("crossing", "spike_count", "binned_spike", "spikes", "tx")  # names of features, crossings before power
_POWER = ("power", "sbp")


@dataclass(frozen=True)
class FileEntry:
    """One array or group of a file."""

    path: str
    kind: str  # group, or the type of the values
    shape: tuple[int, ...] | None  # None for a group


@dataclass(frozen=True)
class FileDescription:
    """Contents of a file, and a mapping if one can be guessed."""

    path: Path
    entries: tuple[FileEntry, ...]
    mapping: NwbMapping | None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        entries = [
            {"path": e.path, "kind": e.kind, "shape": None if e.shape is None else list(e.shape)} for e in self.entries
        ]
        mapping = None if self.mapping is None else self.mapping.model_dump(mode="json")
        return {"file": str(self.path), "entries": entries, "mapping": mapping, "notes": list(self.notes)}

    def mapping_text(self) -> str:
        """The mapping as YAML with a comment on every entry, to save and edit."""
        if self.mapping is None:
            return ""
        lines = []
        for name, value in self.mapping.model_dump(mode="json").items():
            line = yaml.safe_dump({name: value}, default_flow_style=True, allow_unicode=True, width=1000).strip()
            meaning = NwbMapping.model_fields[name].description
            lines.append(f"{line.removeprefix('{').removesuffix('}')}  # {meaning}")
        return "\n".join(lines) + "\n"


def describe_file(path: str | Path) -> FileDescription:
    """List the contents of an HDF5, NWB or MATLAB file in a watched child process; nothing in it is executed."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} is not a file; give one recording, not a folder")
    try:
        return call_watched(_describe, path)
    except UnreadableFile as error:
        raise UserError(f"{path}: {error}") from error


def _describe(path: Path) -> FileDescription:
    if path.suffix.lower() == ".mat" and not _is_hdf5(path):
        return _describe_mat(path)
    try:
        with h5py.File(path, "r") as data:
            entries = tuple(_list_entries(data, "", 0, [0]))
            mapping, notes = _guess_mapping(data, entries)
    except FILE_ERRORS as error:
        check_resources(error, path)
        raise UserError(f"{path} cannot be read as HDF5, NWB or MATLAB: {summarise_error(error)}") from error
    return FileDescription(path, entries, mapping, tuple(notes))


def _is_hdf5(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\x89HDF" in file.read(1024)


def _describe_mat(path: Path) -> FileDescription:
    try:
        found = whosmat(path)
    except (*FILE_ERRORS, NotImplementedError) as error:
        raise UserError(f"{path} cannot be read as MATLAB: {summarise_error(error)}") from error
    entries = tuple(FileEntry(str(name), str(kind), tuple(shape)) for name, shape, kind in found[:_MAX_ENTRIES])
    names = {entry.path for entry in entries}
    notes = []
    if {"tx_feats", "sentences", "blocks"} <= names:
        notes.append("this is a CORP file; read its folder with: arcuate prepare FOLDER STORE --layout corp")
    if {"tx1", "spikePow", "sentenceText"} <= names:
        notes.append("this is a Brain-to-Text '24 file; read the folder above it with: arcuate prepare FOLDER STORE")
    return FileDescription(path, entries, None, tuple(notes))


def _list_entries(group: h5py.Group, prefix: str, depth: int, count: list[int]) -> Iterator[FileEntry]:
    for encoded in group.id:
        name = encoded.decode("utf-8", errors="replace")
        count[0] += 1
        if count[0] > _MAX_ENTRIES:
            return
        path = f"{prefix}{name}"
        if not has_entry(group, name) or group.id.links.get_info(encoded).type != h5py.h5l.TYPE_HARD:
            yield FileEntry(path, "link", None)
            continue
        item = group[name]
        if isinstance(item, h5py.Group):
            yield FileEntry(path, str(_attribute_text(item)), None)
            if depth < _MAX_DEPTH and path != _SCHEMAS:
                yield from _list_entries(item, f"{path}/", depth + 1, count)
        elif isinstance(item, h5py.Dataset):
            kind = "text" if h5py.check_string_dtype(item.dtype) else str(item.dtype)
            yield FileEntry(path, kind, None if item.shape is None else tuple(item.shape))


def _attribute_text(group: h5py.Group) -> str:
    kind = group.attrs.get("neurodata_type", "group")
    return kind.decode("utf-8", "replace") if isinstance(kind, bytes) else str(kind)


def _guess_mapping(data: h5py.File, entries: tuple[FileEntry, ...]) -> tuple[NwbMapping | None, list[str]]:
    """A mapping of an NWB file: the time series in bins, else units, and likely columns.

    Time series named like threshold crossings or power are joined if they have the same number of bins as the widest of
    them. If there are no such names, the widest time series is used.
    """
    notes: list[str] = []
    shapes = {entry.path: entry.shape for entry in entries}
    kinds = {entry.path: entry.kind for entry in entries}
    tables = [path for path in ("intervals/trials", "trials") if f"{path}/start_time" in shapes]
    if not tables:
        return None, ["no trials table (intervals/trials with start_time) was found, so no mapping can be suggested"]
    columns = [path.rpartition("/")[2] for path in shapes if path.rpartition("/")[0] == tables[0]]
    series = [p[: -len("/data")] for p, s in shapes.items() if p.endswith("/data") and s is not None and len(s) == 2]
    series = [p for p in series if kinds[f"{p}/data"][:1] in "fiu" and (shapes[f"{p}/data"] or (0,))[0] > 0]
    sizes = {p: shapes[f"{p}/data"] or (0, 0) for p in series}
    named = sorted((p for p in series if _feature_rank(p) is not None), key=lambda p: (_feature_rank(p), p))
    widest = max(named or series, key=lambda p: sizes[p][1], default=None)
    bins = tuple(p for p in named or series if p == widest or (named and widest and sizes[p][0] == sizes[widest][0]))
    units = "units" if "units/spike_times" in shapes else None
    if widest is None and units is None:
        return None, ["neither a time series (bins, channels) nor a table of units was found"]
    if others := [p for p in series if p not in bins]:
        notes.append(f"other time series, which `bins` could list as well: {', '.join(others)}")
    text = next((name for name in _TEXT_COLUMNS if name in columns), None)
    if text is None:
        notes.append(f"none of the columns {', '.join(columns)} was recognised as the sentence")
    block = next((name for name in _BLOCK_COLUMNS if name in columns), None)
    sample = _first_text(data, f"{tables[0]}/{text}") if text else ""
    handwriting = any(mark in sample for mark in _HANDWRITING)
    mapping = NwbMapping(
        bins=bins,
        units=units if widest is None else None,
        mask="acquisition/eval_mask" if "acquisition/eval_mask/data" in shapes else None,
        trials=tables[0],
        text=text,
        tokens="tokens" if {"tokens", "tokens_index"} <= set(columns) else None,
        block=block,
        **{name: name for name in ("split", "number", "corpus", "mode") if name in columns},
        targets="characters" if handwriting else "phonemes",
        space=">" if handwriting else " ",
    )
    return mapping, notes


def _feature_rank(path: str) -> int | None:
    """0 for a name like threshold crossings, 1 for one like power, None for another."""
    name = path.rpartition("/")[2].lower()
    return next((rank for rank, parts in enumerate((_CROSSINGS, _POWER)) if any(p in name for p in parts)), None)


def _first_text(data: h5py.File, path: str) -> str:
    column: Any = open_path(data, path)
    if not isinstance(column, h5py.Dataset) or column.ndim != 1 or not column.shape[0]:
        return ""
    value = column[0]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
