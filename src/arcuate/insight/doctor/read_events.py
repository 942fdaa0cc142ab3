"""TensorBoard event files without TensorBoard: TFRecords with CRC-32C checksums, and the scalars in them."""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from arcuate.errors import UserError
from arcuate.insight.doctor.columns import Collector

_MAX_RECORD = 1 << 28  # bytes; images and audio may be long
_MAX_SCALAR = 4096  # bytes; longer records hold no scalars and are ignored
_BATCH = 20_000  # records whose checksums are computed together
_N_ROWS = 1 << 16  # rows passed to the collector at once


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
    """Whether a file starts with a record whose length has the right checksum."""
    if len(head) < 16:
        return False
    length, crc = struct.unpack("<QI", head[:12])
    return length < _MAX_RECORD and masked_crc(head[:8]) == crc


def read_events(path: Path, collector: Collector) -> tuple[str, ...]:
    """Collect the scalars of all intact records and return notes about damage.

    Records after a damaged length cannot be located and are lost.
    """
    notes: list[str] = []
    rows: list[dict[str, float]] = []
    for records in _intact_records(_records(path, notes), notes):
        for record in records:
            rows += _scalars(record)
        if len(rows) >= _N_ROWS:
            collector.add_rows(rows)
            rows = []
    collector.add_rows(rows)
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


def _intact_records(records: Iterator[tuple[bytes, int]], notes: list[str]) -> Iterator[list[bytes]]:
    """Batches of records whose checksum is right."""
    batch: list[tuple[bytes, int]] = []
    for record in records:
        batch.append(record)
        if len(batch) >= _BATCH:
            yield _check_batch(batch, notes)
            batch = []
    yield _check_batch(batch, notes)


def _check_batch(batch: list[tuple[bytes, int]], notes: list[str]) -> list[bytes]:
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
