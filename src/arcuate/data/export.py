"""Export of a store to other formats: NWB, brainsets (`temporaldata`), Parquet with .npz.

nwb        one file per session; `arcuate prepare --layout nwb` reads it back with equal bins, labels and texts
brainsets  one HDF5 file per session, as `temporaldata` and torch_brain read it
parquet    trials.parquet, and the bins of each session in an .npz file
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from arcuate import __version__
from arcuate.data.alphabet import token_names
from arcuate.data.nwb_file import Column, Series, participant, write_nwb
from arcuate.data.readers.nwb import NOTES
from arcuate.data.store import Store, TrialInfo
from arcuate.data.trial import BIN_SECONDS, session_date
from arcuate.errors import UserError
from arcuate.files import locked_folder, save_npz
from arcuate.progress import Progress

FORMATS = ("nwb", "brainsets", "parquet")
_PAUSE_S = 10.0  # pause between trials on the time axis of an exported session; stores do not contain the true times


@dataclass(frozen=True)
class DataExport:
    """Result of `export_data`."""

    path: Path
    format: str
    files: tuple[Path, ...]
    n_trials: int

    def to_dict(self) -> dict[str, Any]:
        files = [str(file) for file in self.files]
        return {"path": str(self.path), "format": self.format, "files": files, "trials": self.n_trials}


def export_data(
    store: Store | str | Path,
    out: str | Path,
    *,
    to: str = "nwb",
    force: bool = False,
    progress: Progress | None = None,
) -> DataExport:
    """Write all trials of a store to the new folder `out` as `to`: nwb, brainsets or parquet."""
    if to not in FORMATS:
        raise UserError(f"--to {to!r} is unknown; choose {', '.join(FORMATS)}")
    write = {"nwb": _write_nwb, "brainsets": _write_brainsets, "parquet": _write_parquet}[to]
    _require(to)
    opened = store if isinstance(store, Store) else Store.open(store)
    out = Path(out)
    _check_target(out, force)
    files: list[Path] = []
    with locked_folder(out) as folder:
        for i, session in enumerate(opened.sessions):
            if progress:
                progress(i, len(opened.sessions), f"writing {session}")
            files.append(write(folder, opened, session, [t for t in opened.trials if t.session == session]))
        if to == "parquet":
            files.append(_write_table(folder, opened))
        (folder / ".arcuate-export").write_text(f"{to} {__version__}\n", encoding="utf-8")
        _check_target(out, force)  # another process may have written it in the meantime
    return DataExport(out, to, tuple(out / file.name for file in files), len(opened.trials))


def _check_target(out: Path, force: bool) -> None:
    if out.exists() and not (force and (out / ".arcuate-export").is_file()):
        hint = " and is not an earlier export" if force else "; add --force to replace an earlier export"
        raise UserError(f"{out} exists{hint}; choose another folder")


def _require(to: str) -> None:
    module = {"nwb": "pynwb", "brainsets": "temporaldata", "parquet": "pyarrow"}[to]
    try:
        import_module(module)
    except ImportError:
        raise UserError(f"--to {to} needs {module}; install it with: pip install 'arcuate[{to}]'") from None


def _session_bins(store: Store, trials: Sequence[TrialInfo]) -> np.ndarray:
    """The bins of all trials of a session as stored, one after another. (T, C)"""
    bins = np.empty((sum(t.n_bins for t in trials), store.n_channels), np.float32)
    first = 0
    for trial in trials:
        bins[first : first + trial.n_bins] = store.read_stored(trial)
        first += trial.n_bins
    return bins


def _trial_times(trials: Sequence[TrialInfo]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start and end of every trial in s, and the start of every bin; trials are separated by a pause."""
    n_pause = round(_PAUSE_S / BIN_SECONDS)
    lengths = np.array([t.n_bins for t in trials], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths + n_pause)[:-1]]) if len(trials) else lengths
    ticks = [np.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]
    times = BIN_SECONDS * np.concatenate([np.zeros(0, np.int64), *ticks])
    return BIN_SECONDS * starts, BIN_SECONDS * (starts + lengths), times


# --- NWB ----------------------------------------------------------------------------------------------------------


def _write_nwb(folder: Path, store: Store, session: str, trials: Sequence[TrialInfo]) -> Path:
    """One NWB file, validated against the schema after it is written."""
    notes = {"classes": list(store.classes), "layout": store.layout, "version": __version__}
    starts, stops, times = _trial_times(trials)
    columns = {
        "text": Column("cued sentence; empty if has_text is false", [t.text or "" for t in trials]),
        "has_text": Column("whether the sentence is known", [t.text is not None for t in trials]),
        "block": Column("block number", [t.block for t in trials]),
        "split": Column("train, val or test", [t.split for t in trials]),
        "number": Column("position of the trial in its split", [t.number for t in trials]),
        "corpus": Column("corpus of the sentence; empty if unknown", [t.corpus or "" for t in trials]),
        "mode": Column("speaking mode; empty if unknown", [t.mode or "" for t in trials]),
        "has_label": Column("whether the trial has a label", [t.tokens is not None for t in trials]),
        "tokens": Column(
            "class indices of the label; the notes list the classes",
            [np.array(t.tokens or (), np.int64) for t in trials],
            ragged=True,
        ),
    }
    description = "Features in bins of 20 ms as prepared, one column per channel."
    series = {"bins": Series(description, _session_bins(store, trials), "a.u.")}
    path = folder / f"{session}.nwb"
    write_nwb(path, session, series, times, (starts, stops), columns, json.dumps({NOTES: notes}))
    return path


# --- brainsets ----------------------------------------------------------------------------------------------------


def _write_brainsets(folder: Path, store: Store, session: str, trials: Sequence[TrialInfo]) -> Path:
    """One HDF5 file as `temporaldata.Data` writes it: bins as an irregular time series, trials as intervals."""
    from temporaldata import ArrayDict, Data, Interval, IrregularTimeSeries

    starts, stops, times = _trial_times(trials)
    lengths = [len(t.tokens or ()) for t in trials]
    tokens = np.zeros((len(trials), max(lengths, default=0) or 1), np.int64)
    for row, trial in zip(tokens, trials, strict=True):
        row[: len(trial.tokens or ())] = trial.tokens or ()

    def members(split: str) -> Interval:
        chosen = np.array([t.split == split for t in trials], bool)
        return Interval(start=starts[chosen], end=stops[chosen])

    domain = Interval(start=starts, end=stops)
    data = Data(
        brainset=Data(id="arcuate", origin_version=__version__, source=store.path.name, description="", domain=domain),
        subject=Data(id=participant(session), species="HOMO_SAPIENS", domain=domain),
        session=Data(id=session, recording_date=str(session_date(session) or ""), domain=domain),
        units=ArrayDict(id=_encoded(f"{session}/channel {i}" for i in range(store.n_channels))),
        bins=IrregularTimeSeries(timestamps=times, values=_session_bins(store, trials), domain=domain),
        trials=Interval(
            start=starts,
            end=stops,
            text=_encoded(t.text or "" for t in trials),
            tokens=tokens,
            n_tokens=np.array(lengths, np.int64),
            block=np.array([t.block for t in trials], np.int64),
            number=np.array([t.number for t in trials], np.int64),
            split=_encoded(t.split for t in trials),
        ),
        classes=ArrayDict(name=_encoded(store.classes)),
        train_domain=members("train"),
        valid_domain=members("val"),
        test_domain=members("test"),
        domain=domain,
    )
    path = folder / f"{session}.h5"
    with h5py.File(path, "w") as file:
        data.to_hdf5(file, serialize_fn_map={})
    return path


def _encoded(texts: Iterable[str]) -> np.ndarray:
    """Texts as bytes of UTF-8, the kind of text that HDF5 files of temporaldata hold."""
    return np.array([text.encode() for text in texts], dtype="S")


# --- Parquet --------------------------------------------------------------------------------------------------------


def _write_parquet(folder: Path, store: Store, session: str, trials: Sequence[TrialInfo]) -> Path:
    """The bins of a session; trial i is bins[ends[i - 1]:ends[i]]."""
    ends = np.cumsum([t.n_bins for t in trials], dtype=np.int64)
    path = folder / f"{session}.npz"
    save_npz(path, {"bins": _session_bins(store, trials), "ends": ends, "trials": np.array([t.id for t in trials])})
    return path


def _write_table(folder: Path, store: Store) -> Path:
    """One row per trial, in the order of the .npz files."""
    import pyarrow as pa
    from pyarrow import parquet

    columns: dict[str, list[Any]] = {
        "trial": [t.id for t in store.trials],
        "session": [t.session for t in store.trials],
        "split": [t.split for t in store.trials],
        "number": [t.number for t in store.trials],
        "block": [t.block for t in store.trials],
        "n_bins": [t.n_bins for t in store.trials],
        "text": [t.text for t in store.trials],
        "tokens": [None if t.tokens is None else list(t.tokens) for t in store.trials],
        "token_names": [None if t.tokens is None else token_names(t.tokens, store.classes) for t in store.trials],
        "corpus": [t.corpus for t in store.trials],
        "mode": [t.mode for t in store.trials],
        "usable": [t.usable for t in store.trials],
        "flags": [list(t.flags) for t in store.trials],
        "sha256": [t.sha256 for t in store.trials],
    }
    about = {"classes": list(store.classes), "layout": store.layout, "bin_seconds": BIN_SECONDS}
    schema_notes = {b"arcuate": json.dumps(about).encode()}
    path = folder / "trials.parquet"
    parquet.write_table(pa.table(columns).replace_schema_metadata(schema_notes), path)
    return path
