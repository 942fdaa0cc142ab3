"""`read_logs`: open a run folder, a folder with a log, or a log file.

The format is detected from the content: the first row of `FORMATS` that matches and yields a series is used, so a
format that only looks right falls through to the next.
"""

import csv
import io
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from arcuate.doctor.columns import METRICS, parse_name, parse_number
from arcuate.doctor.log_table import LogTable, TrainingLog
from arcuate.doctor.printed import is_document, read_printed
from arcuate.errors import UserError
from arcuate.hub import local_path
from arcuate.progress import logger

_BLOCK = 1 << 20  # characters
_LONGEST_LINE = 1 << 26  # characters
_HEAD = 1 << 16  # bytes that determine the format
_MAX_DAMAGE = 0.1  # fraction of damaged bytes up to which a file is still treated as text
_MAX_FILES = 200  # files of a folder that are considered
_OTHER_FORMATS = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"PK\x03\x04": "a zip archive or a PyTorch file",
    b"\x1f\x8b": "a compressed file; decompress it first",
    b"BZh": "a compressed file; decompress it first",
    b"\xfd7zXZ": "a compressed file; decompress it first",
    b"%PDF": "a PDF file",
    b"\x89HDF": "an HDF5 file",
    b":W&B": "a binary Weights & Biases log; export its history as CSV or JSON lines",
}


@dataclass(frozen=True)
class LogFile:
    """The runs found at a path, and how they were read."""

    name: str
    source: str
    logs: tuple[TrainingLog, ...]
    notes: tuple[str, ...] = ()


class Head(NamedTuple):
    """The start of a file."""

    path: Path
    data: bytes
    encoding: str | None  # None for binary data
    lines: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: Path) -> "Head":
        try:
            with path.open("rb") as file:
                data = file.read(_HEAD)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
        encoding = _encoding(data)
        text = "" if encoding is None else data.decode(encoding, errors="replace")
        return cls(path, data, encoding, tuple(text.splitlines()))

    @property
    def filled(self) -> list[str]:
        return [line.strip() for line in self.lines if line.strip()]

    def blocks(self) -> Iterator[list[str]]:
        """Blocks of lines of the whole file; the last line may be incomplete."""
        rest = ""
        with self.path.open("rb") as raw:
            text = io.TextIOWrapper(io.BufferedReader(raw, _BLOCK), encoding=self.encoding, errors="replace")
            while block := text.read(_BLOCK):
                rest += block.replace("\0", "")
                if len(rest) > _LONGEST_LINE and "\n" not in rest:
                    raise UserError(
                        f"{self.path} is not a log: it has a line of more than {_LONGEST_LINE:,} characters"
                    )
                *lines, rest = rest.split("\n")
                yield lines
        yield [rest]


def _encoding(head: bytes) -> str | None:
    """The encoding of a text file, None for binary data; zero bytes left by a full disk are tolerated."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    for encoding, zeros, others in (("utf-16-le", head[1::2], head[::2]), ("utf-16-be", head[::2], head[1::2])):
        if zeros.count(0) > 0.7 * len(zeros) and others.count(0) < 0.02 * len(others) + 1:
            return encoding
    text = head.replace(b"\0", b"")
    n_control = sum(text.count(bytes([c])) for c in range(32) if c not in (8, 9, 10, 12, 13, 27))
    n_invalid = text.decode("utf-8", errors="replace").count("\ufffd")
    if len(head) - len(text) > _MAX_DAMAGE * len(head) or n_control > 0.02 * len(text) + 2:
        return None
    return None if n_invalid > _MAX_DAMAGE * len(text) + 2 else "utf-8-sig"


# JSON lines, and JSON documents or pickles: nested rows, or columns of equal length.

_MAX_DOCUMENT = 1 << 28  # characters
_MAX_COLUMN = 50_000_000
_AXES = ("step", "epoch", "group", "split", "tag", "value")
_B2T24_KEYS = {"testloss", "testcer", "testper"}
_B2T24_INTERVAL = 100  # the '24 trainer evaluates every hundred batches and stores no counter
_COUNTER = re.compile(r"\d{1,15}(?:\.0*)?")
_ZERO_FRACTION = 0.5  # minimum fraction of exact zeros in a column of evaluations for them to mean "not evaluated"


def parse_json(text: str) -> Any:
    """The value of a JSON text, None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_json_lines(head: Head, table: LogTable) -> Iterator[dict[str, Any]]:
    """The objects of a file; a block is parsed at once if all of its lines are valid."""
    for block in head.blocks():
        lines = [line for line in block if line and not line.isspace()]
        rows = parse_json(f"[{','.join(lines)}]")
        if rows is None:
            rows = [parse_json(line) for line in lines]
        objects = [row for row in rows if type(row) is dict]
        table.n_bad += len(rows) - len(objects)
        yield from objects


def _fraction_of_objects(head: Head) -> float:
    """The fraction of JSON objects among the first lines, without the last one, which may be incomplete."""
    lines = head.filled[:50] if len(head.filled) > 50 else head.filled[:-1] or head.filled
    return sum(isinstance(parse_json(line), dict) for line in lines) / len(lines) if lines else 0.0


def _is_document(head: Head) -> bool:
    """Whether a file that starts like JSON is one document, not one object per line."""
    if len(head.filled) == 1:
        tree = parse_json(head.filled[0])
        return tree is not None and (not isinstance(tree, dict) or _has_rows(tree))
    return head.filled[0][0] in "{[" and not any(isinstance(parse_json(line), dict) for line in head.filled[:3])


def _has_rows(tree: Any, depth: int = 4) -> bool:
    if isinstance(tree, dict) and depth:
        return _is_keyed_by_step(tree) or any(_has_rows(v, depth - 1) for v in tree.values())
    return isinstance(tree, list)


def _read_document(head: Head, table: LogTable) -> Iterator[dict[str, Any]]:
    text = "\n".join(chain.from_iterable(head.blocks()))
    if len(text) > _MAX_DOCUMENT:
        size = f"{_MAX_DOCUMENT:,} characters"
        raise UserError(f"{head.path} is one JSON document of more than {size}; write one row per line")
    return _tree_rows(parse_json(text), table)


def _read_pickle(head: Head, table: LogTable) -> Iterator[dict[str, Any]]:
    from arcuate.data.unpickle import load_pickle

    return _tree_rows(load_pickle(head.path), table)


def _tree_rows(tree: Any, table: LogTable, prefix: str = "", depth: int = 6) -> Iterator[dict[str, Any]]:
    """Everything that looks like rows or columns, down to a limited depth."""
    if depth == 0:
        return
    if isinstance(tree, list):
        yield from ({_prefixed(str(k), prefix): v for k, v in row.items()} for row in tree if isinstance(row, Mapping))
    if not isinstance(tree, Mapping):
        return
    plain = {k: v for k, v in tree.items() if not isinstance(v, (Mapping, list))}
    table.facts.scan_config(plain, "stated in the file")
    if _is_keyed_by_step(tree):
        yield from ({"step": step, **row} for step, row in tree.items())
        return
    columns = {str(k): values for k, v in tree.items() if (values := _flat_list(v)) is not None}
    yield from _column_rows(columns, prefix)
    for name, value in tree.items():
        if str(name) not in columns:
            extend = isinstance(value, Mapping) or parse_name(str(name)).split
            yield from _tree_rows(value, table, f"{prefix}{name}/" if extend else prefix, depth - 1)


def _prefixed(name: str, prefix: str) -> str:
    return name if parse_name(name).quantity in _AXES else f"{prefix}{name}"


def _is_keyed_by_step(tree: Mapping[Any, Any]) -> bool:
    """Whether the keys of a mapping are counters, as in {"100": {"per": 0.8}, …}."""
    return len(tree) > 1 and all(_COUNTER.fullmatch(str(k)) and isinstance(v, Mapping) for k, v in tree.items())


def _flat_list(value: Any) -> list[Any] | None:
    if isinstance(value, np.ndarray):
        value = value.reshape(-1).tolist() if value.ndim <= 1 or 1 in value.shape else None
    if not isinstance(value, (list, tuple)) or not value or len(value) > _MAX_COLUMN:
        return None
    return list(value) if not isinstance(value[0], (Mapping, list, tuple, str)) else None


def _column_rows(columns: Mapping[str, list[Any]], prefix: str) -> Iterator[dict[str, Any]]:
    """Columns as rows, those of equal length together; without a counter the position in the list is used."""
    for length in sorted({len(values) for values in columns.values()}):
        equal = {name: values for name, values in columns.items() if len(values) == length}
        named = {_prefixed(name, prefix): _without_placeholders(values, name) for name, values in equal.items()}
        if _B2T24_KEYS & {name.lower() for name in equal}:
            named["batch"] = [_B2T24_INTERVAL * i for i in range(length)]
        yield from (dict(zip(named, row, strict=True)) for row in zip(*named.values(), strict=True))


def _without_placeholders(values: list[Any], name: str) -> list[Any]:
    """Replace zeros that fill rows without an evaluation by None."""
    meaning = parse_name(name)
    if meaning.quantity not in ("per", "wer", "loss") or meaning.split == "train":
        return values
    numbers = [parse_number(value) for value in values]
    positive = any(number is not None and number > 0 for number in numbers)
    fills = positive and numbers.count(0.0) >= max(1, _ZERO_FRACTION * len(values))
    return [None if number == 0 else value for number, value in zip(numbers, values, strict=True)] if fills else values


# Tables with a header, and MLflow metric files: time stamp, value and step, without a header.

_DELIMITERS = (",", "\t", ";", "|", " ")
_OF_RUN = re.compile(r"^(?P<run>.+) - (?P<metric>[^-]+)$")  # a column of a Weights & Biases export
_VALUE = re.compile(r"[:=]\s*[-+.]?\d|\d\.\d|^[-+]?\d+$|\b(?:nan|inf)\b", re.I)  # never part of a column name
_MLFLOW_LINE = re.compile(r"^\d{12,14} \S+ -?\d+$")


def _delimiter(head: Head) -> str | None:
    """The delimiter of a table whose header has known column names; None if the lines are not such a table."""
    lines = [line for line in head.lines if line.strip() and not line.startswith("#")][:20]
    for delimiter in _DELIMITERS if len(lines) > 1 else ():
        names = _cells(lines[0], delimiter)
        widths = {len(_cells(line, delimiter)) for line in lines[1:-1]}
        if len(names) < 2 or any(map(_VALUE.search, names)) or not widths <= {len(names)}:
            continue
        quantities = {parse_name(_OF_RUN.sub(r"\g<metric>", name)).quantity for name in names}
        has_axis, n_metrics = not quantities.isdisjoint(("step", "epoch")), len(quantities & METRICS)
        if (has_axis and (n_metrics or quantities & {"value", "tag"})) or n_metrics > 1:
            return delimiter
    return None


def _cells(line: str, delimiter: str) -> list[str]:
    if delimiter == " ":
        return line.split()
    try:
        row = next(csv.reader([line.replace("\0", "")[:100_000]], delimiter=delimiter), [])
    except csv.Error:
        return []
    bordered = delimiter == "|" and line.lstrip().startswith("|")
    return [cell.strip() for cell in (row[1:-1] if bordered else row)]


def _read_table(head: Head, table: LogTable) -> Iterator[dict[str, Any]]:
    """Rows by the names of the header; a row with columns `run - metric` becomes one row per run."""
    delimiter = _delimiter(head) or ","
    names: list[str] = []
    runs: dict[str, dict[str, int]] = {}
    for line in chain.from_iterable(head.blocks()):
        if not line or line.isspace() or line.startswith("#"):
            continue
        cells = line.split(",") if delimiter == "," and '"' not in line else _cells(line, delimiter)
        if not names:
            names = [cell.strip() for cell in cells]
            for i, name in enumerate(names):
                if match := _OF_RUN.match(name):
                    runs.setdefault(match["run"], {})[match["metric"].strip()] = i
        elif len(cells) != len(names):
            table.n_bad += 1
        elif not runs:
            yield dict(zip(names, cells, strict=True))
        else:
            shared = {name: cell for name, cell in zip(names, cells, strict=True) if not _OF_RUN.match(name)}
            for run, columns in runs.items():
                yield {**shared, **{name: cells[i] for name, i in columns.items()}, "run": run}


def _is_mlflow(head: Head) -> bool:
    lines = head.filled[:-1] or head.filled
    return all(_MLFLOW_LINE.match(line) for line in lines[:20])


def _read_mlflow(head: Head, table: LogTable) -> Iterator[dict[str, Any]]:
    for line in chain.from_iterable(head.blocks()):
        if _MLFLOW_LINE.match(line.strip()):
            _, value, step = line.split()
            yield {"step": step, "value": value}


# TensorBoard event files: records of length, checksum, event and checksum. Checksums are not verified.

_MAX_RECORD = 1 << 28  # bytes; images and audio may be long
_MAX_SCALAR = 4096  # bytes; longer records hold no scalars and are ignored


def _read_events(head: Head, table: LogTable) -> Iterator[dict[str, Any]]:
    """The scalars of all records up to the first damaged one, which hides those after it."""
    with head.path.open("rb") as file:
        while len(start := file.read(12)) == 12:
            length = struct.unpack("<Q", start[:8])[0]
            event = file.read(length + 4) if length <= _MAX_RECORD else b""
            if len(event) < length + 4:
                table.notes.append("the event file ends in a damaged or incomplete record; the rest could not be read")
                return
            if length <= _MAX_SCALAR:
                try:
                    yield from _scalars(event[:-4])
                except (IndexError, struct.error, UnicodeDecodeError):
                    table.n_bad += 1


def _scalars(record: bytes) -> list[dict[str, Any]]:
    """The scalars of one event as rows of step and value."""
    fields = list(_protobuf_fields(record))
    step = next((value for number, value in fields if number == 2 and isinstance(value, int)), 0)
    step -= (step >= 1 << 63) << 64  # two's complement
    summaries = [content for number, content in fields if number == 5 and isinstance(content, bytes)]
    values = [v for s in summaries for number, v in _protobuf_fields(s) if number == 1 and isinstance(v, bytes)]
    return [{"step": step, found[0]: found[1]} for value in values if (found := _scalar(value))]


def _scalar(data: bytes) -> tuple[str, float] | None:
    """Tag and value: a float, or a tensor with one float, as newer writers store scalars."""
    tag, value = "", None
    for number, content in _protobuf_fields(data):
        if number == 1 and isinstance(content, bytes):
            tag = content.decode("utf-8")
        elif number == 2 and isinstance(content, float):
            value = content
        elif number == 8 and isinstance(content, bytes):
            fields = list(_protobuf_fields(content))
            packed = {4: "<f", 8: "<d"}
            raw = [c for n, c in fields if n in (4, 5, 6) and isinstance(c, bytes) and len(c) in packed]
            floats = [c for n, c in fields if n == 5 and isinstance(c, float)]
            value = floats[0] if floats else struct.unpack(packed[len(raw[0])], raw[0])[0] if raw else None
    return (tag, value) if tag and value is not None else None


def _protobuf_fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Field numbers and values of a protobuf message: integers, floats and doubles parsed, the rest as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire_type = key & 7
        value: int | float | bytes
        if wire_type == 0:
            value, at = _varint(data, at)
        elif wire_type in (1, 5):
            value = float(struct.unpack_from("<d" if wire_type == 1 else "<f", data, at)[0])
            at += 8 if wire_type == 1 else 4
        elif wire_type == 2:
            length, at = _varint(data, at)
            value = data[at : at + length]
            at += length
        else:
            raise IndexError("unknown wire type")
        if at > len(data):
            raise IndexError("field exceeds its record")
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError("unterminated varint")


# The table of formats, and the files of a log.


def _read_text(head: Head, table: LogTable) -> Iterator[dict[str, Any]]:
    if is_document(head.lines):
        raise UserError(
            f"{head.path} is not a training log but a document: it consists of headings, lists and sentences, whose"
            " numbers are not a series over steps; give the file that the trainer wrote"
        )
    return read_printed(head.blocks(), table.facts)


class Format(NamedTuple):
    """A format of logs: how the start of a file shows it, and its rows."""

    name: str
    matches: Callable[[Head], bool]
    rows: Callable[[Head, LogTable], Iterator[dict[str, Any]]]
    is_text: bool = True


FORMATS = (
    Format("a TensorBoard event file", lambda head: b"brain.Event:" in head.data[:64], _read_events, False),
    Format("a pickle", lambda head: head.data[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
           _read_pickle, False),
    Format("a JSON document", _is_document, _read_document),
    Format("JSON lines", lambda head: _fraction_of_objects(head) >= 0.5, read_json_lines),
    Format("a table", lambda head: _delimiter(head) is not None, _read_table),
    Format("an MLflow metric file", _is_mlflow, _read_mlflow),
    Format("printed output of a trainer", lambda head: True, _read_text),
)  # fmt: skip


def read_logs(path: Path) -> LogFile:
    """The runs at a path."""
    path = local_path(path)
    if path.is_dir():
        if (path / "recipe.yaml").is_file():
            from arcuate.doctor.run_folder import read_run

            return LogFile(path.resolve().name, "an arcuate run folder", read_run(path))
        return _read_folder(path)
    if not path.exists():
        raise UserError(f"no such file or folder: {path}")
    if not path.is_file():
        raise UserError(f"{path} is neither a file nor a folder")
    return _read_files([path, *_partner_files(path)])


_LOG_NAMES = ("metrics", "history", "events.out", "validation", "training", "log", "stats", "trainer_state")
_FILE_PAIRS = (("training", "validation"), ("train", "val"), ("train", "valid"), ("train", "test"), ("train", "eval"))
_FOLDER_DEPTH = 3  # folders of Lightning and Hydra keep their events two levels down


def _read_folder(path: Path) -> LogFile:
    problems = []
    for group in _candidate_files(path):
        try:
            return _read_files(group)
        except UserError as error:  # not a log: try the next candidate
            problems.append(str(error))
            logger.debug("%s", error)
    reason = f": {problems[0]}" if len(problems) == 1 else ""
    raise UserError(f"{path} is neither an arcuate run folder nor a folder with a training log{reason}")


def _candidate_files(path: Path) -> list[list[Path]]:
    """Groups of files that belong together, the most likely log first; files of the folder before those below it."""

    def rank(group: list[Path]) -> tuple[int, int, str]:
        name = group[0].name
        depth = len(group[0].relative_to(path).parts)
        return depth, next((i for i, word in enumerate(_LOG_NAMES) if word in name.lower()), len(_LOG_NAMES)), name

    try:
        found = [p for depth in range(_FOLDER_DEPTH) for p in sorted(path.glob("*/" * depth + "*"))]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    hidden = {p for p in found if any(part.startswith(".") for part in p.relative_to(path).parts)}
    files = [p for p in found if p not in hidden and p.is_file()][:_MAX_FILES]
    groups: dict[tuple[Path, ...], list[Path]] = {}
    for file in files:
        events = [p for p in files if "tfevents" in p.name and p.parent == file.parent]
        group = events if file in events else [file, *_partner_files(file)]
        groups.setdefault(tuple(sorted(group)), group)
    return sorted(groups.values(), key=rank)


def _partner_files(path: Path) -> list[Path]:
    """The other file of a pair such as training_metrics.csv and validation_metrics.csv."""
    for one, other in (pair for a, b in _FILE_PAIRS for pair in ((a, b), (b, a))):
        partner = path.with_name(path.name.replace(one, other))
        if partner != path and path.suffix == ".csv" and partner.is_file():
            return [partner]
    return []


def _read_files(paths: Sequence[Path]) -> LogFile:
    """Read one log from one file or from several files that belong together."""
    first, table = paths[0], LogTable(paths[0].stem)
    sources = [_read_file(path, table) for path in paths]
    for name in ("config.json", "args.json", "hparams.json"):  # may state the planned length
        file = first.with_name(name)
        if file != first and file.is_file() and file.stat().st_size < 1 << 20:
            config = parse_json(file.read_text("utf-8", errors="replace"))
            if isinstance(config, dict):
                table.facts.scan_config(config, f"{name} in the same folder")
    table.facts.scan_text(f"{first.parent.name} {first.name}", "the file name")
    logs = table.logs(first.stem)
    if not logs:
        reason = next(iter(table.implausible), "it contains no loss or error rate over steps")
        raise UserError(f"{first} is not a training log: {reason}")
    notes = list(table.notes)
    if len(paths) > 1:
        notes.append(f"read together with {', '.join(p.name for p in paths[1:])}")
    if table.n_bad:
        notes.append(f"{table.n_bad:,} unreadable lines were skipped")
    if table.n_skipped:
        notes.append(f"the trainer reports {table.n_skipped:,.0f} skipped updates")
    return LogFile(first.name, sources[0], _with_facts(logs, table), tuple(dict.fromkeys(notes)))


def _read_file(path: Path, table: LogTable) -> str:
    """Read one file into the table and return its format: the first that matches and yields a series."""
    head = Head.of(path)
    if not head.data.strip():
        raise UserError(f"{path} is empty")
    for magic, description in _OTHER_FORMATS.items():
        if head.data.startswith(magic):
            raise UserError(f"{path} is not a training log but {description}")
    for line in head.lines:
        table.facts.scan_sessions(line)
    for form in FORMATS:
        if form.is_text and not head.filled:
            raise UserError(f"{path} is not a training log: it is neither text nor a TensorBoard event file")
        if form.matches(head):
            before = table.n_points
            table.stem = path.stem
            table.add_rows(form.rows(head, table))
            if table.n_points > before:
                return form.name
            table.n_bad = 0
    return FORMATS[-1].name


def _with_facts(logs: Sequence[TrainingLog], table: LogTable) -> tuple[TrainingLog, ...]:
    """Add what the file states about its runs."""
    facts = table.facts
    planned, planned_because = facts.planned or (None, "")
    dataset, dataset_because = facts.dataset or (None, "")
    return tuple(
        replace(
            log,
            name=facts.run_names[i] if len(facts.run_names) == len(logs) else log.name,
            planned=planned if log.judged.unit != "epochs" else None,
            planned_because=planned_because,
            dataset=dataset,
            dataset_because=dataset_because,
            n_named_sessions=len(facts.sessions),
            reported_finished=facts.n_finished >= len(logs),
            crashed_non_finite=facts.crashed_non_finite and i == len(logs) - 1,
        )
        for i, log in enumerate(logs)
    )
