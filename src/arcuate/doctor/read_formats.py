"""Structured logs: tables, MLflow metric files, JSON, and TensorBoard event files (read without TensorBoard)."""

import csv
import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.doctor.columns import (
    METRICS,
    Collector,
    ColumnMeaning,
    parse_column_name,
    parse_numbers,
    scan_config,
)
from arcuate.doctor.read_text import line_blocks
from arcuate.errors import UserError

# Tables with a header.

_DELIMITERS = ",\t;|"
_WANDB_COLUMN = re.compile(r"^(?P<run>.+) - (?P<metric>[^-]+)$")
_VALUE = re.compile(r"[:=]\s*[-+.]?\d|\d\.\d|^[-+]?\d+$|\b(?:nan|inf)\b", re.I)  # never part of a column name
_DECIMAL_COMMA = re.compile(r"[-+]?(?:0,\d+|\d+,(?:\d{1,2}|\d{4,}))(?:[eE][-+]?\d+)?\s?%?")  # 0,31, not 1,000
_DECIMAL_POINT = re.compile(r"[-+]?\d*\.\d+(?:[eE][-+]?\d+)?\s?%?")
_COMMA_NUMBER = re.compile(r"^(\s*[-+]?\d+),(\d+(?:[eE][-+]?\d+)?\s?%?\s*)$")


def find_delimiter(lines: Sequence[str]) -> str | None:
    """The delimiter of a table whose header has known column names; None if the lines are not such a table."""
    lines = [line for line in lines if line.strip() and not line.startswith("#")][:20]
    if len(lines) < 2:
        return None
    for delimiter in (*_DELIMITERS, " "):
        head = _split_cells(lines[0], delimiter)
        widths = {len(_split_cells(line, delimiter)) for line in lines[1:-1]}
        if len(head) < 2 or any(_VALUE.search(cell) for cell in head) or not widths <= {len(head)}:
            continue
        roles = {_role(name) for name in head}
        axes, metrics = roles & {"step", "epoch"}, roles & set(METRICS)
        has_values = (metrics or "value" in roles) and (axes or len(metrics) > 1)
        if has_values or (axes and "tag" in roles):
            return delimiter
    return None


def _role(name: str) -> str:
    match = _WANDB_COLUMN.match(name)
    return parse_column_name(match["metric"] if match else name).role


def _split_cells(line: str, delimiter: str) -> list[str]:
    if delimiter == " ":
        return line.split()
    row = next(csv.reader([line.replace("\0", "")], delimiter=delimiter), [])
    bordered = delimiter == "|" and line.lstrip().startswith("|")
    return [cell.strip() for cell in (row[1:-1] if bordered else row)]


def read_csv(blocks: Iterable[list[str]], delimiter: str, collector: Collector, stem: str) -> None:
    head: list[str] = []
    decimal_comma: bool | None = None  # determined by the first rows
    for lines in blocks:
        lines = [line for line in lines if line and not line.isspace() and not line.startswith("#")]
        rows = _parse_rows(lines, delimiter)
        if not head and rows:
            head = rows.pop(0)
        valid = [row for row in rows if len(row) == len(head) and row != head]
        collector.n_bad += sum(len(row) != len(head) for row in rows)
        if decimal_comma is None and valid:
            decimal_comma = _has_decimal_comma(valid)
        if decimal_comma:
            valid = [[_COMMA_NUMBER.sub(r"\1.\2", cell) for cell in row] for row in valid]
        if valid:
            _add_table(head, valid, collector, stem)


def _has_decimal_comma(rows: Sequence[Sequence[str]]) -> bool:
    """Whether some number is only valid with a decimal comma and none has a decimal point."""
    cells = [cell.strip() for row in rows[:1000] for cell in row]
    return any(map(_DECIMAL_COMMA.fullmatch, cells)) and not any(map(_DECIMAL_POINT.fullmatch, cells))


def _parse_rows(lines: Sequence[str], delimiter: str) -> list[list[str]]:
    if delimiter in " |":
        return [_split_cells(line, delimiter) for line in lines]
    try:
        return list(csv.reader(lines, delimiter=delimiter))
    except csv.Error:
        return [row for line in lines if (row := _parse_row(line, delimiter))]


def _parse_row(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line.replace("\0", "")[:100_000]], delimiter=delimiter), [])
    except csv.Error:
        return []


def _add_table(head: Sequence[str], rows: Sequence[Sequence[str]], collector: Collector, stem: str) -> None:
    row_numbers = np.arange(collector.n_rows, collector.n_rows + len(rows), dtype=float)
    collector.n_rows += len(rows)
    columns: dict[str, Sequence[Any]] = dict(zip(head, zip(*rows, strict=True), strict=True))
    for table in _split_runs(columns):
        roles = {parse_column_name(name).role for name in table}
        if "value" in roles and "tag" not in roles and not roles & set(METRICS):
            table = {**table, "tag": [stem] * len(rows)}  # an export of one curve, named after its file
        collector.add_columns(table, row_numbers)


def _split_runs(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Sequence[Any]]]:
    """Split a Weights & Biases export of several runs (columns `run - metric`) into one table per run."""
    matches = {name: match for name in columns if (match := _WANDB_COLUMN.match(name))}
    if not matches:
        return [dict(columns)]
    shared = {name: values for name, values in columns.items() if name not in matches}
    runs: dict[str, dict[str, Sequence[Any]]] = {}
    for name, match in matches.items():
        runs.setdefault(match["run"], {})[match["metric"].strip()] = columns[name]
    n = len(next(iter(columns.values())))
    return [{**shared, **metrics, "run": [run] * n} for run, metrics in runs.items()]


# MLflow metric files: time stamp, value and step, without a header.

_MLFLOW_LINE = re.compile(r"^\d{12,14} \S+ -?\d+$")


def is_mlflow(lines: Sequence[str]) -> bool:
    lines = [line for line in lines if line.strip()]
    return len(lines) > 0 and all(_MLFLOW_LINE.match(line.strip()) for line in lines[:20])


def read_mlflow(blocks: Iterable[list[str]], collector: Collector, stem: str) -> None:
    for lines in blocks:
        rows = [line.split() for line in lines if _MLFLOW_LINE.match(line.strip())]
        if rows:
            _, values, steps = zip(*rows, strict=True)
            _add_table(["step", "value"], list(zip(steps, values, strict=True)), collector, stem)


# JSON lines.


def read_jsonl(
    blocks: Iterable[list[str]], collector: Collector, on_rows: Callable[[list[Any]], None] | None = None
) -> None:
    """Parse a block at once if all of its lines are valid, else line by line; NaN and Infinity are accepted."""
    for lines in blocks:
        lines = [line for line in lines if line and not line.isspace()]
        rows = parse_json(f"[{','.join(lines)}]")
        if rows is None:
            rows = [parse_json(line) for line in lines]
        objects = [row for row in rows if type(row) is dict]
        collector.n_bad += len(rows) - len(objects)
        if on_rows is not None:
            on_rows(objects)
        collector.add_rows(objects)


def parse_json(text: str) -> Any:
    """The value of a JSON text, None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# JSON documents, and the plain contents of pickles: nested rows, or columns of equal length.

_MAX_DOCUMENT = 1 << 28  # characters
_MAX_COLUMN = 50_000_000
_AXES = ("step", "epoch", "group", "split", "tag", "value")
_B2T24_KEYS = {"testloss", "testcer", "testper"}
_B2T24_INTERVAL = 100  # the '24 trainer evaluates every hundred batches and stores no counter
_COUNTER = re.compile(r"\d{1,15}(?:\.0*)?")
_ZERO_FRACTION = 0.5  # minimum fraction of exact zeros in a column of evaluations for them to mean "not evaluated"


def read_json_document(path: Path, encoding: str, collector: Collector) -> bool:
    """Read a file as one JSON document; return whether it was valid."""
    parts, size = [], 0
    for lines in line_blocks(path, encoding):
        parts.append("\n".join(lines))
        size += len(parts[-1])
        if size > _MAX_DOCUMENT:
            raise UserError(
                f"{path} is one JSON document of more than {_MAX_DOCUMENT:,} characters; write one row per line"
            )
    tree = parse_json("\n".join(parts))
    if tree is not None:
        read_tree(tree, collector)
    return tree is not None


def read_tree(tree: Any, collector: Collector, prefix: str = "", depth: int = 6) -> None:
    """Collect everything that looks like rows or columns, down to a limited depth."""
    if depth == 0:
        return
    if isinstance(tree, list):
        rows = [row for row in tree if isinstance(row, Mapping)]
        if rows:
            collector.add_rows({_prefixed(str(k), prefix): v for k, v in row.items()} for row in rows)
        return
    if not isinstance(tree, Mapping):
        return
    plain = {k: v for k, v in tree.items() if not isinstance(v, (Mapping, list))}
    scan_config(plain, collector.metadata, "stated in the file")
    if is_keyed_by_step(tree):
        collector.add_rows({"step": step, **row} for step, row in tree.items())
        return
    lists = {str(k): values for k, v in tree.items() if (values := _flat_list(v)) is not None}
    if lists:
        _add_lists(lists, collector, prefix)
    for name, value in tree.items():
        if str(name) not in lists and isinstance(value, (Mapping, list)):
            extend = isinstance(value, Mapping) or parse_column_name(str(name)).split
            read_tree(value, collector, f"{prefix}{name}/" if extend else prefix, depth - 1)


def _prefixed(name: str, prefix: str) -> str:
    return name if parse_column_name(name).role in _AXES else f"{prefix}{name}"


def is_keyed_by_step(tree: Mapping[Any, Any]) -> bool:
    """Whether the keys of a mapping are counters, as in {"100": {"per": 0.8}, …}."""
    return len(tree) > 1 and all(_COUNTER.fullmatch(str(k)) and isinstance(v, Mapping) for k, v in tree.items())


def _flat_list(value: Any) -> list[Any] | None:
    if isinstance(value, np.ndarray):
        value = value.reshape(-1).tolist() if value.ndim <= 1 or 1 in value.shape else None
    if not isinstance(value, (list, tuple)) or not value or len(value) > _MAX_COLUMN:
        return None
    return list(value) if not isinstance(value[0], (Mapping, list, tuple, str)) else None


def _add_lists(lists: Mapping[str, list[Any]], collector: Collector, prefix: str) -> None:
    """Add columns, those of equal length together; without a counter the position in the list is used."""
    for length in sorted({len(v) for v in lists.values()}):
        columns = {
            _prefixed(name, prefix): _without_placeholders(values, parse_column_name(name))
            for name, values in lists.items()
            if len(values) == length
        }
        if {name.lower() for name, values in lists.items() if len(values) == length} & _B2T24_KEYS:
            columns["batch"] = [_B2T24_INTERVAL * i for i in range(length)]
        row_numbers = np.arange(collector.n_rows, collector.n_rows + length, dtype=float)
        collector.n_rows += length
        collector.add_columns(columns, row_numbers)


def _without_placeholders(values: list[Any], meaning: ColumnMeaning) -> list[Any]:
    """Replace zeros that fill rows without an evaluation by None."""
    if meaning.role not in ("per", "wer", "loss") or meaning.split == "train":
        return values
    numbers, present = parse_numbers(values)
    zero = present & (numbers == 0)
    if not zero.any() or zero.mean() < _ZERO_FRACTION or not (numbers[present] > 0).any():
        return values
    return [None if z else v for z, v in zip(zero, values, strict=True)]


# TensorBoard event files: TFRecords with CRC-32C checksums, and the scalars in them.

_MAX_RECORD = 1 << 28  # bytes; images and audio may be long
_MAX_SCALAR = 4096  # bytes; longer records hold no scalars and are ignored
_BATCH = 20_000  # records whose checksums are computed together


def _crc_table() -> np.ndarray:
    """CRC-32C of every byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1).astype(np.uint32)
    return table


_TABLE = _crc_table()
_TABLE_LIST = _TABLE.tolist()


def masked_crc(data: bytes) -> int:
    """The masked CRC-32C of the TFRecord format."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE_LIST[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def masked_crcs(data: np.ndarray) -> np.ndarray:
    """`masked_crc` of many records of equal length; data (N, L) uint8."""
    crc = np.full(len(data), 0xFFFFFFFF, dtype=np.uint32)
    for column in data.T:
        crc = _TABLE[(crc ^ column) & 0xFF] ^ (crc >> np.uint32(8))
    crc = crc ^ np.uint32(0xFFFFFFFF)
    rotated = ((crc >> np.uint32(15)) | (crc << np.uint32(17))).astype(np.uint64)
    return ((rotated + 0xA282EAD8) & 0xFFFFFFFF).astype(np.uint32)


def is_event_file(head: bytes) -> bool:
    """Whether a file starts with a record whose length has a valid checksum."""
    if len(head) < 16:
        return False
    length, crc = struct.unpack("<QI", head[:12])
    return length < _MAX_RECORD and masked_crc(head[:8]) == crc


def read_events(path: Path, collector: Collector) -> tuple[str, ...]:
    """Collect the scalars of all intact records and return notes about damage.

    Records after a damaged length cannot be located and are lost.
    """
    notes: list[str] = []
    records = _records(path, notes)
    while batch := list(islice(records, _BATCH)):
        collector.add_rows(row for record in _intact_records(batch, notes) for row in _scalars(record))
    return tuple(dict.fromkeys(notes))


def _records(path: Path, notes: list[str]) -> Iterator[tuple[bytes, int]]:
    """Records with their stored checksums."""
    try:
        with path.open("rb") as file:
            while len(head := file.read(12)) == 12:
                length, crc = struct.unpack("<QI", head)
                if length > _MAX_RECORD or masked_crc(head[:8]) != crc:
                    notes.append("a record of the event file is damaged; the rest could not be read")
                    return
                data = file.read(length)
                tail = file.read(4)
                if len(data) < length or len(tail) < 4:
                    notes.append("the event file ends in the middle of a record")
                    return
                yield data, struct.unpack("<I", tail)[0]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def _intact_records(batch: list[tuple[bytes, int]], notes: list[str]) -> list[bytes]:
    """The records with a valid checksum."""
    intact = np.ones(len(batch), dtype=bool)
    lengths = np.array([len(data) for data, _ in batch])
    for length in np.unique(lengths[lengths <= _MAX_SCALAR]):
        indices = np.flatnonzero(lengths == length)
        joined = b"".join(batch[i][0] for i in indices)
        data = np.frombuffer(joined, dtype=np.uint8).reshape(len(indices), length)
        intact[indices] = masked_crcs(data) == np.array([batch[i][1] for i in indices], dtype=np.uint32)
    if not intact.all():
        n_damaged = int((~intact).sum())
        notes.append(f"{n_damaged:,} records of the event file have a wrong checksum and were skipped")
    return [data for (data, _), ok in zip(batch, intact, strict=True) if ok and len(data) <= _MAX_SCALAR]


def _scalars(record: bytes) -> list[dict[str, float]]:
    """The scalars of one event as rows of step and value."""
    rows: list[dict[str, float]] = []
    try:
        fields = list(_protobuf_fields(record))
        step = next((value for number, value in fields if number == 2 and isinstance(value, int)), 0)
        step -= (step >= 1 << 63) << 64  # two's complement
        for number, summary in fields:
            if number == 5 and isinstance(summary, bytes):
                for inner, value in _protobuf_fields(summary):
                    if inner == 1 and isinstance(value, bytes) and (found := _scalar(value)):
                        rows.append({"step": float(step), found[0]: found[1]})
    except (IndexError, struct.error, UnicodeDecodeError):
        pass  # intact by its checksum, but not an event known to this reader
    return rows


def _scalar(data: bytes) -> tuple[str, float] | None:
    tag, value = "", None
    for number, content in _protobuf_fields(data):
        if number == 1 and isinstance(content, bytes):
            tag = content.decode("utf-8")
        elif number == 2 and isinstance(content, float):
            value = content
        elif number == 8 and isinstance(content, bytes):
            value = _tensor_value(content)
    return (tag, value) if tag and value is not None else None


def _tensor_value(data: bytes) -> float | None:
    """The value of a tensor with one float, as newer writers store scalars."""
    dtype = 0
    for number, content in _protobuf_fields(data):
        if number == 1 and isinstance(content, int):
            dtype = content
        elif number == 5 and isinstance(content, float):
            return content
        elif isinstance(content, bytes) and (number, dtype, len(content)) in ((4, 1, 4), (5, 1, 4)):
            return float(struct.unpack("<f", content)[0])
        elif isinstance(content, bytes) and (number, dtype, len(content)) in ((4, 2, 8), (6, 2, 8)):
            return float(struct.unpack("<d", content)[0])
    return None


def _protobuf_fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Field numbers and values of a protobuf message: integers, floats and doubles parsed, the rest as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire_type = key & 7
        if wire_type == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
        elif wire_type == 1:
            yield key >> 3, float(struct.unpack_from("<d", data, at)[0])
            at += 8
        elif wire_type == 5:
            yield key >> 3, float(struct.unpack_from("<f", data, at)[0])
            at += 4
        elif wire_type == 2:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise IndexError("field exceeds its record")
            yield key >> 3, data[at : at + length]
            at += length
        else:
            raise IndexError("unknown wire type")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError("unterminated varint")
