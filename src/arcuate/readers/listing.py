"""What lies in a release's folders: everything that looks like data is either read or named."""

import os
from collections.abc import Iterator
from pathlib import Path

from arcuate.readers.source import Problem, Reading, printable

_DATA_ENDINGS = (".hdf5", ".h5", ".hdf", ".he5", ".mat", ".nwb")
_NO_RECORDINGS = (".", "__MACOSX", "lost+found")


def names_in(folder: Path, passed: list[Reading]) -> list[str]:
    """Names in a folder, in order; one that cannot be listed is put on record."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith(_NO_RECORDINGS))
    except OSError as error:
        passed.append(unreadable(folder.name, f"the folder cannot be listed: {error.strerror}"))
        return []


def folders_in(root: Path, passed: list[Reading]) -> Iterator[Path]:
    """Sub-folders in order. Links to nothing and data files that stand among them are put on record."""
    for name in names_in(root, passed):
        path = root / name
        if os.path.isdir(path):
            yield path
        elif os.path.islink(path) and not os.path.exists(path):
            passed.append(unreadable(name, "a link to nothing"))
        elif looks_like_data(name):
            passed.append(unrecognised(name, "a data file beside the folders it should be in"))


def looks_like_data(name: str) -> bool:
    return name.lower().endswith(_DATA_ENDINGS)


def unreadable(identity: str, detail: str) -> Reading:
    return Reading(printable(identity), None, (Problem("unreadable", None, detail, "unreadable"),))


def unrecognised(identity: str, detail: str) -> Reading:
    return Reading(printable(identity), None, (Problem("unrecognised file", None, detail, "ignored"),))
