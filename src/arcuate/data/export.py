"""Export of a store to other formats: NWB and brainsets (`temporaldata`).

nwb        one file per session; `arcuate prepare --layout nwb` reads it back with equal bins, labels and texts
brainsets  one HDF5 file per session, as `temporaldata` and torch_brain read it
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from arcuate import __version__
from arcuate.data.readers.nwb import NOTES
from arcuate.data.store import Store, TrialInfo
from arcuate.data.trial import BIN_SECONDS, session_date
from arcuate.errors import UserError
from arcuate.files import locked_folder
from arcuate.progress import Progress

FORMATS = ("nwb", "brainsets")
_PAUSE_S = 10.0  # between trials on the time axis of an exported session; stores do not contain the true times


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
    experimenter: str | None = None,
    institution: str | None = None,
    progress: Progress | None = None,
) -> DataExport:
    """Write all trials of a store to the new folder `out` as `to`: nwb or brainsets.

    `experimenter` and `institution` are recorded in NWB files.
    """
    if to not in FORMATS:
        raise UserError(f"format {to!r} is unknown; choose {' or '.join(FORMATS)}")
    _require(to)
    opened = store if isinstance(store, Store) else Store.open(store)
    about = {"experimenter": [experimenter] if experimenter else None, "institution": institution}
    write = _nwb_writer(opened, about) if to == "nwb" else _write_brainsets
    out = Path(out)
    _check_target(out, force)
    files: list[Path] = []
    with locked_folder(out) as folder:
        for i, session in enumerate(opened.sessions):
            if progress:
                progress(i, len(opened.sessions), f"writing {session}")
            files.append(write(folder, opened, session, [t for t in opened.trials if t.session == session]))
        (folder / ".arcuate-export").write_text(f"{to} {__version__}\n", encoding="utf-8")
        _check_target(out, force)  # another process may have written it in the meantime
    return DataExport(out, to, tuple(out / file.name for file in files), len(opened.trials))


def _check_target(out: Path, force: bool) -> None:
    if out.exists() and not (force and (out / ".arcuate-export").is_file()):
        hint = " and is not an earlier export" if force else "; add --force to replace an earlier export"
        raise UserError(f"{out} exists{hint}; choose another folder")


def _require(to: str) -> None:
    module = {"nwb": "pynwb", "brainsets": "temporaldata"}[to]
    try:
        import_module(module)
    except ImportError:
        raise UserError(f"an export to {to} needs {module}; install it with: pip install 'arcuate[data]'") from None


def _session_bins(store: Store, trials: Sequence[TrialInfo]) -> np.ndarray:
    """The bins of all trials of a session as stored, one after another. (T, C)"""
    parts = [np.empty((0, store.n_channels), np.float32), *(store.read_stored(trial) for trial in trials)]
    return np.concatenate(parts)


def _trial_times(trials: Sequence[TrialInfo]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start and end of every trial in s, and the start of every bin; trials are separated by a pause."""
    n_pause = round(_PAUSE_S / BIN_SECONDS)
    lengths = np.array([t.n_bins for t in trials], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths + n_pause)[:-1]]) if len(trials) else lengths
    ticks = [np.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]
    times = BIN_SECONDS * np.concatenate([np.zeros(0, np.int64), *ticks])
    return BIN_SECONDS * starts, BIN_SECONDS * (starts + lengths), times


def _participant(session: str) -> str:
    return session.partition(".")[0] or "unknown"


# --- NWB ----------------------------------------------------------------------------------------------------------

_COLUMNS: dict[str, tuple[str, Callable[[TrialInfo], Any]]] = {
    "text": ("cued sentence; empty if has_text is false", lambda t: t.text or ""),
    "has_text": ("whether the sentence is known", lambda t: t.text is not None),
    "block": ("block number", lambda t: t.block),
    "split": ("train, val or test", lambda t: t.split),
    "number": ("position of the trial in its split", lambda t: t.number),
    "corpus": ("corpus of the sentence; empty if unknown", lambda t: t.corpus or ""),
    "mode": ("speaking mode; empty if unknown", lambda t: t.mode or ""),
    "has_label": ("whether the trial has a label", lambda t: t.tokens is not None),
    "tokens": ("class indices of the label; the notes list the classes", lambda t: np.array(t.tokens or (), np.int64)),
}


def _nwb_writer(store: Store, about: dict[str, Any]) -> Callable[[Path, Store, str, Sequence[TrialInfo]], Path]:
    """A function that writes one session; `about` goes to the general section of the file."""
    from hdmf.backends.hdf5 import H5DataIO
    from pynwb import NWBHDF5IO, NWBFile, TimeSeries, validate
    from pynwb.file import Subject

    notes = {"classes": list(store.classes), "layout": store.layout, "version": __version__}

    def write(folder: Path, store: Store, session: str, trials: Sequence[TrialInfo]) -> Path:
        starts, stops, times = _trial_times(trials)
        begin = datetime.combine(session_date(session) or date(1970, 1, 1), datetime.min.time(), UTC)
        file = NWBFile(
            session_description="Prompted sentences with binned neural features.",
            identifier=f"{session} {store.hashes['train'][:16]}{store.hashes['test'][:16]}",
            session_start_time=begin,
            session_id=session,
            keywords=["intracortical", "speech", "brain-computer interface"],
            experiment_description="Trials are placed 10 s apart; the pauses of the recording are not known.",
            notes=json.dumps({NOTES: notes}),
            subject=Subject(
                subject_id=_participant(session),
                species="Homo sapiens",
                sex="U",
                age="P18Y/",
                description="participant",
            ),
            **about,
        )
        # A ragged column of empty rows has no type and cannot be written.
        names = [name for name in _COLUMNS if name != "tokens" or any(t.tokens for t in trials)]
        for name in names:
            file.add_trial_column(name=name, description=_COLUMNS[name][0], index=name == "tokens")
        for trial, start, stop in zip(trials, starts, stops, strict=True):
            values = {name: _COLUMNS[name][1](trial) for name in names}
            file.add_trial(start_time=float(start), stop_time=float(stop), **values)
        bins = H5DataIO(_session_bins(store, trials), compression="gzip", shuffle=True)
        description = "Features in bins of 20 ms as prepared, one column per channel."
        file.add_acquisition(TimeSeries(name="bins", timestamps=times, description=description, data=bins, unit="a.u."))
        path = folder / f"{session}.nwb"
        content = BytesIO()  # in memory first, because HDF5 crashes the process if the disk is full
        with h5py.File(content, "w") as storage, NWBHDF5IO(file=storage, mode="w") as writer:
            writer.write(file)
        path.write_bytes(content.getbuffer())
        # Validated against the schema of this pynwb; reading the copy of the schema in the file takes most of a second.
        if problems := validate(path=str(path), use_cached_namespaces=False):
            raise UserError(f"{path.name} does not satisfy the NWB schema: {problems[0]}")
        return path

    return write


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
        subject=Data(id=_participant(session), species="HOMO_SAPIENS", domain=domain),
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
