"""Check that a downloaded release is complete.

The numbers of sessions, trials and channels are compared with the published ones, and the sizes of archives where they
are published. No checksums are published. Counting opens every file in the reader process but reads no bins.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from arcuate.data.prepare import PrepareReport, inspect_source
from arcuate.data.trial import session_date
from arcuate.errors import UserError
from arcuate.progress import Progress

Status = Literal["ok", "differs", "unknown"]


@dataclass(frozen=True)
class Release:
    """Published properties of a data set."""

    name: str
    doi: str
    layout: str
    n_channels: int
    n_sessions: int
    trials: Mapping[str, int]  # by split
    first: str  # date of the first session
    last: str
    archives: Mapping[str, int] = field(default_factory=dict)  # file -> approximate bytes
    absent: Mapping[str, int] = field(default_factory=dict)  # split -> number of sessions without trials in it


RELEASES = (
    Release(
        "Brain-to-Text '25 (T15)", "10.5061/dryad.dncjsxm85", "b2t25", 512, 45,
        {"train": 8072, "val": 1426, "test": 1450}, "2023-08-11", "2025-04-13",
        {"t15_copyTask_neuralData.zip": 11_050_000_000, "t15_copyTask.pkl": 57_800_000}, {"val": 4, "test": 4},
    ),
    Release(
        "Brain-to-Text '24 (T12)", "10.5061/dryad.x69p8czpq", "b2t24", 256, 24,
        {"train": 8800, "val": 880, "test": 1200}, "2022-04-28", "2022-08-25",
        {"competitionData.tar.gz": 3_670_000_000}, {"test": 9},
    ),
    Release(
        "FALCON H2 (T5 handwriting)", "10.48324/dandi.000950", "falcon-h2", 192, 26, {}, "2022-05-18", "2023-10-09"
    ),
)  # fmt: skip
_SIZE_TOLERANCE = 0.02  # sizes are published with three digits


@dataclass(frozen=True)
class Check:
    """One property of a download."""

    what: str
    found: str
    expected: str
    status: Status


@dataclass(frozen=True)
class Verification:
    """Result of `verify`."""

    path: Path
    release: str
    doi: str
    checks: tuple[Check, ...]

    @property
    def complete(self) -> bool:
        return all(check.status != "differs" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        checks = [vars(check) for check in self.checks]
        return {
            "path": str(self.path),
            "release": self.release,
            "doi": self.doi,
            "complete": self.complete,
            "checks": checks,
        }


def verify(path: str | Path, *, layout: str | None = None, progress: Progress | None = None) -> Verification:
    """Compare the release below `path`, or one of its archives, with the published numbers.

    `layout` is needed for FALCON H2 (falcon-h2); the Brain-to-Text layouts are detected.
    """
    path = Path(path)
    if path.is_file():
        return _verify_archive(path)
    report = inspect_source(path, layout=layout, progress=progress)
    release = next((known for known in RELEASES if known.layout == report.layout), None)
    if release is None:
        raise UserError(f"layout {report.layout} does not belong to a known release, so it cannot be verified")
    return Verification(path, release.name, release.doi, tuple(_compare(report, release)))


def _verify_archive(path: Path) -> Verification:
    for release in RELEASES:
        if path.name in release.archives:
            expected, found = release.archives[path.name], path.stat().st_size
            near = abs(found - expected) <= _SIZE_TOLERANCE * expected
            size = Check("size of the archive", _megabytes(found), f"about {_megabytes(expected)}", _status(near))
            return Verification(path, release.name, release.doi, (size,))
    known = ", ".join(name for release in RELEASES for name in release.archives)
    raise UserError(f"{path.name} is not a known archive; expected {known}, or an unpacked folder")


def _megabytes(n: int) -> str:
    return f"{n / 1e6:,.1f} MB"


def _status(equal: bool) -> Status:
    return "ok" if equal else "differs"


def _compare(report: PrepareReport, release: Release) -> list[Check]:
    checks = [
        _equal("sessions", len(report.sessions), release.n_sessions),
        _equal("channels", report.n_channels or 0, release.n_channels),
    ]
    dates = sorted(str(recorded) for session in report.sessions if (recorded := session_date(session)))
    if dates:
        checks.append(_equal("first session", dates[0], release.first))
        checks.append(_equal("last session", dates[-1], release.last))
    for split, n in release.trials.items():
        checks.append(_equal(f"{split} trials", report.splits[split]["trials"], n))
    without = Counter[str]()
    for split in release.absent:
        for session in report.sessions:
            without[split] += not report.files.get(f"{session}/{split}")
    checks += [_equal(f"sessions without {split} trials", without[split], n) for split, n in release.absent.items()]
    n_unreadable = len(report.unreadable)
    checks.append(_equal("unreadable files", n_unreadable, 0))
    checks.append(Check("checksums", "not compared", "none are published", "unknown"))
    return checks


def _equal(what: str, found: int | str, expected: int | str) -> Check:
    text = lambda value: f"{value:,}" if isinstance(value, int) else value
    return Check(what, text(found), text(expected), _status(found == expected))
