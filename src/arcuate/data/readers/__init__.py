"""Readers of recordings: find the files of a release, count their trials, read them trial by trial.

Two layouts are known: Brain-to-Text '25 (`<session>/data_{train,val,test}.hdf5`) and Brain-to-Text '24
(`{train,test,competitionHoldOut}/<session>.mat`). Every file is treated as possibly damaged or hostile.
"""

from collections.abc import Iterator
from dataclasses import replace

from arcuate.data.readers import b2t24, b2t25
from arcuate.data.readers.find import find_source
from arcuate.data.readers.source import FileSummary, Problem, ReadResult, Source, SourceFile, UnreadableFile

__all__ = [
    "FileSummary",
    "Problem",
    "ReadResult",
    "Source",
    "SourceFile",
    "UnreadableFile",
    "find_source",
    "read_trials",
    "summarise_file",
]


def summarise_file(source: Source, file: SourceFile) -> FileSummary:
    """Number of trials in a file, without reading them."""
    return b2t25.summarise_file(file) if source.layout == "b2t25" else b2t24.summarise_file(file)


def read_trials(source: Source, file: SourceFile, features: str = b2t24.DEFAULT_FEATURES) -> Iterator[ReadResult]:
    """The trials of one file, one at a time; `features` selects features and area of the '24 layout."""
    results = b2t25.read_trials(file) if source.layout == "b2t25" else b2t24.read_trials(file, features)
    for result in results:
        if (trial := result.trial) is not None:
            mode = source.modes.get((trial.session, trial.split, trial.number))
            corpus = source.corpus_of(trial.session, trial.block)
            result = replace(result, trial=replace(trial, mode=mode, corpus=corpus))
        yield result
