"""Write NWB files with pynwb: time series on one time axis and a trials table, validated against the schema."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from arcuate.data.trial import session_date
from arcuate.errors import UserError


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


def write_nwb(
    path: Path,
    session: str,
    series: Mapping[str, Series],
    times: np.ndarray,
    trial_times: tuple[np.ndarray, np.ndarray],
    columns: Mapping[str, Column],
    notes: str | None = None,
) -> None:
    """Write one session: `times` (T,) are the starts of the bins, `trial_times` the starts and ends of the trials."""
    try:
        from pynwb import NWBHDF5IO, NWBFile, TimeSeries, validate
        from pynwb.file import Subject
    except ImportError:
        raise UserError("NWB files need pynwb; install it with: pip install 'arcuate[data]'") from None

    begin = datetime.combine(session_date(session) or date(1970, 1, 1), datetime.min.time(), UTC)
    file = NWBFile(
        session_description="Prompted sentences with binned neural features.",
        identifier=f"{session} {path.stem}",
        session_start_time=begin,
        session_id=session,
        keywords=["intracortical", "speech", "brain-computer interface"],
        experiment_description="Pauses between trials are not those of the recording: trials are placed 10 s apart.",
        notes=notes,
        subject=Subject(
            subject_id=participant(session), species="Homo sapiens", sex="U", age="P18Y/", description="participant"
        ),
    )
    # A ragged column of empty rows has no type and cannot be written.
    columns = {name: c for name, c in columns.items() if not c.ragged or any(len(value) for value in c.values)}
    for name, column in columns.items():
        file.add_trial_column(name=name, description=column.description, index=column.ragged)
    for i, (start, stop) in enumerate(zip(*trial_times, strict=True)):
        values = {name: column.values[i] for name, column in columns.items()}
        file.add_trial(start_time=float(start), stop_time=float(stop), **values)
    for name, signal in series.items():
        options = {"description": signal.description, "data": signal.data, "unit": signal.unit}
        file.add_acquisition(TimeSeries(name=name, timestamps=times, **options))
    content = BytesIO()  # in memory first, because HDF5 crashes the process if the disk is full
    with h5py.File(content, "w") as storage, NWBHDF5IO(file=storage, mode="w") as writer:
        writer.write(file)
    path.write_bytes(content.getbuffer())
    # Validated against the schema of this pynwb; reading the copy of the schema in the file takes most of a second.
    if problems := validate(path=str(path), use_cached_namespaces=False):
        raise UserError(f"{path.name} does not satisfy the NWB schema: {problems[0]}")
