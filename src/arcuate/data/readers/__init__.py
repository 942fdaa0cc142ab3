"""Readers of foreign recordings: find them, summarise_file them, read_trials them trial by trial.

Two layouts are known: Brain-to-Text '25 (`<session>/data_{train,val,test}.hdf5`) and Brain-to-Text '24
(`{train,test,competitionHoldOut}/<session>.mat`). Every file is taken as possibly broken or hostile.
"""

from collections.abc import Iterator
from dataclasses import replace

from arcuate.data.readers import b2t24, b2t25
from arcuate.data.readers.find import find_source
from arcuate.data.readers.source import (
    FileSummary,
    Problem,
    ReadResult,
    Source,
    SourceFile,
    UnreadableFile,
)

__all__ = [
    "Problem",
    "ReadResult",
    "Source",
    "SourceFile",
    "FileSummary",
    "UnreadableFile",
    "count_channels",
    "find_source",
    "read",
    "survey",
]


def summarise_file(source: Source, file: SourceFile) -> FileSummary:
    """How many trials a file holds, without reading them."""
    return b2t25.survey(file) if source.layout == "b2t25" else b2t24.survey(file)


def read_trials(
    source: Source, file: SourceFile, features: str = b2t24.DEFAULT_FEATURES
) -> Iterator[ReadResult]:
    """The trials of one file, one at a time; `features` chooses what the '24 layout offers."""
    readings = b2t25.read(file) if source.layout == "b2t25" else b2t24.read(file, features)
    for reading in readings:
        trial = reading.trial
        if trial is not None:
            mode = source.modes.get((trial.session, trial.split, trial.number))
            corpus = source.corpus_of(trial.session, trial.block)
            reading = replace(reading, trial=replace(trial, mode=mode, corpus=corpus))
        yield reading


def count_channels(
    source: Source, file: SourceFile, features: str = b2t24.DEFAULT_FEATURES
) -> dict[int, int]:
    """How many trials of a file have how many channels; reads the file where the layout keeps it secret."""
    if source.layout == "b2t25":
        return dict(b2t25.survey(file).n_channels)
    return b2t24.count_channels(file, features)
