"""Text files in any encoding as blocks of lines, so that a file never has to fit into memory."""

import codecs
import io
from collections.abc import Iterator
from pathlib import Path

from arcuate.errors import UserError

_BLOCK = 1 << 20  # characters
_MAX_LINE = 1 << 26  # characters
_HEAD = 1 << 16  # bytes that determine the format
_MAX_DAMAGE = 0.1  # share of damaged bytes up to which a file is still treated as text


def read_head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def detect_encoding(head: bytes) -> str | None:
    """The encoding of a text file, None for binary data; zero bytes left by a full disk are tolerated."""
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
    text = head.replace(b"\0", b"")
    n_control = sum(text.count(bytes([c])) for c in range(32) if c not in (8, 9, 10, 12, 13, 27))
    n_invalid = text.decode("utf-8", errors="replace").count("\ufffd")
    if len(head) - len(text) > _MAX_DAMAGE * len(head):
        return None
    if n_control > 0.02 * len(text) + 2 or n_invalid > _MAX_DAMAGE * len(text) + 2:
        return None
    return "utf-8-sig"


def line_blocks(path: Path, encoding: str) -> Iterator[list[str]]:
    """Blocks of lines without line ends; the last line may be incomplete."""
    rest = ""
    with path.open("rb") as raw:
        text = io.TextIOWrapper(io.BufferedReader(raw, _BLOCK), encoding=encoding, errors="replace")
        while block := text.read(_BLOCK):
            rest += block.replace("\0", "")
            if len(rest) > _MAX_LINE and "\n" not in rest:
                raise UserError(f"{path} is not a log: it has a line of more than {_MAX_LINE:,} characters")
            *lines, rest = rest.split("\n")
            if lines:
                yield lines
    if rest:
        yield [rest]
