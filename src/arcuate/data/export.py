"""Export of a store to other formats: NWB and brainsets (`temporaldata`).

nwb        one file per session; `arcuate prepare --layout nwb` reads it back with equal bins, labels and texts
brainsets  one HDF5 file per session, as `temporaldata` and torch_brain read it
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np

from arcuate import __version__
from arcuate.data.nwb_file import Column, Series, participant, trial_times, write_nwb
from arcuate.data.readers.nwb import NOTES
from arcuate.data.store import Store, TrialInfo
from arcuate.data.trial import session_date
from arcuate.errors import UserError
from arcuate.files import locked_folder
from arcuate.progress import Progress

_LIBRARIES = {"nwb": "pynwb", "brainsets": "temporaldata"}
_MARKER = ".arcuate-export"


@dataclass(frozen=True)
class DataExport:
    """Result of `export_data`."""

    path: Path
    format: str
    files: tuple[Path, ...]
    n_trials: int

    def summary(self) -> str:
        return f"{self.n_trials} trials in {len(self.files)} files: {self.path}"

    def to_dict(self) -> dict[str, Any]:
        files = [str(file) for file in self.files]
        return {"path": str(self.path), "format": self.format, "files": files, "trials": self.n_trials}


def export_data(
    store: Store | Path | str,
    out: Path | str,
    *,
    to: Literal["nwb", "brainsets"] = "nwb",
    experimenter: str | None = None,
    institution: str | None = None,
    progress: Progress | None = None,
) -> DataExport:
    """Write the trials of a store as NWB or brainsets (temporaldata), one file per session.

    Args:
        store: Prepared store.
        out: Folder to write; an earlier export is replaced.
        to: nwb or brainsets.
        experimenter: Name recorded in NWB files.
        institution: Name recorded in NWB files.
        progress: Called with the number of sessions written so far.
    """
    if to not in _LIBRARIES:
        raise UserError(f"format {to!r} is unknown; choose {' or '.join(_LIBRARIES)}")
    try:
        import_module(_LIBRARIES[to])
    except ImportError:
        library = _LIBRARIES[to]
        raise UserError(f"an export to {to} needs {library}; install it with: pip install 'arcuate[data]'") from None
    opened = store if isinstance(store, Store) else Store.open(store)
    about = {"experimenter": [experimenter] if experimenter else None, "institution": institution}
    out = Path(out)
    _check_target(out)
    files: list[Path] = []
    with locked_folder(out) as folder:
        for i, session in enumerate(opened.sessions):
            if progress:
                progress(i, len(opened.sessions), f"writing {session}")
            trials = [t for t in opened.trials if t.session == session]
            files.append(out / f"{session}.{'nwb' if to == 'nwb' else 'h5'}")
            if to == "nwb":
                _write_nwb(folder / files[-1].name, opened, session, trials, about)
            else:
                _write_brainsets(folder / files[-1].name, opened, session, trials)
        (folder / _MARKER).write_text(f"{to} {__version__}\n", encoding="utf-8")
        _check_target(out)  # another process may have written it in the meantime
    return DataExport(out, to, tuple(files), len(opened.trials))


def _check_target(out: Path) -> None:
    if out.exists() and not (out / _MARKER).is_file():
        raise UserError(f"{out} exists and is not an earlier export; choose another folder")


def _session_bins(store: Store, trials: Sequence[TrialInfo]) -> np.ndarray:
    """The bins of all trials of a session as stored, one after another. (T, C)"""
    parts = [np.empty((0, store.n_channels), np.float32), *(store.read_stored(trial) for trial in trials)]
    return np.concatenate(parts)


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


def _write_nwb(path: Path, store: Store, session: str, trials: Sequence[TrialInfo], about: dict[str, Any]) -> None:
    starts, stops, times = trial_times([t.n_bins for t in trials])
    columns = {
        name: Column(description, [value(t) for t in trials], ragged=name == "tokens")
        for name, (description, value) in _COLUMNS.items()
    }
    description = "Features in bins of 20 ms as prepared, one column per channel."
    series = {"bins": Series(description, _session_bins(store, trials), "a.u.")}
    notes = {"classes": list(store.classes), "layout": store.layout, "version": __version__}
    identifier = "".join(found[:12] for found in store.hashes.values())
    write_nwb(
        *(path, session, series, times, (starts, stops), columns),
        identifier=identifier,
        notes=json.dumps({NOTES: notes}),
        **about,
    )


def _write_brainsets(path: Path, store: Store, session: str, trials: Sequence[TrialInfo]) -> None:
    """One HDF5 file as `temporaldata.Data` writes it: bins as an irregular time series, trials as intervals."""
    from temporaldata import ArrayDict, Data, Interval, IrregularTimeSeries

    starts, stops, times = trial_times([t.n_bins for t in trials])
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
    with h5py.File(path, "w") as file:
        data.to_hdf5(file, serialize_fn_map={})


def _encoded(texts: Iterable[str]) -> np.ndarray:
    """Texts as bytes of UTF-8, the kind of text that HDF5 files of temporaldata hold."""
    return np.array([text.encode() for text in texts], dtype="S")
