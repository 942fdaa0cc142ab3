"""Columns to runs: which column plays which part, on which axis, and where a new run begins."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from arcuate.insight.doctor.columns import Collector, Column, Key
from arcuate.insight.doctor.curve import Log, Series
from arcuate.insight.doctor.names import read_name

NEAR_START = 0.05  # of the steps reached: a counter that falls back to below this started again
SHUFFLED = 0.2  # share of falling steps from which on the order of a file means nothing
SPARSE = 0.3  # share of NaN, in many separate stretches, from which on NaN means no value
ABSURD = 100.0  # an error rate of a hundred insertions for every phoneme was never measured
PARTS = ("per", "val_loss", "train_loss", "grad_norm", "lr")


@dataclass(frozen=True)
class Piece:
    """One column on its axis: points in the order of the file."""

    rows: np.ndarray
    steps: np.ndarray
    values: np.ndarray
    unit: str


def assemble(collector: Collector, name: str = "") -> list[Log]:
    """The runs of a file, in their order; runs without a single value are left out."""
    groups: dict[str, dict[Key, Column]] = {}
    for key, column in collector.columns.items():
        groups.setdefault(key.group, {})[key] = column
    logs = []
    for group, columns in groups.items():
        told: list[str] = []
        runs = separate(choose(columns, told), f"{name} {group}".strip() if len(groups) > 1 else name)
        logs += [replace(run, notes=tuple(dict.fromkeys(told))) for run in runs]
        collector.facts.setdefault("impossible", []).extend(told)
    return [log for log in logs if not log.empty]


def choose(columns: Mapping[Key, Column], told: list[str]) -> dict[str, Piece]:
    """For each part the column whose name fits best; the error rate's name tells what was found."""
    found: dict[str, Piece] = {}
    losses = _sides(columns)
    for part, candidates in (
        ("per", _of_role(columns, "per", "train")),
        ("val_loss", losses["val"]),
        ("train_loss", losses["train"]),
        ("grad_norm", _of_role(columns, "grad", "")),
        ("lr", _of_role(columns, "lr", "")),
    ):
        pieces = [(column.meaning.rank, -column.n, placed(column, told)) for column in candidates]
        pieces = [p for p in pieces if len(p[2].rows)]
        if pieces:
            found[part] = min(pieces, key=lambda p: p[:2])[2]
    if "per" not in found and (words := _of_role(columns, "wer", "train")):
        piece = placed(min(words, key=lambda c: c.meaning.rank), told)
        if len(piece.rows):
            found["wer"] = piece
    return found


def _of_role(columns: Mapping[Key, Column], role: str, not_split: str) -> list[Column]:
    return [
        column
        for key, column in columns.items()
        if column.meaning.role == role and (not not_split or _side(key, column) != not_split)
    ]


def _side(key: Key, column: Column) -> str:
    """Which split a column speaks of: by its own name, or its row's label, or its tag."""
    return column.meaning.split or key.split or (read_name(key.tag).split if key.tag else "")


def _sides(columns: Mapping[Key, Column]) -> dict[str, list[Column]]:
    """Losses by split. One that does not say is that of the error rate or training loss in its rows."""
    losses = {key: column for key, column in columns.items() if column.meaning.role == "loss"}
    sides: dict[str, list[Column]] = {"train": [], "val": [], "": []}
    for key, column in losses.items():
        sides[_side(key, column)].append(column)
    if sides["val"]:
        sides["train"] += sides[""]
        return sides
    rates = _of_role(columns, "per", "train") or _of_role(columns, "wer", "train")
    beside = _rows([*rates, *sides["train"]])
    for column in sides[""]:
        shared = np.isin(column.table()[0], beside).mean() if len(beside) else 0.0
        sides["val" if shared > 0.5 else "train"].append(column)
    return sides


def _rows(columns: Sequence[Column]) -> np.ndarray:
    return np.concatenate([c.table()[0] for c in columns]) if columns else np.empty(0)


def placed(column: Column, told: list[str]) -> Piece:
    """A column on its axis; an error rate as a fraction, without what cannot be one."""
    piece = place(column)
    if column.meaning.role not in ("per", "wer"):
        return piece
    values = as_fraction(piece.values, column.meaning.percent)
    with np.errstate(invalid="ignore"):
        wrong = np.isfinite(values) & ((values < 0) | (values > ABSURD))
    if not wrong.any():
        return replace(piece, values=values)
    example, n = f"such as {piece.values[wrong][0]:g}", int(wrong.sum())
    if n > 0.5 * len(values):
        told.append(f"what is logged as an error rate cannot be one ({example}), so it was not used")
        return _cut(piece, np.zeros(len(values), dtype=bool))
    told.append(f"{n:,} values that no error rate can have ({example}) were left out")
    return _cut(replace(piece, values=values), ~wrong)


def as_fraction(values: np.ndarray, said: bool = False) -> np.ndarray:
    """Error rates as fractions, whether they were logged as such or in per cent: by their size, or by their name."""
    known = values[np.isfinite(values) & (np.abs(values) <= 100 * ABSURD)]
    if not len(known):
        return values
    low, high = float(known.min()), float(known.max())
    grown = low >= 1.5 and high > 10
    steady = (
        low >= 1.5 and len(known) >= 5 and float(np.median(known)) > 5
    )  # no model is that bad for so long
    return values / 100 if grown or steady or (said and high > 1.5) else values


def place(column: Column) -> Piece:
    """A column on its axis: the counter of its rows, or counter and epoch together, or the epoch, or row numbers."""
    rows, step, epoch, value = column.table()
    value, there = _without_gaps(value)
    rows, step, epoch = rows[there], step[there], epoch[there]
    with_step, with_epoch = np.isfinite(step), np.isfinite(epoch)
    if with_step.mean() >= 0.5 if len(rows) else False:
        both = with_step & with_epoch
        if both.mean() > 0.9 and _within_epochs(step[both], epoch[both]):
            first, size = epoch[both].min(), step[both].max() + max(1.0, _spacing(step[both]))
            return Piece(rows[both], (epoch[both] - first) * size + step[both], value[both], "batches")
        steps = step[with_step]
        if not (len(steps) > 5 and np.ptp(steps) == 0):
            return Piece(rows[with_step], steps, value[with_step], _unit(column.step_name, steps))
    if with_epoch.mean() >= 0.5 if len(rows) else False:
        return Piece(rows[with_epoch], epoch[with_epoch], value[with_epoch], "epochs")
    return Piece(rows, np.arange(len(rows), dtype=float), value, "rows")


def _without_gaps(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where NaN comes and goes throughout a column it stands for `no value here`, as exports of tables have it."""
    gone = np.isnan(value)
    came_back = int((np.diff(gone.astype(int)) == -1).sum())
    there = ~gone if came_back >= 3 and gone.mean() >= SPARSE else np.ones(len(value), dtype=bool)
    return value[there], there


def _within_epochs(step: np.ndarray, epoch: np.ndarray) -> bool:
    """Whether the counter starts again with every epoch."""
    falls, turns = np.diff(step) < 0, np.diff(epoch) > 0
    return bool(falls.any() and turns.any() and (falls & turns).sum() >= 0.9 * turns.sum())


def _spacing(steps: np.ndarray) -> float:
    apart = np.abs(np.diff(steps))  # also of a file that runs backwards
    apart = apart[apart > 0]
    return float(np.median(apart)) if len(apart) else 0.0


def _unit(name: str, steps: np.ndarray) -> str:
    """Whatever it is called, a counter may count epochs or rows; batches come in thousands, or tens at a time."""
    named = "batch" in name.lower() or "iter" in name.lower()
    return "batches" if steps.max() >= 2000 or _spacing(steps) >= (10 if named else 50) else "steps"


def separate(pieces: Mapping[str, Piece], name: str) -> list[Log]:
    """One log, or one for each time the counter of a series began again."""
    tidy = {part: _forwards(piece) for part, piece in pieces.items()}
    if "per" in tidy and not len(restarts(tidy["per"])):
        tidy = {part: _unstacked(piece) for part, piece in tidy.items()}
    starts = {part: restarts(piece) for part, piece in tidy.items()}
    n_runs = max((len(s) for s in starts.values()), default=0) + 1
    if n_runs == 1:
        return [_log(tidy, name)] if tidy else []
    leader = max(starts, key=lambda part: (len(starts[part]), part == "per"))
    cuts = tidy[leader].rows[starts[leader]]
    runs: list[dict[str, Piece]] = [{} for _ in range(n_runs)]
    for part, piece in tidy.items():
        own = starts[part]
        if len(own) == n_runs - 1:
            numbers = np.searchsorted(own, np.arange(len(piece.rows)), side="right")
        else:
            numbers = np.searchsorted(cuts, piece.rows, side="right")
        for i in range(n_runs):
            if (numbers == i).any():
                runs[i][part] = _cut(piece, numbers == i)
    return [_log(run, f"{name} run {i + 1}".strip()) for i, run in enumerate(runs)]


def restarts(piece: Piece) -> np.ndarray:
    """Where in a piece the counter really began again: back at its start, not merely a little back."""
    steps = piece.steps
    if len(steps) < 2:
        return np.empty(0, dtype=int)
    falls = np.flatnonzero(np.diff(steps) <= 0) + 1
    found, begun, seen, top = [], 0, 0, -np.inf
    for i in falls:
        top, seen = max(top, float(steps[seen:i].max())), int(i)
        near = steps[i] <= max(steps[begun], NEAR_START * top)
        if steps[i] == steps[i - 1]:  # the same again: a new start only where nothing but a start was logged
            near = near and top == steps[begun] and bool((steps == steps[0]).all())
        if near:
            found.append(int(i))
            begun, top = int(i), -np.inf
    return np.array(found, dtype=int)


def _forwards(piece: Piece) -> Piece:
    """A file that runs backwards throughout is turned round; one in no order at all is sorted."""
    rises = np.diff(piece.steps)
    if not len(rises):
        return piece
    falling = float((rises < 0).mean())
    if 0 < falling < 1 and len(rises) < 3:
        return piece
    if len(restarts(piece)) >= 0.8 * (rises < 0).sum() and falling < 0.9:
        return piece
    if falling >= 0.9:
        return Piece(piece.rows, piece.steps[::-1], piece.values[::-1], piece.unit)
    if falling >= SHUFFLED:
        order = np.argsort(piece.steps, kind="stable")
        return Piece(piece.rows, piece.steps[order], piece.values[order], piece.unit)
    return piece


def _unstacked(piece: Piece) -> Piece:
    """Two quantities under one name, one block after the other, have the same steps twice: the first is kept."""
    starts = restarts(piece)
    blocks = np.split(piece.steps, starts)
    if len(blocks) < 2 or not all(np.array_equal(blocks[0], block) for block in blocks[1:]):
        return piece
    return _cut(piece, np.arange(len(piece.rows)) < starts[0])


def _cut(piece: Piece, chosen: np.ndarray) -> Piece:
    return Piece(piece.rows[chosen], piece.steps[chosen], piece.values[chosen], piece.unit)


def _log(pieces: Mapping[str, Piece], name: str) -> Log:
    per, val_loss, train_loss, grad_norm, lr = (
        series(pieces[part]) if part in pieces else Series() for part in PARTS
    )
    log = Log(name, per, val_loss, train_loss, grad_norm, lr)
    if "wer" in pieces:
        log = replace(log, per=series(pieces["wer"]), error_name="WER")
    return _one_unit(log)


def _one_unit(log: Log) -> Log:
    """Counters that may be the same are taken for the same: what the evaluations count, the others count."""
    unit = log.judged.unit
    if unit not in ("steps", "batches"):
        return log
    return replace(
        log,
        **{
            part: replace(s, unit=unit)
            for part in PARTS
            if len(s := getattr(log, part)) and s.unit in ("steps", "batches")
        },
    )


def series(piece: Piece) -> Series:
    """Ascending, one value per step: where a run resumed from a checkpoint, what it logged later counts."""
    steps, values = piece.steps, piece.values
    keep = np.ones(len(steps), dtype=bool)
    if len(steps) > 1 and (np.diff(steps) < 0).any():
        later = np.minimum.accumulate(steps[::-1])[::-1]  # the lowest step from here on
        keep[:-1] = steps[:-1] < later[1:]
        steps, values = steps[keep], values[keep]
    last = np.append(np.diff(steps) > 0, True)
    return Series(steps[last], values[last], piece.unit)
