"""`TrainingLog`: one run as series over steps, and how the runs of a file are assembled from its columns."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.doctor.columns import Collector, Column, ColumnKey, parse_column_name

_HUGE = 1e30


@dataclass(frozen=True)
class Series:
    """One quantity over ascending steps; logged values that are not finite stay NaN or infinite."""

    steps: np.ndarray = field(default_factory=lambda: np.empty(0))
    values: np.ndarray = field(default_factory=lambda: np.empty(0))
    unit: str = "steps"  # what the counter counts: batches, epochs, rows; "steps" if unknown

    def __post_init__(self) -> None:
        """Replace values too large for further arithmetic by infinity."""
        values = self.values
        with np.errstate(invalid="ignore"):
            huge = np.isfinite(values) & (np.abs(values) > _HUGE)
        if huge.any():
            object.__setattr__(self, "values", np.where(huge, np.copysign(np.inf, values), values))

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def finite(self) -> "Series":
        kept = np.isfinite(self.values)
        return self if kept.all() else Series(self.steps[kept], self.values[kept], self.unit)

    @property
    def non_finite_steps(self) -> np.ndarray:
        return self.steps[~np.isfinite(self.values)]

    def downsample(self, n_points: int = 400) -> "Series":
        """At most `n_points` points: the median of each stretch, at its first step."""
        size = -(-len(self) // n_points)
        if size < 2:
            return self
        starts = np.arange(0, len(self), size)
        medians = np.array([np.median(self.values[i : i + size]) for i in starts])
        return Series(self.steps[starts], medians, self.unit)

    def between(self, start: float, stop: float) -> "Series":
        kept = (self.steps >= start) & (self.steps <= stop)
        return Series(self.steps[kept], self.values[kept], self.unit)


@dataclass(frozen=True)
class TrainingLog:
    """One run, whichever program wrote it. An empty series was not logged."""

    name: str = ""
    per: Series = Series()
    val_loss: Series = Series()
    train_loss: Series = Series()
    grad_norm: Series = Series()
    lr: Series = Series()
    update_ratio: Series = Series()  # norm of an update / norm of the weights (arcuate runs)
    grad_norm_max: Series = Series()  # largest norm of each logging interval (arcuate runs)
    scheduled_lr: Series = Series()  # learning rate of the recipe's schedule at the steps of `lr`
    error_name: str = "PER"  # what `per` contains; WER if nothing else was logged
    dataset: str | None = None  # stated by the file
    dataset_because: str = ""
    n_named_sessions: int = 0  # sessions of a published release that the file names; 0 if it names none
    planned: int | None = None
    planned_because: str = ""
    reported_finished: bool = False
    crashed_non_finite: bool = False  # an error message about a non-finite loss or gradient ended the run
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings of the recipe, if known: dotted path to value
    parent: str | None = None  # packaged recipe that the recipe is derived from
    parent_settings: Mapping[str, Any] = field(default_factory=dict)
    run_path: Path | None = None
    store: str | None = None  # path of the training data
    n_parameters: int | None = None
    n_channels: int | None = None
    n_sessions: int | None = None
    n_trials_seen: int | None = None  # trials in all batches so far
    n_train: int | None = None  # training trials of the store
    lr_scale: float = 1.0  # product of the reductions of the learning rate by the guard
    guard_eps: float | None = None  # eps of Adam after the guard lowered it
    n_rewinds: int = 0
    coupling_warnings: tuple[str, ...] = ()  # learning rate, eps and loss reduction that do not match
    is_arcuate: bool = False  # no published reference applies unless the data are the published ones
    notes: tuple[str, ...] = ()
    incidents: tuple[str, ...] = ()  # interventions of the guard, in sentences
    non_finite_steps: tuple[int, ...] = ()  # no finite loss was logged, or the guard stopped retrying the step
    skipped_steps: tuple[int, ...] = ()  # steps with a non-finite loss that the guard skipped
    blank_since: int | None = None  # from here on the output was almost only blanks, by its own statistics

    @property
    def last_step(self) -> int | None:
        logged = [s for s in (self.per, self.val_loss, self.train_loss) if len(s)]
        if not logged:
            return None
        ends = [s.steps[-1] for s in logged]
        return int(ends[0] if len({s.unit for s in logged}) > 1 else max(ends))

    @property
    def judged(self) -> Series:
        """The series that the rules judge: the error rate, or the validation loss if there is none."""
        return self.per if len(self.per) else self.val_loss

    @property
    def empty(self) -> bool:
        return not any(len(s) for s in (self.per, self.val_loss, self.train_loss, self.grad_norm))


def running_median(values: np.ndarray, width: int = 3) -> np.ndarray:
    """Median over a centred window; the ends are padded with the edge values."""
    if len(values) < width or width < 2:
        return values
    half = width // 2
    padded = np.pad(values, half, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)


# From columns to runs: which column is which quantity, on which axis, and where a new run starts.

_RESTART_FRACTION = 0.05  # a counter that falls below this fraction of the steps reached has restarted
_SHUFFLED = 0.2  # minimum fraction of decreasing steps for the order of a file to count as arbitrary
_SPARSE = 0.3  # NaN means "no value" above this fraction, if it occurs in many separate stretches
_MAX_ERROR_RATE = 100.0  # larger values cannot be an error rate
_QUANTITIES = ("per", "val_loss", "train_loss", "grad_norm", "lr")


@dataclass(frozen=True)
class _Trace:
    """One column on its axis: points in file order."""

    rows: np.ndarray
    steps: np.ndarray
    values: np.ndarray
    unit: str

    def select(self, mask: np.ndarray) -> "_Trace":
        return _Trace(self.rows[mask], self.steps[mask], self.values[mask], self.unit)


def assemble_logs(collector: Collector, name: str = "") -> list[TrainingLog]:
    """The runs of a file in their order; runs without any value are omitted."""
    groups: dict[str, dict[ColumnKey, Column]] = {}
    for key, column in collector.columns.items():
        groups.setdefault(key.group, {})[key] = column
    logs = []
    for group, columns in groups.items():
        notes: list[str] = []
        run_name = f"{name} {group}".strip() if len(groups) > 1 else name
        runs = _split_runs(_choose_columns(columns, notes), run_name)
        logs += [replace(run, notes=tuple(dict.fromkeys(notes))) for run in runs]
        collector.metadata.implausible += notes
    return [log for log in logs if not log.empty]


def _choose_columns(columns: Mapping[ColumnKey, Column], notes: list[str]) -> dict[str, _Trace]:
    """The column with the best matching name for each quantity; "wer" only without a PER column."""
    chosen: dict[str, _Trace] = {}
    losses = _losses_by_split(columns)
    for quantity, candidates in (
        ("per", _with_role(columns, "per", "train")),
        ("val_loss", losses["val"]),
        ("train_loss", losses["train"]),
        ("grad_norm", _with_role(columns, "grad")),
        ("lr", _with_role(columns, "lr")),
    ):
        ranked = [(column.meaning.rank, -column.n, _to_trace(column, notes)) for column in candidates]
        ranked = [entry for entry in ranked if len(entry[2].rows)]
        if ranked:
            chosen[quantity] = min(ranked, key=lambda entry: entry[:2])[2]
    if "per" not in chosen and (candidates := _with_role(columns, "wer", "train")):
        trace = _to_trace(min(candidates, key=lambda c: c.meaning.rank), notes)
        if len(trace.rows):
            chosen["wer"] = trace
    return chosen


def _with_role(columns: Mapping[ColumnKey, Column], role: str, excluded_split: str = "") -> list[Column]:
    return [
        column
        for key, column in columns.items()
        if column.meaning.role == role and not (excluded_split and _split_of(key, column) == excluded_split)
    ]


def _split_of(key: ColumnKey, column: Column) -> str:
    """The split of a column, by its own name, the label of its rows, or its tag."""
    return column.meaning.split or key.split or (parse_column_name(key.tag).split if key.tag else "")


def _losses_by_split(columns: Mapping[ColumnKey, Column]) -> dict[str, list[Column]]:
    """Losses by split. One without a split belongs to the error rate or training loss in the same rows."""
    losses: dict[str, list[Column]] = {"train": [], "val": [], "": []}
    for key, column in columns.items():
        if column.meaning.role == "loss":
            losses[_split_of(key, column)].append(column)
    if losses["val"]:
        losses["train"] += losses[""]
        return losses
    rates = _with_role(columns, "per", "train") or _with_role(columns, "wer", "train")
    others = [*rates, *losses["train"]]
    other_rows = np.concatenate([c.table()[0] for c in others]) if others else np.empty(0)
    for column in losses[""]:
        shared = np.isin(column.table()[0], other_rows).mean() if len(other_rows) else 0.0
        losses["val" if shared > 0.5 else "train"].append(column)
    return losses


def _to_trace(column: Column, notes: list[str]) -> _Trace:
    """A column on its axis; error rates as fractions, without impossible values."""
    trace = _place_on_axis(column)
    if column.meaning.role not in ("per", "wer"):
        return trace
    values = _as_fraction(trace.values, column.meaning.percent)
    with np.errstate(invalid="ignore"):
        impossible = np.isfinite(values) & ((values < 0) | (values > _MAX_ERROR_RATE))
    if not impossible.any():
        return replace(trace, values=values)
    example, n = f"such as {trace.values[impossible][0]:g}", int(impossible.sum())
    if n > 0.5 * len(values):
        notes.append(f"the column logged as an error rate was ignored: its values cannot be error rates ({example})")
        return trace.select(np.zeros(len(values), dtype=bool))
    notes.append(f"{n:,} impossible values of the error rate were ignored ({example})")
    return replace(trace, values=values).select(~impossible)


def _as_fraction(values: np.ndarray, percent: bool = False) -> np.ndarray:
    """Convert error rates in per cent, recognised by their size or their name, to fractions."""
    known = values[np.isfinite(values) & (np.abs(values) <= 100 * _MAX_ERROR_RATE)]
    if not len(known):
        return values
    low, high = float(known.min()), float(known.max())
    wide = low >= 1.5 and high > 10
    constant = low >= 1.5 and len(known) >= 5 and float(np.median(known)) > 5  # impossible as a fraction
    return values / 100 if wide or constant or (percent and high > 1.5) else values


def _place_on_axis(column: Column) -> _Trace:
    """Use the step counter of the rows, or step and epoch together, or the epoch, or the row number."""
    rows, step, epoch, value = column.table()
    present = _present(value)
    rows, step, epoch, value = rows[present], step[present], epoch[present], value[present]
    with_step, with_epoch = np.isfinite(step), np.isfinite(epoch)
    if len(rows) and with_step.mean() >= 0.5:
        both = with_step & with_epoch
        if both.mean() > 0.9 and _restarts_with_epoch(step[both], epoch[both]):
            first, size = epoch[both].min(), step[both].max() + max(1.0, _spacing(step[both]))
            return _Trace(rows[both], (epoch[both] - first) * size + step[both], value[both], "batches")
        steps = step[with_step]
        if not (len(steps) > 5 and np.ptp(steps) == 0):
            return _Trace(rows[with_step], steps, value[with_step], _unit(column.step_name, steps))
    if len(rows) and with_epoch.mean() >= 0.5:
        return _Trace(rows[with_epoch], epoch[with_epoch], value[with_epoch], "epochs")
    return _Trace(rows, np.arange(len(rows), dtype=float), value, "rows")


def _present(value: np.ndarray) -> np.ndarray:
    """A mask of logged values: NaN in many separate stretches is how table exports write empty cells."""
    missing = np.isnan(value)
    n_returns = int((np.diff(missing.astype(int)) == -1).sum())
    return ~missing if n_returns >= 3 and missing.mean() >= _SPARSE else np.ones(len(value), dtype=bool)


def _restarts_with_epoch(step: np.ndarray, epoch: np.ndarray) -> bool:
    falls, new_epochs = np.diff(step) < 0, np.diff(epoch) > 0
    return bool(falls.any() and new_epochs.any() and (falls & new_epochs).sum() >= 0.9 * new_epochs.sum())


def _spacing(steps: np.ndarray) -> float:
    distances = np.abs(np.diff(steps))  # also of a file in reverse order
    distances = distances[distances > 0]
    return float(np.median(distances)) if len(distances) else 0.0


def _unit(name: str, steps: np.ndarray) -> str:
    """Unit of a counter, which may count epochs or rows under any name; batches reach thousands, or advance in tens."""
    named = "batch" in name.lower() or "iter" in name.lower()
    return "batches" if steps.max() >= 2000 or _spacing(steps) >= (10 if named else 50) else "steps"


def _split_runs(traces: Mapping[str, _Trace], name: str) -> list[TrainingLog]:
    """One log, or one for each time the counter restarted."""
    ordered = {quantity: _in_order(trace) for quantity, trace in traces.items()}
    if "per" in ordered and not len(_restarts(ordered["per"])):
        ordered = {quantity: _first_of_repeated(trace) for quantity, trace in ordered.items()}
    starts = {quantity: _restarts(trace) for quantity, trace in ordered.items()}
    n_runs = max((len(s) for s in starts.values()), default=0) + 1
    if n_runs == 1:
        return [_make_log(ordered, name)] if ordered else []
    leader = max(starts, key=lambda quantity: (len(starts[quantity]), quantity == "per"))
    cuts = ordered[leader].rows[starts[leader]]
    runs: list[dict[str, _Trace]] = [{} for _ in range(n_runs)]
    for quantity, trace in ordered.items():
        own = starts[quantity]
        if len(own) == n_runs - 1:
            run_numbers = np.searchsorted(own, np.arange(len(trace.rows)), side="right")
        else:
            run_numbers = np.searchsorted(cuts, trace.rows, side="right")
        for i in range(n_runs):
            if (run_numbers == i).any():
                runs[i][quantity] = trace.select(run_numbers == i)
    return [_make_log(run, f"{name} run {i + 1}".strip()) for i, run in enumerate(runs)]


def _restarts(trace: _Trace) -> np.ndarray:
    """The indices at which the counter restarts near its start; a small step back is a resumed run."""
    steps = trace.steps
    if len(steps) < 2:
        return np.empty(0, dtype=int)
    falls = np.flatnonzero(np.diff(steps) <= 0) + 1
    found, first, seen, top = [], 0, 0, -np.inf
    for i in falls:
        top, seen = max(top, float(steps[seen:i].max())), int(i)
        near_start = steps[i] <= max(steps[first], _RESTART_FRACTION * top)
        if steps[i] == steps[i - 1]:  # a repeated step is a restart only if nothing else was logged
            near_start = near_start and top == steps[first] and bool((steps == steps[0]).all())
        if near_start:
            found.append(int(i))
            first, top = int(i), -np.inf
    return np.array(found, dtype=int)


def _in_order(trace: _Trace) -> _Trace:
    """Reverse a trace that runs backwards; sort one in arbitrary order."""
    rises = np.diff(trace.steps)
    if not len(rises):
        return trace
    falling = float((rises < 0).mean())
    if 0 < falling < 1 and len(rises) < 3:
        return trace
    if len(_restarts(trace)) >= 0.8 * (rises < 0).sum() and falling < 0.9:
        return trace
    if falling >= 0.9:
        return _Trace(trace.rows, trace.steps[::-1], trace.values[::-1], trace.unit)
    if falling >= _SHUFFLED:
        order = np.argsort(trace.steps, kind="stable")
        return _Trace(trace.rows, trace.steps[order], trace.values[order], trace.unit)
    return trace


def _first_of_repeated(trace: _Trace) -> _Trace:
    """If two quantities of the same name follow each other with identical steps, keep the first."""
    starts = _restarts(trace)
    blocks = np.split(trace.steps, starts)
    if len(blocks) < 2 or not all(np.array_equal(blocks[0], block) for block in blocks[1:]):
        return trace
    return trace.select(np.arange(len(trace.rows)) < starts[0])


def _make_log(traces: Mapping[str, _Trace], name: str) -> TrainingLog:
    per, val_loss, train_loss, grad_norm, lr = (
        _to_series(traces[quantity]) if quantity in traces else Series() for quantity in _QUANTITIES
    )
    log = TrainingLog(name, per, val_loss, train_loss, grad_norm, lr)
    if "wer" in traces:
        log = replace(log, per=_to_series(traces["wer"]), error_name="WER")
    return _with_one_unit(log)


def _with_one_unit(log: TrainingLog) -> TrainingLog:
    """Give step counters of unknown unit the unit of the evaluations."""
    unit = log.judged.unit
    if unit not in ("steps", "batches"):
        return log
    series = {quantity: getattr(log, quantity) for quantity in _QUANTITIES}
    compatible = {q: s for q, s in series.items() if len(s) and s.unit in ("steps", "batches")}
    return replace(log, **{quantity: replace(s, unit=unit) for quantity, s in compatible.items()})


def _to_series(trace: _Trace) -> Series:
    """Ascending steps, one value each; if a run was resumed from a checkpoint, the later value is kept."""
    steps, values = trace.steps, trace.values
    keep = np.ones(len(steps), dtype=bool)
    if len(steps) > 1 and (np.diff(steps) < 0).any():
        lowest_from_here = np.minimum.accumulate(steps[::-1])[::-1]
        keep[:-1] = steps[:-1] < lowest_from_here[1:]
        steps, values = steps[keep], values[keep]
    last = np.append(np.diff(steps) > 0, True)
    return Series(steps[last], values[last], trace.unit)
