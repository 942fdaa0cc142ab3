"""TensorBoard event files, without TensorBoard: records with checksums, and the scalars in them."""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from arcuate.errors import UserError
from arcuate.insight.doctor.columns import Collector

CHUNK = 1 << 22
LONGEST = 1 << 28  # bytes of one record; pictures and sound may be long
ROWS = 1 << 16


def _make_table() -> np.ndarray:
    """CRC-32C of every byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1).astype(np.uint32)
    return table


_TABLE = _make_table()
_PLAIN_TABLE = _TABLE.tolist()


def masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _PLAIN_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def masked_crcs(data: np.ndarray) -> np.ndarray:
    """The same for many records of one length at once; data (N, L) uint8."""
    crc = np.full(len(data), 0xFFFFFFFF, dtype=np.uint32)
    for column in data.T:
        crc = _TABLE[(crc ^ column) & 0xFF] ^ (crc >> np.uint32(8))
    crc = crc ^ np.uint32(0xFFFFFFFF)
    turned = ((crc >> np.uint32(15)) | (crc << np.uint32(17))).astype(np.uint64)
    return ((turned + 0xA282EAD8) & 0xFFFFFFFF).astype(np.uint32)


def is_events(head: bytes) -> bool:
    """Whether a file begins with a record whose length has the right checksum."""
    if len(head) < 16:
        return False
    length, crc = struct.unpack("<QI", head[:12])
    return length < LONGEST and masked_crc(head[:8]) == crc


def read_events(path: Path, collector: Collector) -> tuple[str, ...]:
    """Scalars of all sound records; what follows a broken length cannot be found again and is said to be missing."""
    notes: list[str] = []
    rows: list[dict[str, float]] = []
    for records in _sound(_records(path, notes), notes):
        for record in records:
            rows += list(scalars(record))
        if len(rows) >= ROWS:
            collector.add_rows(rows)
            rows = []
    collector.add_rows(rows)
    return tuple(dict.fromkeys(notes))


def _records(path: Path, notes: list[str]) -> Iterator[tuple[bytes, int]]:
    """Records with the checksum written beside them."""
    try:
        with path.open("rb") as file:
            while len(head := file.read(12)) == 12:
                length, crc = struct.unpack("<QI", head)
                if length > LONGEST or masked_crc(head[:8]) != crc:
                    notes.append("a record of the event file is damaged; what follows it could not be read")
                    return
                data = file.read(length)
                tail = file.read(4)
                if len(data) < length or len(tail) < 4:
                    notes.append("the event file ends in the middle of a record")
                    return
                yield data, struct.unpack("<I", tail)[0]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def _sound(
    records: Iterator[tuple[bytes, int]], notes: list[str], many: int = 20_000
) -> Iterator[list[bytes]]:
    """Records whose content has its checksum, many at a time."""
    batch: list[tuple[bytes, int]] = []
    for record in records:
        batch.append(record)
        if len(batch) >= many:
            yield _checked(batch, notes)
            batch = []
    yield _checked(batch, notes)


def _checked(batch: list[tuple[bytes, int]], notes: list[str]) -> list[bytes]:
    good = np.ones(len(batch), dtype=bool)
    lengths = np.array([len(data) for data, _ in batch])
    for length in np.unique(lengths):
        places = np.flatnonzero(lengths == length)
        if length > 4096:
            continue  # no scalar is that long, and nothing else is read
        data = np.frombuffer(b"".join(batch[i][0] for i in places), dtype=np.uint8).reshape(
            len(places), length
        )
        good[places] = masked_crcs(data) == np.array([batch[i][1] for i in places], dtype=np.uint32)
    if not good.all():
        notes.append(
            f"{int((~good).sum()):,} records of the event file have a wrong checksum and were left out"
        )
    return [data for (data, _), sound in zip(batch, good, strict=True) if sound and len(data) <= 4096]


def scalars(record: bytes) -> Iterator[dict[str, float]]:
    """The scalar values of one event, each with its step, as rows."""
    try:
        fields = list(protobuf(record))
        step = next((value for number, value in fields if number == 2), 0)
        for number, summary in fields:
            if number == 5 and isinstance(summary, bytes):
                for inner, value in protobuf(summary):
                    if inner == 1 and isinstance(value, bytes) and (found := _scalar(value)):
                        yield {"step": _signed(step), found[0]: found[1]}
    except (IndexError, struct.error, UnicodeDecodeError):
        return  # sound by its checksum, but no event as this reader knows it


def _signed(value: object) -> float:
    step = value if isinstance(value, int) else 0
    return float(step - (1 << 64) if step >= 1 << 63 else step)


def _scalar(data: bytes) -> tuple[str, float] | None:
    tag, value = "", None
    for number, content in protobuf(data):
        if number == 1 and isinstance(content, bytes):
            tag = content.decode("utf-8")
        elif number == 2 and isinstance(content, float):
            value = content
        elif number == 8 and isinstance(content, bytes):
            value = _tensor(content)
    return (tag, value) if tag and value is not None else None


def _tensor(data: bytes) -> float | None:
    """A tensor of one float, as newer writers store scalars."""
    kind = 0
    for number, content in protobuf(data):
        if number == 1 and isinstance(content, int):
            kind = content
        elif number == 5 and isinstance(content, float):
            return content
        elif isinstance(content, bytes) and (number, kind, len(content)) in ((4, 1, 4), (5, 1, 4)):
            return float(struct.unpack("<f", content)[0])
        elif isinstance(content, bytes) and (number, kind, len(content)) in ((4, 2, 8), (6, 2, 8)):
            return float(struct.unpack("<d", content)[0])
    return None


def protobuf(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Field numbers with their values: whole numbers, floats and doubles as such, everything else as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
        elif kind == 1:
            yield key >> 3, float(struct.unpack_from("<d", data, at)[0])
            at += 8
        elif kind == 5:
            yield key >> 3, float(struct.unpack_from("<f", data, at)[0])
            at += 4
        elif kind == 2:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise IndexError("a field reaches beyond its record")
            yield key >> 3, data[at : at + length]
            at += length
        else:
            raise IndexError("an unknown kind of field")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError("a number without an end")
