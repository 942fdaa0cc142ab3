"""The store: prepared trials, one HDF5 file per recording session, with random access.

    STORE/manifest.json            layout, alphabet, splits with content hashes, leakage, one entry per trial
    STORE/quality.csv              every case that the quality checks found
    STORE/sessions/<session>.h5    concatenated bins of all trials, statistics of blocks and of earlier trials

Bins are stored as in the source. Reading replaces NaN and infinity by 0 in trials flagged as non-finite.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
from pydantic import TypeAdapter, ValidationError

from arcuate.data.alphabet import BLANK, CLASSES, check_alphabet
from arcuate.data.quality import NON_FINITE, hash_arrays, hash_bins, hash_split, hash_trial
from arcuate.data.readers.source import is_safe_name
from arcuate.data.statistics import Statistics
from arcuate.data.trial import LAYOUTS, LIVE_CORPUS, Layout, Split, Trial, trial_id
from arcuate.errors import UserError, check_regular, check_resources
from arcuate.files import old_folder, similar_folder, to_frame
from arcuate.progress import Progress

if TYPE_CHECKING:
    from arcuate.data.prepare import PrepareReport

FORMAT = "arcuate store"
VERSION = 1
LOG_PREFIX = "log_"  # prefix of arrays with statistics of logarithms
MANIFEST_FILE = "manifest.json"
QUALITY_FILE = "quality.csv"
_MAX_MANIFEST_BYTES = 1_000_000_000
_CACHE_BYTES = 2**18  # per open session; small, because random access rarely returns to a chunk


@dataclass(frozen=True)
class TrialInfo:
    """Everything about a trial except its bins."""

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
    usable: bool  # False: excluded from training
    flags: tuple[str, ...]  # reasons, see `arcuate.data.quality`
    sha256: str = ""  # hash of bins, tokens and text


def trial_info(trial: Trial, flags: tuple[str, ...], bins_hash: bytes) -> TrialInfo:
    """The manifest entry of a trial, given its quality flags and the hash of its bins."""
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
class SessionInfo:
    """The manifest entry of one session file."""

    name: str
    n_trials: int
    n_bins: int
    n_bytes: int  # file size, to detect an incomplete copy
    statistics: str = ""  # hash of the block and past statistics; empty in stores of earlier versions


@dataclass(frozen=True)
class _TrialLocation:
    """Where a trial is stored in its session's file."""

    session: str
    row: int  # index among the trials of the session
    start: int  # first bin


class _SessionFile:
    """An open session file; its arrays are checked against the manifest."""

    def __init__(self, path: Path, entry: SessionInfo, n_channels: int) -> None:
        n_trials, n_bins = entry.n_trials, entry.n_bins
        check_regular(path)
        self.file = h5py.File(path, rdcc_nbytes=_CACHE_BYTES)
        self.bins = self._array("bins", (n_bins, n_channels), "f")
        self.past = {log: self._pair(log, "past", (n_trials, n_channels)) for log in ("", LOG_PREFIX)}
        self.past_n = self._array("past_n", (n_trials,), "i")[:]
        self.block_of = self._array("block_of", (n_trials,), "i")[:]
        n_blocks = int(self.block_of.max(initial=-1)) + 1
        if n_blocks > n_trials or self.block_of.min(initial=0) < 0:
            raise ValueError("block_of points outside the blocks")
        pairs = {log: self._pair(log, "block", (n_blocks, n_channels)) for log in ("", LOG_PREFIX)}
        self.block = {log: (mean[:], sd[:]) for log, (mean, sd) in pairs.items()}
        self.block_n = self._array("block_n", (n_blocks,), "i")[:]
        for array in (a for pair in self.block.values() for a in pair):
            array.flags.writeable = False  # shared by all callers
        self._check_statistics(entry)

    def _check_statistics(self, entry: SessionInfo) -> None:
        """Verify the statistics, because they affect scores through normalisation."""
        arrays: dict[str, np.ndarray] = {"block_of": self.block_of, "block_n": self.block_n, "past_n": self.past_n}
        for name, pairs in (("block", self.block), ("past", self.past)):
            for log, (mean, sd) in pairs.items():
                arrays |= {f"{log}{name}_mean": mean[:], f"{log}{name}_sd": sd[:]}
        for name, array in arrays.items():
            if not np.isfinite(array).all() or (name.endswith(("_sd", "_n")) and array.min(initial=0) < 0):
                raise ValueError(f"{name} contains invalid statistics")
        if entry.statistics and hash_arrays(arrays) != entry.statistics:
            raise ValueError("its block statistics were changed after it was prepared")

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
    """A prepared data set. Files are opened on first use; handles are never shared between processes."""

    def __init__(
        self, path: Path, manifest: dict[str, Any], sessions: tuple[SessionInfo, ...], trials: tuple[TrialInfo, ...]
    ) -> None:
        self.path = path
        self.manifest = manifest  # without the trials
        self.layout: Layout = manifest["layout"]
        self.n_channels: int = manifest["n_channels"]
        self.classes: tuple[str, ...] = manifest["classes"]  # alphabet of the labels
        self.simulated: bool = manifest.get("simulated") is True  # earlier versions did not record it
        self.trials = trials
        self.sessions: tuple[str, ...] = tuple(entry.name for entry in sessions)
        self.report: PrepareReport | None = None  # set by `prepare`
        self._session_infos = {info.name: info for info in sessions}
        self._locations = _locate_trials(self.trials)
        self._files: dict[str, _SessionFile] = {}
        self._pid = os.getpid()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Store":
        """Open a prepared store; raises UserError if it is missing, damaged or incomplete."""
        path = Path(path)
        manifest = _read_manifest(path)
        return cls(path, manifest, *_check_manifest(path, manifest))

    def __repr__(self) -> str:
        splits = Counter(trial.split for trial in self.trials)
        counts = ", ".join(f"{n:,} {split}" for split, n in splits.items())
        kind = "simulated " if self.simulated else ""
        return (
            f"Store({str(self.path)!r}: {kind}{self.layout}, {len(self.sessions)} sessions, {self.n_channels} channels,"
            f" {len(self.trials):,} trials ({counts}))"
        )

    def to_frame(self) -> Any:
        """One line per trial as a pandas DataFrame."""
        keys = ("id", "session", "split", "block", "number", "n_bins", "text", "corpus", "flags")
        return to_frame({key: getattr(trial, key) for key in keys} for trial in self.trials)

    def read_bins(self, info: TrialInfo, out: np.ndarray | None = None) -> np.ndarray:
        """Bins (T, C) float32, written to `out` if given; non-finite values of flagged trials are replaced by 0."""
        bins = self.read_stored(info, out)
        if NON_FINITE in info.flags:
            np.nan_to_num(bins, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        return bins

    def read(self, info: TrialInfo) -> Trial:
        """The complete trial."""
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
        """Mean and SD over the trial's block within its source file, including the trial itself.

        `log`: statistics of the logarithms for a model with `front_end.log1p`.
        """
        file, location = self._locate(info)
        block = int(file.block_of[location.row])
        mean, sd = file.block[LOG_PREFIX if log else ""]
        return Statistics(mean[block], sd[block], int(file.block_n[block]))

    def past_statistics(self, info: TrialInfo, log: bool = False) -> Statistics:
        """Mean and SD over earlier trials of the block, else over the previous block, else 0 and 1 with n_bins 0."""
        file, location = self._locate(info)
        mean, sd = file.past[LOG_PREFIX if log else ""]
        return Statistics(mean[location.row], sd[location.row], int(file.past_n[location.row]))

    def find_changed(self, trials: Sequence[TrialInfo] | None = None, progress: Progress | None = None) -> list[str]:
        """Ids of the given trials (default: all) whose content does not match the hash in the manifest."""
        trials = self.trials if trials is None else trials
        changed = []
        for i, info in enumerate(trials, start=1):
            found = hash_trial(hash_bins(self.read_stored(info)), info.tokens, info.text)
            if found != info.sha256:
                changed.append(info.id)
            if progress:
                progress(i, len(trials), "checking trials")
        return changed

    def check_unchanged(self, trials: Sequence[TrialInfo], progress: Progress | None = None) -> None:
        """Raise UserError if the content of a trial does not match the hash in the manifest."""
        if changed := self.find_changed(trials, progress):
            raise UserError(
                f"{self.path} was changed after it was prepared: {len(changed)} of {len(trials)} checked"
                f" trials differ from their hash (first: {changed[0]}); prepare the source again"
            )

    @property
    def statistics_hash(self) -> str | None:
        """Hash of the statistics of all sessions; None for a store of an earlier version."""
        hashes = [info.statistics for info in self._session_infos.values()]
        return hash_split(hashes) if all(hashes) else None

    def check_classes(self, classes: Sequence[str]) -> None:
        """Raise UserError if the classes of a model differ from those of the labels in this store."""
        if tuple(classes) != self.classes and any(info.tokens for info in self.trials):
            raise UserError(
                f"the model has the {len(classes)} classes {_shorten(classes)}, but the labels of {self.path.name} have"
                f" the {len(self.classes)} classes {_shorten(self.classes)}; prepare the data with the alphabet of the"
                " model, or train a model on this data"
            )

    def check_trained_on(self, trained_on: Mapping[str, Any] | None) -> None:
        """Raise UserError if a model was trained on features or electrodes that differ from those of this store.

        `trained_on` is the entry `data` of a run's environment; what an earlier version did not record is not compared.
        """
        known = trained_on or {}
        if all(info.corpus == LIVE_CORPUS for info in self.trials):
            return  # a live recording contains the bins that the model received
        for name, here in (("layout", self.layout), ("features", self.manifest.get("features"))):
            if here is not None and known.get(name) not in (None, here):
                raise UserError(
                    f"the model was trained on {name} {known[name]}, but {self.path.name} has {here}; prepare the data"
                    " as for training"
                )

    def close(self) -> None:
        if self._pid == os.getpid():
            for session in self._files.values():
                session.file.close()
        self._files = {}

    def read_stored(self, info: TrialInfo, out: np.ndarray | None = None) -> np.ndarray:
        """Bins (T, C) float32 exactly as stored, NaN included."""
        file, location = self._locate(info)
        bins = np.empty((info.n_bins, self.n_channels), dtype=np.float32) if out is None else out
        if info.n_bins:
            try:
                file.bins.read_direct(bins, np.s_[location.start : location.start + info.n_bins])
            except (OSError, ValueError, TypeError, RuntimeError) as error:
                raise _damaged(session_path(self.path, location.session), error) from error
        return bins

    def _locate(self, info: TrialInfo) -> tuple[_SessionFile, _TrialLocation]:
        """The open file of a trial's session, and where the trial is stored in it."""
        if self._pid != os.getpid():  # after a fork, the parent's handles must not be used
            self._files, self._pid = {}, os.getpid()
        location = self._locations[info.id]
        file = self._files.get(location.session)
        if file is None:
            entry, path = self._session_infos[location.session], session_path(self.path, location.session)
            try:
                file = _SessionFile(path, entry, self.n_channels)
            except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
                raise _damaged(path, error) from error
            self._files[location.session] = file
        return file, location

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}, "_pid": -1}


def session_path(store: Path, name: str) -> Path:
    return store / "sessions" / f"{name}.h5"


def is_store(path: Path) -> bool:
    """Whether this folder is a store, possibly an incomplete or damaged one."""
    try:
        check_regular(path / MANIFEST_FILE)
        with (path / MANIFEST_FILE).open("rb") as stream:
            return FORMAT.encode() in stream.read(200)
    except OSError:
        return False


def _locate_trials(trials: tuple[TrialInfo, ...]) -> dict[str, _TrialLocation]:
    """Trials are concatenated in their session's file in the order of the manifest."""
    locations: dict[str, _TrialLocation] = {}
    ends: dict[str, tuple[int, int]] = {}
    for info in trials:
        row, start = ends.get(info.session, (0, 0))
        locations[info.id] = _TrialLocation(info.session, row, start)
        ends[info.session] = row + 1, start + info.n_bins
    return locations


# --- validation of a manifest that may be damaged or hostile ---------------------------------------------


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST_FILE
    if not path.is_dir() and is_store(old_folder(path)):
        raise UserError(
            f"replacing {path} was interrupted; its previous content is in {old_folder(path)}; rename that folder or"
            " prepare again"
        )
    if not path.is_dir():
        near = similar_folder(path, MANIFEST_FILE)
        remedy = f"did you mean {near}?" if near else f"create one with `arcuate prepare SOURCE {path}`"
        raise UserError(f"no store at {path}; {remedy}")
    if not file.is_file():
        raise UserError(f"{path} is not a store (no {MANIFEST_FILE}); create one with `arcuate prepare SOURCE STORE`")
    try:
        if file.stat().st_size > _MAX_MANIFEST_BYTES:
            raise ValueError("too large")
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(file, error) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{file} does not belong to a store; create one with `arcuate prepare SOURCE STORE`")
    if manifest.get("version") != VERSION:
        raise UserError(
            f"{path} has store format {manifest.get('version')}, this version reads format {VERSION};"
            " prepare the source again"
        )
    return manifest


_TRIALS = TypeAdapter(tuple[TrialInfo, ...])
_SESSIONS = TypeAdapter(tuple[SessionInfo, ...])
_CHANNELS = TypeAdapter(int)
_CLASSES = TypeAdapter(tuple[str, ...])
_SECTIONS = TypeAdapter(dict[str, dict[str, Any]])
_HASHES = TypeAdapter(dict[str, str])


def _check_manifest(path: Path, manifest: dict[str, Any]) -> tuple[tuple[SessionInfo, ...], tuple[TrialInfo, ...]]:
    """Validate the manifest itself and against the files; returns its sessions and trials."""
    try:
        entries = _SESSIONS.validate_python(manifest["sessions"])
        trials = _TRIALS.validate_python(manifest.pop("trials"))
        manifest["n_channels"] = _CHANNELS.validate_python(manifest["n_channels"])
        # Stores of earlier versions hold phonemes and do not name them.
        manifest["classes"] = check_alphabet(_CLASSES.validate_python(manifest.get("classes", CLASSES)))
        _HASHES.validate_python(manifest.get("hashes", {}))
        _SECTIONS.validate_python({name: manifest[name] for name in ("splits", "leakage") if name in manifest})
        _check_consistency(manifest, entries, trials)
    except (KeyError, ValueError, ValidationError) as error:
        raise _damaged(path / MANIFEST_FILE, error) from error
    for entry in entries:
        file = session_path(path, entry.name)
        size = file.stat().st_size if file.is_file() else None
        if size != entry.n_bytes:
            state = "is missing" if size is None else f"has {size} bytes instead of {entry.n_bytes}"
            raise UserError(f"{file} {state}; copy the store again or prepare the source again")
        _check_file_size(file, entry, manifest["n_channels"])
    return entries, trials


def _check_file_size(file: Path, entry: SessionInfo, n_channels: int) -> None:
    """A model is built for `n_channels` before a file is opened, so the number has to fit the file size."""
    rows = entry.n_bins + 4 * entry.n_trials  # bins, and mean and SD of earlier trials, plain and of logarithms
    if rows * n_channels * 4 > entry.n_bytes:
        raise UserError(
            f"{file} has {entry.n_bytes} bytes, too few for {n_channels} channels; prepare the source again"
        )


def _check_consistency(
    manifest: dict[str, Any], entries: tuple[SessionInfo, ...], trials: tuple[TrialInfo, ...]
) -> None:
    layout, n_classes = manifest["layout"], len(manifest["classes"])
    known = (*LAYOUTS, manifest.get("reader"))  # stores of other layouts record their reader
    if layout not in known or not is_safe_name(str(layout)) or not 1 <= manifest["n_channels"] <= 65536:
        raise ValueError("layout or n_channels is out of range")
    totals = {entry.name: [0, 0] for entry in entries}
    if len(totals) != len(entries) or not all(is_safe_name(name) for name in totals):
        raise ValueError("session names are not distinct plain names")
    for info in trials:
        if info.session not in totals or info.id != trial_id(info.session, info.split, info.number):
            raise ValueError(f"trial {info.id!r} does not match its session, split and number")
        if info.n_bins < 0 or any(not BLANK < token < n_classes for token in info.tokens or ()):
            raise ValueError(f"trial {info.id!r} has a negative length or an invalid token")
        totals[info.session][0] += 1
        totals[info.session][1] += info.n_bins
    if len({info.id for info in trials}) != len(trials):
        raise ValueError("trial ids are not distinct")
    for entry in entries:
        if totals[entry.name] != [entry.n_trials, entry.n_bins]:
            raise ValueError(f"trial or bin count of session {entry.name} does not match its trials")


def _shorten(classes: Sequence[str]) -> str:
    return " ".join(classes[:4]) + (" …" if len(classes) > 4 else "")


def _damaged(file: Path, error: Exception) -> UserError:
    check_resources(error, file)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        reason = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    else:
        reason = " ".join(str(error).split())[:150] or type(error).__name__
    return UserError(f"{file} is damaged ({reason}); prepare the source again")
