"""The canonical store: prepared trials, one HDF5 file per recording session, read at random.

    STORE/manifest.json            layout, splits with content hashes, leakage, one entry per trial
    STORE/quality.csv              every case the quality gate saw
    STORE/sessions/<session>.h5    bins of all trials end to end, statistics of blocks and of what came before

Bins are kept as the source had them. Reading replaces NaN and infinity by 0, and only in trials whose flags
say that they have some.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from pydantic import TypeAdapter, ValidationError

from arcuate.data.alphabet import BLANK, N_CLASSES
from arcuate.data.quality import NON_FINITE
from arcuate.data.readers.source import safe_name
from arcuate.data.splits import hash_bins, hash_trial
from arcuate.data.statistics import Statistics
from arcuate.data.trial import Split, Trial, trial_id
from arcuate.errors import UserError
from arcuate.progress import Progress

__all__ = ["FORMAT", "VERSION", "Statistics", "Store", "TrialInfo", "info_of", "is_store"]

FORMAT = "arcuate store"
VERSION = 1
LOG = "log_"  # prefix of the statistics of logarithms
MANIFEST = "manifest.json"
QUALITY = "quality.csv"
_MAX_MANIFEST = 1_000_000_000
_CACHE = 2**18  # bytes per open session: trials are read at random, so what was read is rarely read again


@dataclass(frozen=True)
class TrialInfo:
    """All about a trial but its bins."""

    id: str
    session: str
    split: Split
    number: int
    block: int
    n_bins: int
    tokens: tuple[int, ...] | None
    text: str | None
    corpus: str | None
    mode: str | None
    usable: bool  # False: the quality gate keeps it out of training
    flags: tuple[str, ...]  # the reasons
    sha256: str = ""  # of bins, tokens and text


def info_of(trial: Trial, flags: tuple[str, ...], bins_hash: bytes) -> TrialInfo:
    """A trial as the manifest lists it, with what the quality gate says about it and the hash of its bins."""
    tokens = None if trial.tokens is None else tuple(int(token) for token in trial.tokens)
    return TrialInfo(
        id=trial.id,
        session=trial.session,
        split=trial.split,
        number=trial.number,
        block=trial.block,
        n_bins=len(trial.bins),
        tokens=tokens,
        text=trial.text,
        corpus=trial.corpus,
        mode=trial.mode,
        usable=not flags,
        flags=flags,
        sha256=hash_trial(bins_hash, tokens, trial.text),
    )


@dataclass(frozen=True)
class _SessionEntry:
    name: str
    n_trials: int
    n_bins: int
    n_bytes: int  # of the file; a copy that broke off is noticed at opening


@dataclass(frozen=True)
class _Place:
    """Where a trial lies in its session's file."""

    session: str
    row: int
    start: int


class _SessionFile:
    """An open session file whose arrays have been checked against the manifest."""

    def __init__(self, path: Path, n_trials: int, n_bins: int, n_channels: int) -> None:
        self.file = h5py.File(path, "r", rdcc_nbytes=_CACHE)
        self.bins = self._array("bins", (n_bins, n_channels), "f")
        self.past = {log: self._pair(log, "past", (n_trials, n_channels)) for log in ("", LOG)}
        self.past_n = self._array("past_n", (n_trials,), "i")[:]
        self.block_of = self._array("block_of", (n_trials,), "i")[:]
        n_blocks = int(self.block_of.max(initial=-1)) + 1
        if n_blocks > n_trials or self.block_of.min(initial=0) < 0:
            raise ValueError("block_of points outside the blocks")
        pairs = {log: self._pair(log, "block", (n_blocks, n_channels)) for log in ("", LOG)}
        self.block = {log: (mean[:], sd[:]) for log, (mean, sd) in pairs.items()}
        self.block_n = self._array("block_n", (n_blocks,), "i")[:]
        for array in (a for pair in self.block.values() for a in pair):
            array.flags.writeable = False  # handed out again and again

    def _pair(self, log: str, name: str, shape: tuple[int, ...]) -> tuple[h5py.Dataset, h5py.Dataset]:
        return self._array(f"{log}{name}_mean", shape, "f"), self._array(f"{log}{name}_sd", shape, "f")

    def _array(self, name: str, shape: tuple[int, ...], kind: str) -> h5py.Dataset:
        links = self.file.id.links
        if not links.exists(name.encode()) or links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
            raise ValueError(f"{name} is missing")
        data = self.file[name]
        plain = isinstance(data, h5py.Dataset) and not data.external and not data.is_virtual
        if not plain or data.shape != shape or data.dtype.kind != kind:
            raise ValueError(f"{name} is not an array of shape {shape}")
        return data


class Store:
    """A prepared data set. Files are opened when first needed; handles never travel between processes."""

    def __init__(
        self,
        path: Path,
        manifest: dict[str, Any],
        sessions: tuple[_SessionEntry, ...],
        trials: tuple[TrialInfo, ...],
    ) -> None:
        self.path = path
        self.manifest = manifest  # all of it but the trials
        self.layout: str = manifest["layout"]
        self.n_channels: int = manifest["n_channels"]
        self.trials = trials
        self.sessions: tuple[str, ...] = tuple(entry.name for entry in sessions)
        self._entries = {entry.name: entry for entry in sessions}
        self._places = _find_places(self.trials)
        self._files: dict[str, _SessionFile] = {}
        self._pid = os.getpid()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Store":
        """Open a prepared store; refuses what is not one, or not a whole one, in one sentence."""
        path = Path(path)
        manifest = _read_manifest(path)
        return cls(path, manifest, *_validated(path, manifest))

    def read_bins(self, info: TrialInfo, out: np.ndarray | None = None) -> np.ndarray:
        """(T, C) float32, into `out` if given; non-finite values of a trial flagged for them come back as 0."""
        bins = self._read_stored(info, out)
        if NON_FINITE in info.flags:
            np.nan_to_num(bins, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        return bins

    def read(self, info: TrialInfo) -> Trial:
        tokens = None if info.tokens is None else np.asarray(info.tokens, dtype=np.int32)
        return Trial(
            info.session,
            info.split,
            info.number,
            info.block,
            self.read_bins(info),
            tokens,
            info.text,
            info.corpus,
            info.mode,
        )

    def block_statistics(self, info: TrialInfo, log: bool = False) -> Statistics:
        """Mean and SD over the trial's block within its source file, the trial itself included.

        `log`: of the logarithms, for a model that takes them (`front_end.log1p`).
        """
        place = self._place(info)
        file = self._open_session(place.session)
        block = int(file.block_of[place.row])
        mean, sd = file.block[LOG if log else ""]
        return Statistics(mean[block], sd[block], int(file.block_n[block]))

    def past_statistics(self, info: TrialInfo, log: bool = False) -> Statistics:
        """Mean and SD over earlier trials of the block, else the previous block, else 0 and 1 with n 0."""
        place = self._place(info)
        file = self._open_session(place.session)
        mean, sd = file.past[LOG if log else ""]
        return Statistics(mean[place.row], sd[place.row], int(file.past_n[place.row]))

    def find_changed(
        self, trials: Sequence[TrialInfo] | None = None, progress: Progress | None = None
    ) -> list[str]:
        """Ids of trials, of all or of those given, whose content no longer has the hash in the manifest."""
        trials = self.trials if trials is None else trials
        changed = []
        for i, info in enumerate(trials, start=1):
            found = hash_trial(hash_bins(self._read_stored(info)), info.tokens, info.text)
            if found != info.sha256:
                changed.append(info.id)
            if progress:
                progress(i, len(trials), "checking trials")
        return changed

    def refuse_changed(self, trials: Sequence[TrialInfo], progress: Progress | None = None) -> None:
        """Nothing is trained or scored on content other than the manifest vouches for."""
        if changed := self.find_changed(trials, progress):
            raise UserError(
                f"{self.path} was changed since it was prepared: {changed[0]} and {len(changed) - 1} more of"
                f" {len(trials)} trials looked at differ from their hash; prepare the source again"
            )

    def close(self) -> None:
        if self._pid == os.getpid():
            for session in self._files.values():
                session.file.close()
        self._files = {}

    def _place(self, info: TrialInfo) -> _Place:
        return self._places[info.id]

    def _read_stored(self, info: TrialInfo, out: np.ndarray | None = None) -> np.ndarray:
        place = self._place(info)
        file = self._open_session(place.session)
        bins = np.empty((info.n_bins, self.n_channels), dtype=np.float32) if out is None else out
        if info.n_bins:
            try:
                file.bins.read_direct(bins, np.s_[place.start : place.start + info.n_bins])
            except (OSError, ValueError, TypeError, RuntimeError) as error:
                raise UserError(f"{self._session_path(place.session)} {_damaged(error)}") from error
        return bins

    def _open_session(self, name: str) -> _SessionFile:
        if self._pid != os.getpid():  # after a fork: the parent's handles are not ours to use
            self._files, self._pid = {}, os.getpid()
        file = self._files.get(name)
        if file is None:
            entry = self._entries[name]
            try:
                file = _SessionFile(self._session_path(name), entry.n_trials, entry.n_bins, self.n_channels)
            except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
                raise UserError(f"{self._session_path(name)} {_damaged(error)}") from error
            self._files[name] = file
        return file

    def _session_path(self, name: str) -> Path:
        return session_path(self.path, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}, "_pid": -1}


def session_path(store: Path, name: str) -> Path:
    return store / "sessions" / f"{name}.h5"


def is_store(path: Path) -> bool:
    """Whether this folder looks like a store, whole or not."""
    try:
        with (path / MANIFEST).open("rb") as stream:
            return FORMAT.encode() in stream.read(200)
    except OSError:
        return False


def _find_places(trials: tuple[TrialInfo, ...]) -> dict[str, _Place]:
    """Trials lie in their session's file in the order of the manifest, end to end."""
    places: dict[str, _Place] = {}
    reached: dict[str, tuple[int, int]] = {}
    for info in trials:
        row, start = reached.get(info.session, (0, 0))
        places[info.id] = _Place(info.session, row, start)
        reached[info.session] = row + 1, start + info.n_bins
    return places


# --- opening a manifest that may be anything ------------------------------------------------------------


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not path.is_dir():
        raise UserError(f"there is no store at {path}; make one with `arcuate prepare SOURCE {path}`")
    if not file.is_file():
        raise UserError(
            f"{path} is not a store (no {MANIFEST}); make one with `arcuate prepare SOURCE STORE`"
        )
    try:
        if file.stat().st_size > _MAX_MANIFEST:
            raise ValueError("too large")
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} {_damaged(error)}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{file} does not belong to a store; make one with `arcuate prepare SOURCE STORE`")
    if manifest.get("version") != VERSION:
        raise UserError(
            f"{path} was prepared by another version (format {manifest.get('version')}, this is {VERSION});"
            " prepare the source again"
        )
    return manifest


_TRIALS = TypeAdapter(tuple[TrialInfo, ...])
_SESSIONS = TypeAdapter(tuple[_SessionEntry, ...])
_CHANNELS = TypeAdapter(int)
_ABOUT = TypeAdapter(dict[str, dict[str, Any]])
_HASHES = TypeAdapter(dict[str, str])


def _validated(
    path: Path, manifest: dict[str, Any]
) -> tuple[tuple[_SessionEntry, ...], tuple[TrialInfo, ...]]:
    """Check the manifest in itself and against the files; its sessions and trials come out typed."""
    try:
        entries = _SESSIONS.validate_python(manifest["sessions"])
        trials = _TRIALS.validate_python(manifest.pop("trials"))
        manifest["n_channels"] = _CHANNELS.validate_python(manifest["n_channels"])
        _HASHES.validate_python(manifest.get("hashes", {}))
        _ABOUT.validate_python({name: manifest[name] for name in ("splits", "leakage") if name in manifest})
        _check_consistency(manifest, entries, trials)
    except (KeyError, ValueError, ValidationError) as error:
        raise UserError(f"{path / MANIFEST} {_damaged(error)}") from error
    for entry in entries:
        file = session_path(path, entry.name)
        size = file.stat().st_size if file.is_file() else None
        if size != entry.n_bytes:
            state = "is missing" if size is None else f"has {size} bytes instead of {entry.n_bytes}"
            raise UserError(f"{file} {state}; copy the store again or prepare the source again")
        _refuse_impossible(file, entry, manifest["n_channels"])
    return entries, trials


def _refuse_impossible(file: Path, entry: _SessionEntry, n_channels: int) -> None:
    """A model is built for the channels of the manifest before a file is opened, so they must be believable."""
    rows = entry.n_bins + 4 * entry.n_trials  # bins, and mean and SD of what came before, twice
    if rows * n_channels * 4 > entry.n_bytes:
        raise UserError(
            f"{file} has {entry.n_bytes} bytes, too few for {n_channels} channels; prepare the source again"
        )


def _check_consistency(
    manifest: dict[str, Any], entries: tuple[_SessionEntry, ...], trials: tuple[TrialInfo, ...]
) -> None:
    if manifest["layout"] not in ("b2t25", "b2t24") or not 1 <= manifest["n_channels"] <= 65536:
        raise ValueError("layout or n_channels is out of range")
    totals = {entry.name: [0, 0] for entry in entries}
    if len(totals) != len(entries) or not all(safe_name(name) for name in totals):
        raise ValueError("session names are not distinct plain names")
    for info in trials:
        if info.session not in totals or info.id != trial_id(info.session, info.split, info.number):
            raise ValueError(f"trial {info.id!r} does not belong")
        if info.n_bins < 0 or any(not BLANK < token < N_CLASSES for token in info.tokens or ()):
            raise ValueError(f"trial {info.id!r} has impossible numbers")
        totals[info.session][0] += 1
        totals[info.session][1] += info.n_bins
    if len({info.id for info in trials}) != len(trials):
        raise ValueError("trial ids are not distinct")
    for entry in entries:
        if totals[entry.name] != [entry.n_trials, entry.n_bins]:
            raise ValueError(f"session {entry.name} does not add up")


def _damaged(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        reason = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    else:
        reason = " ".join(str(error).split())[:150] or type(error).__name__
    return f"is damaged ({reason}); prepare the source again"
