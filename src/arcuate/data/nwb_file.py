"""Write NWB files with pynwb: time series on one time axis and a trials table, validated against the schema."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from arcuate.data.trial import BIN_SECONDS, session_date
from arcuate.errors import UserError

_PAUSE_BINS = 500  # between trials on the time axis of a file; the true times are not known


@dataclass(frozen=True)
class Series:
    """A time series: one row per bin."""

    description: str
    data: np.ndarray
    unit: str


@dataclass(frozen=True)
class Column:
    """A column of the trials table; a ragged column has an array per trial."""

    description: str
    values: Sequence[Any]
    ragged: bool = False


def participant(session: str) -> str:
    return session.partition(".")[0] or "unknown"


def trial_times(lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start and end of trials of these lengths in s, and the start of every bin; trials are separated by a pause."""
    n_bins = np.asarray(lengths, np.int64)
    ends = np.cumsum(n_bins + _PAUSE_BINS) - _PAUSE_BINS
    starts = ends - n_bins
    ticks = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    return BIN_SECONDS * starts, BIN_SECONDS * ends, BIN_SECONDS * np.concatenate([np.zeros(0, np.int64), *ticks])


def write_nwb(
    path: Path,
    session: str,
    series: Mapping[str, Series],
    times: np.ndarray,
    trials: tuple[np.ndarray, np.ndarray],
    columns: Mapping[str, Column],
    *,
    identifier: str,
    **general: Any,
) -> None:
    """Write one session: `times` (T,) are the starts of the bins, `trials` the starts and ends of the trials.

    `identifier` distinguishes the file from others of the session; `general` are further fields of the NWB file.
    """
    try:
        from hdmf.backends.hdf5 import H5DataIO
        from pynwb import NWBHDF5IO, NWBFile, TimeSeries, validate
        from pynwb.file import Subject
    except ImportError:
        raise UserError("NWB files need pynwb; install it with: pip install 'arcuate[data]'") from None

    begin = datetime.combine(session_date(session) or date(1970, 1, 1), datetime.min.time(), UTC)
    who = {"subject_id": participant(session), "species": "Homo sapiens", "sex": "U", "age": "P18Y/"}
    file = NWBFile(
        session_description="Prompted sentences with binned neural features.",
        identifier=f"{session} {identifier}",
        session_start_time=begin,
        session_id=session,
        keywords=["intracortical", "speech", "brain-computer interface"],
        experiment_description="Trials are placed 10 s apart; the pauses of the recording are not known.",
        subject=Subject(description="participant", **who),
        **general,
    )
    # A ragged column of empty rows has no type and cannot be written.
    columns = {name: c for name, c in columns.items() if not c.ragged or any(len(value) for value in c.values)}
    for name, column in columns.items():
        file.add_trial_column(name=name, description=column.description, index=column.ragged)
    for i, (start, stop) in enumerate(zip(*trials, strict=True)):
        values = {name: column.values[i] for name, column in columns.items()}
        file.add_trial(start_time=float(start), stop_time=float(stop), **values)
    for name, signal in series.items():
        packed = H5DataIO(signal.data, compression="gzip", shuffle=True)
        options = {"description": signal.description, "data": packed, "unit": signal.unit}
        file.add_acquisition(TimeSeries(name=name, timestamps=times, **options))
    content = BytesIO()  # in memory first, because HDF5 crashes the process if the disk is full
    with h5py.File(content, "w") as storage, NWBHDF5IO(file=storage, mode="w") as writer:
        writer.write(file)
    path.write_bytes(content.getbuffer())
    # Validated against the schema of this pynwb; reading the copy of the schema in the file takes most of a second.
    if problems := validate(path=str(path), use_cached_namespaces=False):
        raise UserError(f"{path.name} does not satisfy the NWB schema: {problems[0]}")
