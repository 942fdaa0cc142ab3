"""The exception whose message is shown to users, escaping of unsafe text, and files that must not be read."""

import errno
import os
import re
import stat
from pathlib import Path


class UserError(Exception):
    """A mistake that the user can fix: one sentence with the remedy, exit code 2, no traceback.

    The message may quote a file, so control characters in it are escaped: a terminal would interpret them.
    """

    def __init__(self, message: str) -> None:
        super().__init__(escape_controls(" ".join(message.split("\n"))))


def escape_controls(text: str) -> str:
    """Text with everything that is not printable as an escape such as \\x1b; line breaks are kept."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


def without_password(url: str) -> str:
    """A URL that is safe to print and store: without the password, whether before the host or in the query."""
    scheme, separator, rest = url.partition("://")
    credentials, at, location = rest.rpartition("@")
    path, question, query = location.partition("?")
    kept = "&".join(part for part in query.split("&") if "password" not in part.lower())
    return f"{scheme}{separator}{credentials.partition(':')[0]}{at}{path}{question if kept else ''}{kept}"


def check_regular(path: Path, max_bytes: int | None = None) -> None:
    """Raise OSError for a device, a socket or a pipe, which can have no end, and for a file of more than `max_bytes`.

    A folder from elsewhere may contain links to such files. Pipes of the shell, `<(…)`, are in /dev/fd.
    """
    found = os.stat(path)
    is_shell_pipe = stat.S_ISFIFO(found.st_mode) and path.is_absolute() and path.parts[1] in ("dev", "proc")
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode) or is_shell_pipe or str(path) == os.devnull):
        raise OSError(errno.EINVAL, "it is a device, a socket or a pipe, not a file", str(path))
    if max_bytes is not None and found.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes; at most {max_bytes:,} are read", str(path))


TOO_LARGE = "raise the limit on the size of files (ulimit -f unlimited)"
TOO_MANY_FILES = "raise the limit on open files (ulimit -n 4096)"
# in messages of HDF5, safetensors, Rust and torch
_ERRNO = re.compile(r"(?:errno = |os error |code: |: [A-Z][\w ]+ \()(\d+)")


class OutOfResources(UserError):
    """Raised when a file cannot be opened for lack of file handles or memory, which says nothing about the file."""


def check_resources(error: BaseException, path: Path) -> None:
    """Raise OutOfResources if reading `path` failed because file handles or memory ran out."""
    found = _ERRNO.search(str(error))
    number = getattr(error, "errno", None) or (int(found[1]) if found else None)
    if number in (errno.EMFILE, errno.ENFILE):
        raise OutOfResources(f"{path} cannot be opened: too many files are open; {TOO_MANY_FILES}") from error
    if number == errno.ENOMEM:
        remedy = "raise the limit on memory (ulimit -v, ulimit -d) or close other programs"
        raise OutOfResources(f"{path} cannot be opened: not enough memory; {remedy}") from error
