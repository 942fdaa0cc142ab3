"""A reader of recordings in a folder of CSV files.

FOLDER/<session>/<split>/sentences.csv   one line per trial: file,block,text
FOLDER/<session>/<split>/<file>          one line per bin, one column per channel
"""

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from arcuate.data.alphabet import CLASSES
from arcuate.data.readers.source import Problem, ReadResult, Source, SourceFile, UnreadableFile, unreadable
from arcuate.data.text import text_to_tokens
from arcuate.data.trial import SPLITS, Trial, session_order, trial_id
from arcuate.errors import UserError


class CsvFolder:
    """The two functions of a reader: find the files, read their trials one by one."""

    layout = "my-reader"

    def find_source(self, path: Path) -> Source:
        """The recordings below a folder."""
        tables = [
            (path / session.name / split / "sentences.csv", session.name, split)
            for session in sorted(path.iterdir())
            for split in SPLITS
        ]
        files = [SourceFile(session, split, table) for table, session, split in tables if table.is_file()]
        if not files:
            raise UserError(f"no sentences.csv in {path}; expected <session>/<train, val or test>/sentences.csv")
        files.sort(key=lambda file: (session_order(file.session), SPLITS.index(file.split)))
        return Source(self.layout, path, tuple(files), classes=CLASSES)

    def read_trials(self, file: SourceFile) -> Iterator[ReadResult]:
        """The trials of one table; a trial that cannot be read is reported and the next one is read."""
        for number, row in enumerate(self._rows(file)):
            identity = trial_id(file.session, file.split, number)
            try:
                bins = np.loadtxt(file.path.with_name(Path(row["file"]).name), delimiter=",", dtype=np.float32, ndmin=2)
                block = int(row["block"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                yield unreadable(identity, str(error))
                continue
            text = row.get("text") or None
            tokens, unknown = text_to_tokens(text) if text else (None, ())
            problems = (Problem("unknown words", len(unknown), " ".join(unknown), "note"),) if unknown else ()
            label = None if tokens is None else np.array(tokens, np.int32)
            yield ReadResult(identity, Trial(file.session, file.split, number, block, bins, label, text), problems)

    def _rows(self, file: SourceFile) -> list[dict[str, str]]:
        try:
            with file.path.open(encoding="utf-8", newline="") as stream:
                return list(csv.DictReader(stream))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UnreadableFile(str(error)) from error
