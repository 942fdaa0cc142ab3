"""The store: prepared trials, one array of bins per recording session, with random access.

    STORE/manifest.json            layout, alphabet, leakage, one entry per trial, and a hash of all of it
    STORE/quality.csv              every case that the quality checks found
    STORE/sessions/<session>.npy   bins of all trials of a session, one after another: (T, C) float32
    STORE/sessions/<session>.npz   mean and SD of the session's blocks, and of the bins before each trial

Bins are stored as in the source. Reading replaces NaN and infinity by 0 in trials flagged as non-finite. No file stays
open between two reads, so that a store can be used from several processes.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from arcuate.data.alphabet import BLANK, check_alphabet
from arcuate.data.quality import NON_FINITE, Leakage, hash_bins, hash_trial
from arcuate.data.readers.source import is_safe_name
from arcuate.data.statistics import RunningStatistics, Statistics, signed_log
from arcuate.data.trial import LIVE_CORPUS, SPLITS, Layout, Split, Trial, trial_id
from arcuate.errors import UserError, check_regular, check_resources
from arcuate.files import old_folder, read_npz, similar_folder, to_frame
from arcuate.progress import Progress

if TYPE_CHECKING:
    from arcuate.data.prepare import PrepareReport

FORMAT = "arcuate store"
VERSION = 2
LOG_PREFIX = "log_"  # prefix of arrays with statistics of logarithms
MANIFEST_FILE = "manifest.json"
QUALITY_FILE = "quality.csv"
HEADER_BYTES = 128  # of a session's array
_MAX_MANIFEST_BYTES = 1_000_000_000


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


class Manifest(BaseModel):
    """Everything about a store except its bins and statistics."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layout: Layout
    features: str | None = None  # of the '24 layout
    simulated: bool = False
    n_channels: int = Field(ge=1, le=65536)
    classes: tuple[str, ...]  # alphabet of the labels
    leakage: Leakage
    statistics: dict[str, str]  # session -> hash of its file of statistics
    trials: tuple[TrialInfo, ...]  # those of a session in the order of its bins

    @model_validator(mode="after")
    def _is_consistent(self) -> "Manifest":
        n_classes = len(check_alphabet(self.classes))
        if not all(is_safe_name(name) for name in (self.layout, *self.statistics)):
            raise ValueError("the layout or a session has an invalid name")
        if {info.session for info in self.trials} != set(self.statistics):
            raise ValueError("the sessions are not those of the trials")
        for info in self.trials:
            if info.id != trial_id(info.session, info.split, info.number):
                raise ValueError(f"trial {info.id!r} does not match its session, split and number")
            if info.n_bins < 0 or any(not BLANK < token < n_classes for token in info.tokens or ()):
                raise ValueError(f"trial {info.id!r} has a negative length or an invalid token")
        if len({info.id for info in self.trials}) != len(self.trials):
            raise ValueError("trial ids are not distinct")
        return self

    def to_text(self) -> str:
        """The file: one line with format, version and the hash of all other lines, then one line per trial."""
        tree = self.model_dump(mode="json", exclude={"trials"})
        rows = ",\n  ".join(json.dumps(vars(info), ensure_ascii=False) for info in self.trials)
        head = json.dumps(tree, indent=1, ensure_ascii=False).removeprefix("{\n").removesuffix("\n}")
        text = f'{head},\n "trials": [\n  {rows}\n ]\n}}\n'
        return f'{{"format": "{FORMAT}", "version": {VERSION}, "sha256": "{_hash(text.encode())}",\n{text}'


class Store:
    """A prepared data set."""

    report: "PrepareReport"  # what `prepare` found; only the store that it returns has it

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.layout, self.features, self.simulated = manifest.layout, manifest.features, manifest.simulated
        self.n_channels, self.classes = manifest.n_channels, manifest.classes
        self.leakage, self.trials = manifest.leakage, manifest.trials
        self.sessions: tuple[str, ...] = tuple(manifest.statistics)
        self._statistics_hashes = manifest.statistics
        self._locations = _locate_trials(self.trials)
        self._statistics: dict[tuple[str, str], list[np.ndarray]] = {}  # of a session and kind, once read

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Store":
        """Open a prepared store; raises UserError if it is missing, damaged, changed or incomplete."""
        path = Path(path)
        manifest = _read_manifest(path)
        _check_files(path, manifest)
        return cls(path, manifest)

    def __repr__(self) -> str:
        splits = Counter(trial.split for trial in self.trials)
        counts = ", ".join(f"{n:,} {split}" for split, n in splits.items())
        kind = "simulated " if self.simulated else ""
        return (
            f"Store({str(self.path)!r}: {kind}{self.layout}, {len(self.sessions)} sessions, {self.n_channels} channels,"
            f" {len(self.trials):,} trials ({counts}))"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_statistics": {}}

    def to_frame(self) -> Any:
        """One line per trial as a pandas DataFrame."""
        keys = ("id", "session", "split", "block", "number", "n_bins", "text", "corpus", "flags")
        return to_frame({key: getattr(trial, key) for key in keys} for trial in self.trials)

    # --- trials ------------------------------------------------------------------------------------------------

    def read_bins(self, info: TrialInfo, out: np.ndarray | None = None) -> np.ndarray:
        """Bins (T, C) float32, written to `out` if given; non-finite values of flagged trials are replaced by 0."""
        bins = self.read_stored(info, out)
        if NON_FINITE in info.flags:
            np.nan_to_num(bins, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        return bins

    def read_stored(self, info: TrialInfo, out: np.ndarray | None = None) -> np.ndarray:
        """Bins (T, C) float32 exactly as stored, NaN included."""
        path, (_, first) = session_path(self.path, info.session), self._locations[info.id]
        bins = np.empty((info.n_bins, self.n_channels), dtype=np.float32) if out is None else out
        try:
            offset = HEADER_BYTES + 4 * self.n_channels * first
            stored = np.fromfile(path, "<f4", info.n_bins * self.n_channels, offset=offset)
            if stored.size != bins.size:
                raise ValueError("it is truncated")
            bins[...] = stored.reshape(bins.shape)
        except (OSError, ValueError) as error:
            raise self._unreadable(path, error) from error
        return bins

    def read(self, info: TrialInfo) -> Trial:
        """The complete trial."""
        tokens = None if info.tokens is None else np.asarray(info.tokens, dtype=np.int32)
        return Trial(
            *(info.session, info.split, info.number, info.block, self.read_bins(info), tokens),
            *(info.text, info.corpus, info.mode),
        )

    # --- statistics for normalisation --------------------------------------------------------------------------

    def block_statistics(self, info: TrialInfo, log: bool = False) -> Statistics:
        """Mean and SD over the trial's block within its source file, including the trial itself.

        `log`: statistics of the logarithms for a model with `front_end.log1p`.
        """
        return self._read_statistics(info, "block", log)

    def past_statistics(self, info: TrialInfo, log: bool = False) -> Statistics:
        """Mean and SD over earlier trials of the block, else over the previous block, else 0 and 1 with n_bins 0."""
        return self._read_statistics(info, "past", log)

    def _read_statistics(self, info: TrialInfo, kind: str, log: bool) -> Statistics:
        name = f"{LOG_PREFIX if log else ''}{kind}"
        key = info.session, name
        if key not in self._statistics:
            wanted = (f"{name}_mean", f"{name}_sd", f"{kind}_n", "block_of")
            path = statistics_path(self.path, info.session)
            try:
                if _hash(path.read_bytes()) != self._statistics_hashes[info.session]:
                    raise ValueError("the statistics were changed after it was prepared")
                arrays = read_npz(path, wanted)
                self._statistics[key] = self._check_statistics(info.session, kind, [arrays[part] for part in wanted])
            except (OSError, ValueError, KeyError) as error:
                raise self._unreadable(path, error) from error
        mean, sd, n, block_of = self._statistics[key]
        row = self._locations[info.id][0]
        row = int(block_of[row]) if kind == "block" else row
        return Statistics(mean[row], sd[row], int(n[row]))

    def _check_statistics(self, session: str, kind: str, arrays: list[np.ndarray]) -> list[np.ndarray]:
        n_trials = sum(trial.session == session for trial in self.trials)
        n_rows = int(arrays[3].max(initial=-1)) + 1 if kind == "block" else n_trials
        shapes = ((n_rows, self.n_channels), (n_rows, self.n_channels), (n_rows,), (n_trials,))
        if tuple(array.shape for array in arrays) != shapes or any(a.dtype.kind not in "if" for a in arrays):
            raise ValueError(f"its statistics are not arrays of shapes {shapes}")
        for array in arrays:
            array.flags.writeable = False  # shared by all callers
        return arrays

    def _unreadable(self, path: Path, error: Exception) -> UserError:
        if isinstance(error, FileNotFoundError):
            missing = path if self.path.is_dir() else self.path
            return UserError(f"{missing} no longer exists; was the store moved, replaced or its disk unmounted?")
        return _damaged(path, error)

    # --- checks --------------------------------------------------------------------------------------------------

    @cached_property
    def hashes(self) -> dict[str, str]:
        """Hash of each split: all that its trials contribute to training and evaluation."""
        return {split: hash_trials(t for t in self.trials if t.split == split) for split in SPLITS}

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

        `trained_on` is the entry `data` of a run's environment.
        """
        known = trained_on or {}
        if all(info.corpus == LIVE_CORPUS for info in self.trials):
            return  # a live recording contains the bins that the model received
        for name, here in (("layout", self.layout), ("features", self.features)):
            if here is not None and known.get(name) not in (None, here):
                raise UserError(
                    f"the model was trained on {name} {known[name]}, but {self.path.name} has {here}; prepare the data"
                    " as for training"
                )


class ChangedStore(Store):
    """A store whose bins are changed when they are read; nothing is written.

    With `renormalise`, the statistics of a trial are those of the changed trials of its block and split.
    """

    def __init__(self, store: Store, change: Callable[[TrialInfo], np.ndarray], renormalise: bool = False) -> None:
        vars(self).update(vars(store))
        self._change, self._renormalise = change, renormalise
        self._of_block: dict[tuple[str, int, str, bool], Statistics] = {}

    def read_bins(self, info: TrialInfo, out: np.ndarray | None = None) -> np.ndarray:
        bins = self._change(info).astype(np.float32, copy=False)
        if out is None:
            return bins
        out[...] = bins
        return out

    def _read_statistics(self, info: TrialInfo, kind: str, log: bool) -> Statistics:
        if not self._renormalise:
            return super()._read_statistics(info, kind, log)
        key = (info.session, info.block, info.split, log)
        if key not in self._of_block:
            total = RunningStatistics.empty(self.n_channels)
            for trial in self.trials:
                if (trial.session, trial.block, trial.split) == key[:3]:
                    bins = self.read_bins(trial)
                    total = total.merge(RunningStatistics.from_bins(signed_log(bins) if log else bins))
            self._of_block[key] = total.statistics()
        return self._of_block[key]


def session_path(store: Path, name: str) -> Path:
    """The array of a session's bins."""
    return store / "sessions" / f"{name}.npy"


def statistics_path(store: Path, name: str) -> Path:
    return store / "sessions" / f"{name}.npz"


def hash_trials(trials: Iterable[TrialInfo]) -> str:
    """Hash of these trials in any order: bins, labels, texts, blocks, flags; statistics follow from them."""
    return _hash("\n".join(sorted(json.dumps(vars(info), sort_keys=True) for info in trials)).encode())


def is_store(path: Path) -> bool:
    """Whether this folder is a store, possibly an incomplete or damaged one."""
    try:
        check_regular(path / MANIFEST_FILE)
        with (path / MANIFEST_FILE).open("rb") as stream:
            return FORMAT.encode() in stream.read(200)
    except OSError:
        return False


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _locate_trials(trials: Sequence[TrialInfo]) -> dict[str, tuple[int, int]]:
    """By trial id, its position among the trials of its session, and its first bin in the array of the session."""
    locations: dict[str, tuple[int, int]] = {}
    ends: dict[str, tuple[int, int]] = {}
    for info in trials:
        row, first = locations[info.id] = ends.get(info.session, (0, 0))
        ends[info.session] = row + 1, first + info.n_bins
    return locations


# --- validation of a manifest that may be damaged or hostile -----------------------------------------------------


def _read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST_FILE
    if not path.is_dir():
        check_replaced(path)
        near = similar_folder(path, MANIFEST_FILE)
        remedy = f"did you mean {near}?" if near else f"create one with `arcuate prepare SOURCE {path}`"
        raise UserError(f"no store at {path}; {remedy}")
    if not file.is_file():
        raise UserError(f"{path} is not a store (no {MANIFEST_FILE}); create one with `arcuate prepare SOURCE STORE`")
    try:
        check_regular(file, _MAX_MANIFEST_BYTES)
        content = file.read_bytes()
        tree = json.loads(content)
        if not isinstance(tree, dict) or tree.pop("format", None) != FORMAT:
            raise UserError(f"{file} does not belong to a store; create one with `arcuate prepare SOURCE STORE`")
        if (version := tree.pop("version", None)) != VERSION:
            raise UserError(
                f"{path} has store format {version}, this version reads format {VERSION}; prepare the source again"
            )
        if tree.pop("sha256", None) != _hash(content.partition(b"\n")[2]):
            raise UserError(f"{file} was changed after it was prepared; prepare the source again")
        return Manifest.model_validate(tree)
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(file, error) from error


def check_replaced(path: Path) -> None:
    """Raise UserError if `path` is missing because replacing it was interrupted."""
    old = old_folder(path)
    if not path.exists() and is_store(old):
        raise UserError(
            f"replacing {path} was interrupted; its previous content is in {old}; rename or remove that folder"
        )


def _check_files(path: Path, manifest: Manifest) -> None:
    """Find an incomplete copy: the sizes of all arrays follow from the manifest."""
    n_bins: Counter[str] = Counter()
    for info in manifest.trials:
        n_bins[info.session] += info.n_bins
    for session in manifest.statistics:
        file = session_path(path, session)
        for part in (file, statistics_path(path, session)):
            if not part.is_file():
                raise UserError(f"{part} is missing; copy the store again or prepare the source again")
        size, expected = file.stat().st_size, HEADER_BYTES + 4 * manifest.n_channels * n_bins[session]
        if size != expected:
            raise UserError(
                f"{file} has {size} bytes instead of {expected}; copy the store again or prepare the source again"
            )


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
