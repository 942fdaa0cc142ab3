"""From rows to runs: `LogTable` accumulates rows of any format, and `TrainingLog` is one run as series over steps."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from arcuate.doctor.columns import METRICS, Facts, Meaning, flatten, parse_name, parse_number, split_of

_HUGE = 1e30
_EMPTY = np.empty(0)


@dataclass(frozen=True)
class Series:
    """One quantity over steps, which ascend in a `TrainingLog`; values that are not finite stay NaN or infinite."""

    steps: np.ndarray = field(default_factory=lambda: _EMPTY)
    values: np.ndarray = field(default_factory=lambda: _EMPTY)
    unit: str = "steps"  # what the counter counts: batches, epochs, rows; "steps" if unknown
    rows: np.ndarray = field(default_factory=lambda: _EMPTY, repr=False, compare=False)  # in the file, while it is read

    def __len__(self) -> int:
        return len(self.steps)

    def select(self, chosen: Any) -> "Series":
        """The points of a mask, an index array or a slice."""
        rows = self.rows[chosen] if len(self.rows) else self.rows
        return Series(self.steps[chosen], self.values[chosen], self.unit, rows)

    @property
    def finite(self) -> "Series":
        kept = np.isfinite(self.values)
        return self if kept.all() else self.select(kept)

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
        return self.select((self.steps >= start) & (self.steps <= stop))


def running_median(values: np.ndarray, width: int = 3) -> np.ndarray:
    """Median over a centred window; the ends are padded with the edge values."""
    if len(values) < width or width < 2:
        return values
    half = width // 2
    padded = np.pad(values, half, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)


@dataclass(frozen=True)
class TrainingLog:
    """One run, whichever program wrote it. An empty series was not logged."""

    name: str = ""
    per: Series = Series()
    val_loss: Series = Series()
    train_loss: Series = Series()
    grad_norm: Series = Series()
    lr: Series = Series()
    error_name: str = "PER"  # what `per` contains; WER if nothing else was logged
    dataset: str | None = None  # stated by the file
    dataset_because: str = ""
    n_named_sessions: int = 0  # sessions of a published release that the file names; 0 if it names none
    planned: int | None = None
    planned_because: str = ""
    reported_finished: bool = False
    crashed_non_finite: bool = False  # an error message says that a gradient or loss was not finite
    notes: tuple[str, ...] = ()
    # Arcuate runs only.
    is_arcuate: bool = False  # no published reference applies unless the data are the published ones
    run_path: Path | None = None
    store: str | None = None  # path of the training data
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings of the recipe, if known: dotted path to value
    parent: str | None = None  # packaged recipe that the recipe is derived from
    parent_settings: Mapping[str, Any] = field(default_factory=dict)
    update_ratio: Series = Series()  # norm of an update / norm of the weights
    grad_norm_max: Series = Series()  # largest norm of each logging interval
    scheduled_lr: Series = Series()  # learning rate of the recipe's schedule at the steps of `lr`
    n_parameters: int | None = None
    n_channels: int | None = None
    n_sessions: int | None = None
    n_trials_seen: int | None = None  # trials in all batches so far
    n_train: int | None = None  # training trials of the store
    lr_scale: float = 1.0  # product of the reductions of the learning rate by the guard
    guard_eps: float | None = None  # eps of Adam after the guard lowered it
    n_rewinds: int = 0
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


# Accumulation of rows.

_MAX_LENGTH, _THINNED_LENGTH = 1 << 20, 1 << 18  # a longer column is thinned to about the second length
_MAX_COLUMNS = 400  # a file with more metric columns is not the log of one training
_MAX_LABEL = 120
_LABELS = frozenset({"group", "split", "tag", "value", "skipped"})


class _Key(NamedTuple):
    """Identifies a column: run within the file, tag, name and split."""

    group: str
    tag: str
    name: str
    split: str


@dataclass
class _Column:
    """Points of row number, step, epoch and value; NaN where a row has no such counter."""

    meaning: Meaning
    split: str
    step_name: str
    data: "array[float]" = field(default_factory=lambda: array("d"))

    def append(self, *point: float) -> None:
        self.data.extend(point)
        if len(self.data) > 4 * _MAX_LENGTH:
            self.data = array("d", _thin(self.points).tobytes())

    @property
    def points(self) -> np.ndarray:
        """All points in file order, (N, 4)."""
        return np.array(self.data).reshape(-1, 4)


def _thin(points: np.ndarray) -> np.ndarray:
    """Keep the minimum and maximum of each stretch, points where counters restart, and non-finite values."""
    _, step, epoch, value = points.T
    n = len(points)
    size = -(-n // (_THINNED_LENGTH // 2))
    n_full = n - n % size
    blocks = np.nan_to_num(value[:n_full], nan=0.0, posinf=0.0, neginf=0.0).reshape(-1, size)
    start = np.arange(len(blocks)) * size
    kept = np.zeros(n, dtype=bool)
    kept[start + blocks.argmin(1)] = kept[start + blocks.argmax(1)] = True
    kept[n_full:] = kept[0] = True
    falls = np.flatnonzero((np.diff(step) < 0) | (np.diff(epoch) < 0))[: _THINNED_LENGTH // 4]
    kept[falls] = kept[falls + 1] = True
    broken = np.flatnonzero(~np.isfinite(value))
    kept[broken[:1000]] = True
    kept[broken[:: max(1, len(broken) // 1000)]] = True
    return points[kept]


class _Plan(NamedTuple):
    """Which names of a row are its counters and labels, by quantity, and which are metrics."""

    names: Mapping[str, str]
    metrics: tuple[tuple[str, Meaning], ...]


class LogTable:
    """The numbers of a file that a diagnosis can use, by run within the file, name and split."""

    def __init__(self, stem: str = "") -> None:
        self.stem = stem  # name of a curve that is exported alone
        self.columns: dict[_Key, _Column] = {}
        self.n_rows = 0
        self.n_points = 0
        self.n_bad = 0  # lines that should have been rows
        self.n_skipped = 0.0  # updates that the trainer reports as skipped
        self.facts = Facts()
        self.notes: list[str] = []  # about damage
        self.implausible: list[str] = []  # columns that cannot be what their names state
        self._plans: dict[tuple[str, ...], _Plan] = {}

    def add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        self.n_rows += 1
        if any(type(value) is dict for value in row.values()):
            row = flatten(row)
        names = tuple(row)
        plan = self._plans.get(names)
        if plan is None:
            plan = _make_plan(names)
            if len(self._plans) < 10 * _MAX_COLUMNS:
                self._plans[names] = plan
        labels = {quantity: row[name] for quantity, name in plan.names.items() if quantity in _LABELS}
        if "skipped" in labels:
            self._count_skipped(labels["skipped"])
        metrics, tag = plan.metrics, ""
        if isinstance(labels.get("tag"), str):
            tag = labels["tag"][:_MAX_LABEL]
        if "value" in labels and (tag or ("tag" not in labels and not metrics)):
            metrics = ((plan.names["value"], parse_name(tag or self.stem)),)
        if not metrics:
            return
        group, label = _label(labels.get("group")), labels.get("split")
        split = split_of(label[:_MAX_LABEL]) if isinstance(label, str) else ""
        step, epoch = (self._counter(row, plan.names.get(axis)) for axis in ("step", "epoch"))
        for name, meaning in metrics:
            value = row[name]
            number = value if type(value) is float else parse_number(value)
            if number is None or meaning.quantity not in METRICS:
                continue
            column = self.columns.get((group, tag, name, split))  # type: ignore[call-overload]
            if column is None:
                if len(self.columns) >= _MAX_COLUMNS:
                    continue
                shown = meaning.split or split or split_of(tag)
                column = self.columns[_Key(group, tag, name, split)] = _Column(
                    meaning, shown, plan.names.get("step", "")
                )
            column.append(self.n_rows, step, epoch, number)
            self.n_points += 1

    def _counter(self, row: Mapping[str, Any], name: str | None) -> float:
        number = None if name is None else parse_number(row[name])
        return np.nan if number is None else number

    def _count_skipped(self, value: Any) -> None:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and np.isfinite(value):
            self.n_skipped = max(self.n_skipped, value)

    def logs(self, name: str = "") -> list[TrainingLog]:
        """The runs of the file in their order; runs without any value are omitted."""
        groups: dict[str, list[_Column]] = {}
        for key, column in self.columns.items():
            groups.setdefault(key.group, []).append(column)
        logs = []
        for group, columns in groups.items():
            notes: list[str] = []
            run_name = f"{name} {group}".strip() if len(groups) > 1 else name
            runs = _split_runs(_choose_columns(columns, notes), run_name)
            logs += [replace(run, notes=(*dict.fromkeys(notes), *run.notes)) for run in runs]
            self.implausible += notes
        return [log for log in logs if any(map(len, (log.per, log.val_loss, log.train_loss, log.grad_norm)))]


def _make_plan(names: tuple[str, ...]) -> _Plan:
    meanings = [(name, parse_name(name)) for name in names if isinstance(name, str)]
    metrics = tuple((name, meaning) for name, meaning in meanings if meaning.quantity in METRICS)
    chosen: dict[str, str] = {}
    for name, meaning in meanings:
        chosen.setdefault(meaning.quantity, name)
    for axis in ("step", "epoch"):  # the plainest name
        if found := [(meaning.rank, name) for name, meaning in meanings if meaning.quantity == axis]:
            chosen[axis] = min(found)[1]
    return _Plan(chosen, metrics)


def _label(value: Any) -> str:
    return "" if value is None or isinstance(value, (dict, list)) else str(value)[:_MAX_LABEL]


# From columns to runs: which column is which quantity, on which axis, and where a new run starts.

_RESTART_FRACTION = 0.05  # a counter that falls below this fraction of the steps reached has restarted
_SHUFFLED = 0.2  # minimum fraction of decreasing steps for the order of a file to count as arbitrary
_SPARSE = 0.3  # NaN means "no value" above this fraction, if it occurs in many separate stretches
_MAX_ERROR_RATE = 100.0  # larger values cannot be an error rate
_SERIES = ("per", "val_loss", "train_loss", "grad_norm", "lr")
_Runs = Mapping[str, Series]


def _choose_columns(columns: Sequence[_Column], notes: list[str]) -> dict[str, Series]:
    """The column with the best matching name for each quantity; "wer" only without a PER column."""

    def of(quantity: str) -> list[_Column]:
        return [c for c in columns if c.meaning.quantity == quantity]

    rates, words = ([c for c in of(q) if c.split != "train"] for q in ("per", "wer"))
    losses = _losses_by_split(of("loss"), rates or words)
    chosen: dict[str, Series] = {}
    for name, candidates in (
        ("per", rates),
        ("val_loss", losses["val"]),
        ("train_loss", losses["train"]),
        ("grad_norm", of("grad")),
        ("lr", of("lr")),
        ("wer", words),
    ):
        for column in sorted(candidates, key=lambda c: (c.meaning.rank, -len(c.data))):
            series = _to_series(column, notes)
            if len(series) and not (name == "wer" and "per" in chosen):
                chosen[name] = series
                break
    return chosen


def _losses_by_split(losses: Sequence[_Column], rates: Sequence[_Column]) -> dict[str, list[_Column]]:
    """Losses by split. One without a split belongs to the error rate or training loss in the same rows."""
    found = {split: [c for c in losses if c.split == split] for split in ("train", "val", "")}
    if found["val"]:
        found["train"] += found[""]
        return found
    others = [c.points[:, 0] for c in (*rates, *found["train"])]
    for column in found[""]:
        shared = np.isin(column.points[:, 0], np.concatenate(others)).mean() if others else 0.0
        found["val" if shared > 0.5 else "train"].append(column)
    return found


def _to_series(column: _Column, notes: list[str]) -> Series:
    """A column on its axis; error rates as fractions, without impossible values."""
    series = _place_on_axis(column)
    if column.meaning.quantity not in ("per", "wer"):
        return series
    values = _as_fraction(series.values, column.meaning.percent)
    with np.errstate(invalid="ignore"):
        impossible = np.isfinite(values) & ((values < 0) | (values > _MAX_ERROR_RATE))
    if not impossible.any():
        return replace(series, values=values)
    example, n = f"such as {series.values[impossible][0]:g}", int(impossible.sum())
    if n > 0.5 * len(values):
        notes.append(f"the column logged as an error rate was ignored: its values cannot be error rates ({example})")
        return Series()
    notes.append(f"{n:,} impossible values of the error rate were ignored ({example})")
    return replace(series, values=values).select(~impossible)


def _as_fraction(values: np.ndarray, percent: bool = False) -> np.ndarray:
    """Convert error rates in per cent, recognised by their size or their name, to fractions."""
    known = values[np.isfinite(values) & (np.abs(values) <= 100 * _MAX_ERROR_RATE)]
    if not len(known):
        return values
    low, high = float(known.min()), float(known.max())
    wide = low >= 1.5 and high > 10
    constant = low >= 1.5 and len(known) >= 5 and float(np.median(known)) > 5  # impossible as a fraction
    return values / 100 if wide or constant or (percent and high > 1.5) else values


def _place_on_axis(column: _Column) -> Series:
    """Use the step counter of the rows, or step and epoch together, or the epoch, or the row number."""
    points = column.points
    points = points[_present(points[:, 3])]
    rows, step, epoch, value = points.T
    with_step, with_epoch = np.isfinite(step), np.isfinite(epoch)
    if len(rows) and with_step.mean() >= 0.5:
        both = with_step & with_epoch
        if both.mean() > 0.9 and _restarts_with_epoch(step[both], epoch[both]):
            first, size = epoch[both].min(), step[both].max() + max(1.0, _spacing(step[both]))
            return Series((epoch[both] - first) * size + step[both], value[both], "batches", rows[both])
        steps = step[with_step]
        if not (len(steps) > 5 and np.ptp(steps) == 0):
            return Series(steps, value[with_step], _unit(column.step_name, steps), rows[with_step])
    if len(rows) and with_epoch.mean() >= 0.5:
        return Series(epoch[with_epoch], value[with_epoch], "epochs", rows[with_epoch])
    return Series(np.arange(len(rows), dtype=float), value, "rows", rows)


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


def _split_runs(series: _Runs, name: str) -> list[TrainingLog]:
    """One log, or one for each time the counter restarted."""
    ordered = {quantity: _in_order(s) for quantity, s in series.items()}
    if "per" in ordered and not len(_restarts(ordered["per"])):
        ordered = {quantity: _first_of_repeated(s) for quantity, s in ordered.items()}
    starts = {quantity: _restarts(s) for quantity, s in ordered.items()}
    n_runs = max((len(s) for s in starts.values()), default=0) + 1
    if n_runs == 1:
        return [_make_log(ordered, name)] if ordered else []
    leader = max(starts, key=lambda quantity: (len(starts[quantity]), quantity == "per"))
    cuts = ordered[leader].rows[starts[leader]]
    runs: list[dict[str, Series]] = [{} for _ in range(n_runs)]
    for quantity, s in ordered.items():
        if len(starts[quantity]) == n_runs - 1:
            run_numbers = np.searchsorted(starts[quantity], np.arange(len(s)), side="right")
        else:
            run_numbers = np.searchsorted(cuts, s.rows, side="right")
        for i in np.unique(run_numbers).tolist():
            runs[i][quantity] = s.select(run_numbers == i)
    return [_make_log(run, f"{name} run {i + 1}".strip()) for i, run in enumerate(runs) if run]


def _restarts(series: Series) -> np.ndarray:
    """The indices at which the counter restarts near its start; a small step back is a resumed run."""
    steps = series.steps
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


def _in_order(series: Series) -> Series:
    """Reverse a series that runs backwards; sort one in arbitrary order."""
    rises = np.diff(series.steps)
    if not len(rises):
        return series
    falling = float((rises < 0).mean())
    if 0 < falling < 1 and len(rises) < 3:
        return series
    if len(_restarts(series)) >= 0.8 * (rises < 0).sum() and falling < 0.9:
        return series
    if falling >= 0.9:
        return replace(series, steps=series.steps[::-1], values=series.values[::-1])
    if falling >= _SHUFFLED:
        order = np.argsort(series.steps, kind="stable")
        return replace(series, steps=series.steps[order], values=series.values[order])
    return series


def _first_of_repeated(series: Series) -> Series:
    """If two quantities of the same name follow each other with identical steps, keep the first."""
    starts = _restarts(series)
    blocks = np.split(series.steps, starts)
    if len(blocks) < 2 or not all(np.array_equal(blocks[0], block) for block in blocks[1:]):
        return series
    return series.select(slice(starts[0]))


def _make_log(series: _Runs, name: str) -> TrainingLog:
    found: dict[str, Any] = {quantity: _ascending(series[quantity]) for quantity in _SERIES if quantity in series}
    log = TrainingLog(name, **found)
    if "wer" in series:
        log = replace(log, per=_ascending(series["wer"]), error_name="WER")
    # Step counters of unknown unit have the unit of the evaluations.
    unit, counters = log.judged.unit, ("steps", "batches")
    counted = {q: s for q in _SERIES if len(s := getattr(log, q)) and s.unit in counters and unit in counters}
    changed: dict[str, Any] = {quantity: replace(s, unit=unit) for quantity, s in counted.items()}
    return _without_closing_evaluation(replace(log, **changed))


def _without_closing_evaluation(log: TrainingLog) -> TrainingLog:
    """The log without a last evaluation that repeats an earlier one: the best checkpoint, loaded after training."""
    steps, losses = log.val_loss.steps, log.val_loss.values
    if len(steps) < 4 or not (losses[:-1] == losses[-1]).any() or 2 * (steps[-1] - steps[-2]) >= _spacing(steps[:-1]):
        return log
    cut: dict[str, Any] = {
        name: s.select(s.steps < steps[-1]) for name in ("per", "val_loss") if len(s := getattr(log, name))
    }
    return replace(log, **cut, notes=(*log.notes, "the last evaluation repeats an earlier one and was left out"))


def _ascending(series: Series) -> Series:
    """Ascending steps, one value each; if a run was resumed from a checkpoint, the later value is kept.

    Values too large for further arithmetic become infinite.
    """
    if len(series) > 1 and (np.diff(series.steps) < 0).any():
        lowest_from_here = np.minimum.accumulate(series.steps[::-1])[::-1]
        series = series.select(np.append(series.steps[:-1] < lowest_from_here[1:], True))
    last = np.append(np.diff(series.steps) > 0, True)[: len(series)]
    steps, values = series.steps[last], series.values[last]
    with np.errstate(invalid="ignore"):
        huge = np.isfinite(values) & (np.abs(values) > _HUGE)
    return Series(steps, np.where(huge, np.copysign(np.inf, values), values), series.unit)
