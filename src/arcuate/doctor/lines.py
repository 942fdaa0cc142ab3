"""The text of a file in whatever encoding, as blocks of lines, so that no file is ever whole in memory."""

import codecs
import io
from collections.abc import Iterator
from pathlib import Path

from arcuate.errors import UserError

BLOCK = 1 << 20  # characters read at once
LONGEST = 1 << 26  # characters of one line
HEAD = 1 << 16  # bytes that decide what a file is
TORN = 0.1  # share of bytes that may be damage in what is still a text


def read_head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def encoding_of(head: bytes) -> str | None:
    """The encoding of a text; None where the bytes are no text. Some zeros are left behind by a full disk."""
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    for encoding, zeros, others in (
        ("utf-16-le", head[1::2], head[::2]),
        ("utf-16-be", head[::2], head[1::2]),
    ):
        if zeros.count(0) > 0.7 * len(zeros) and others.count(0) < 0.02 * len(others) + 1:
            return encoding
    signs = head.replace(b"\0", b"")
    control = sum(signs.count(bytes([c])) for c in range(32) if c not in (8, 9, 10, 12, 13, 27))
    strange = signs.decode("utf-8", errors="replace").count("\ufffd")
    torn = len(head) - len(signs) > TORN * len(head)
    return None if torn or control > 0.02 * len(signs) + 2 or strange > TORN * len(signs) + 2 else "utf-8-sig"


def line_blocks(path: Path, encoding: str) -> Iterator[list[str]]:
    """Lines without their ends, many at a time; the last one may be half a line."""
    rest = ""
    with path.open("rb") as raw:
        text = io.TextIOWrapper(io.BufferedReader(raw, BLOCK), encoding=encoding, errors="replace")
        while block := text.read(BLOCK):
            rest += block.replace("\0", "")
            if len(rest) > LONGEST and "\n" not in rest:
                raise UserError(f"{path} has a line of more than {LONGEST:,} characters: it is no log")
            *lines, rest = rest.split("\n")
            if lines:
                yield lines
    if rest:
        yield [rest]
