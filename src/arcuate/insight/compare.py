"""`compare`: whether runs differ significantly. Groups of seeds are compared with the first group, Holm-adjusted."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.config import Change, value_text
from arcuate.errors import UserError
from arcuate.evaluation.significance import Arm, Contrast, difference, holm
from arcuate.files import PAGE, check_writable, read_jsonl, to_frame, write_text
from arcuate.hub import local_path
from arcuate.insight.charts import base, plots
from arcuate.insight.charts.formats import count, percent, split_name
from arcuate.insight.render import FOREST_LEGEND, make_figure, overlaid_figures, render
from arcuate.insight.run_data import Row, RunData, lookup, read_run
from arcuate.insight.runs import differ_only_in_seed, find_runs, is_run_folder, result_changes
from arcuate.progress import Progress, logger
from arcuate.run import WORDS_LABEL, Run, open_run

ALPHA = 0.05
_LAST = "last"
_SAMPLING_UNITS = ("trials", "sessions")
_WORD_SEARCH = ("lm", "lexicon")  # what a WER depends on besides the model


# --- Scores by trial -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RunScores:
    """Edits and reference lengths of one run by trial."""

    data: RunData
    split: str
    metric: str  # such as PER or WER
    summary: Row
    trials: tuple[str, ...]  # sorted
    errors: np.ndarray  # (N,)
    lengths: np.ndarray  # (N,)
    sessions: tuple[str, ...]

    @property
    def step(self) -> int | None:
        step = self.summary.get("step")
        return step if isinstance(step, int) else None


def read_scores(data: RunData, split: str, label: str | None = None) -> RunScores:
    """Read results/<split>[.<label>].jsonl, of words with the label `words`; trials without a reference are omitted."""
    run, words = data.run, label == WORDS_LABEL
    file = run.results_file(split, label)
    if not file.is_file():
        raise UserError(
            f"{run.path} has no results on {split}; create them with: arcuate evaluate {run.path} --split {split}"
        )
    summary = data.summaries.get(f"{split}.{label}" if label else split, {})
    _check_last(run, summary, label, file)
    name, length, edits, what, command = (
        ("id", "n_words", ("errors",), "word counts", "decode")
        if words
        else ("trial", "n_tokens", ("substitutions", "insertions", "deletions"), "edit counts", "evaluate")
    )
    found: dict[str, tuple[int, int, str]] = {}
    for number, row in enumerate(read_jsonl(file), start=1):
        if row.get(length) in (None, 0):
            continue
        trial, counts = row.get(name), [row.get(key) for key in (length, *edits)]
        known = [c for c in counts if type(c) is int and c >= 0]
        if not isinstance(trial, str) or len(known) < len(counts):
            raise UserError(f"{file} line {number} lacks the trial or {what}; {command} {run.path} again")
        if trial in found:
            raise UserError(f"{file} contains trial {trial} twice; {command} {run.path} again")
        found[trial] = sum(known[1:]), known[0], str(row.get("session") or "")
    if len(found) < 2:
        raise UserError(f"{file} has {len(found)} trials with a reference; a comparison needs at least two")
    trials = tuple(sorted(found))
    errors, lengths, sessions = zip(*(found[trial] for trial in trials), strict=True)
    metric = "WER" if words else data.rate_name
    return RunScores(data, split, metric, summary, trials, np.array(errors), np.array(lengths), sessions)


def _check_last(run: Run, summary: Row, label: str | None, file: Path) -> None:
    """Reject results of the last checkpoint that were written before the run was continued."""
    link, scored = run.checkpoints / "last", summary.get("checkpoint")
    if label == _LAST and isinstance(scored, str) and link.is_symlink() and link.readlink().name != scored:
        raise UserError(
            f"{file} scores {scored}, but the last checkpoint is now {link.readlink().name}; evaluate it again with:"
            f" arcuate evaluate {run.path}@last --label last"
        )


def _check_comparable(scores: Sequence[RunScores]) -> None:
    """Raise unless all runs were scored on the same trials, and decoded to words with the same search."""
    first = scores[0]
    for other in scores[1:]:
        names, a, b = f"{first.data.run.path} and {other.data.run.path}", first.summary, other.summary
        if None not in (a.get("data_hash"), b.get("data_hash")) and a["data_hash"] != b["data_hash"]:
            problem = f"on different data (the content hashes of {first.split} differ)"
            remedy = "evaluate one of them on the store of the other with --data"
        elif first.trials != other.trials:
            n_shared = len({*first.trials} & {*other.trials})
            problem = f"on different trials ({len(first.trials)} and {len(other.trials)}, {n_shared} in common)"
            remedy = f"evaluate both on the same {first.split} trials"
        elif (different := first.lengths != other.lengths).any():
            problem = f"with different references for trial {first.trials[int(different.argmax())]}"
            remedy = "evaluate both on the same store"
        elif first.metric == "WER" and (key := next((k for k in _WORD_SEARCH if a.get(k) != b.get(k)), None)):
            problem = f"with different settings ({key} {a.get(key)} and {b.get(key)})"
            remedy = "decode both with the same"
        else:
            continue
        raise UserError(f"{names} were scored {problem} and cannot be compared; {remedy}")


# --- Groups of runs and their differences ----------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Runs of one recipe that differ only in their seed."""

    name: str
    scores: tuple[RunScores, ...]

    @cached_property
    def arm(self) -> Arm:
        return Arm(np.stack([s.errors for s in self.scores]), self.scores[0].lengths)

    @property
    def metric(self) -> str:
        return self.scores[0].metric

    @property
    def seeds(self) -> list[int | None]:
        return [s.data.recipe.train.seed if s.data.recipe else None for s in self.scores]

    def to_dict(self) -> dict[str, Any]:
        runs = [
            {"path": str(s.data.run.path), "seed": seed, "per": float(rate), "step": s.step}
            for s, seed, rate in zip(self.scores, self.seeds, self.arm.rates, strict=True)
        ]
        return {"name": self.name, "per": self.arm.rate, "seed_sd": self.arm.seed_sd, "runs": runs}


@dataclass(frozen=True)
class Difference:
    """One group compared with another; a positive difference is worse."""

    reference: Group
    group: Group
    contrast: Contrast
    p_adjusted: float
    n_comparisons: int

    @property
    def significant(self) -> bool:
        return self.p_adjusted < ALPHA

    @property
    def verdict(self) -> str:
        if not self.significant:
            return "no_evidence"
        return "better" if self.contrast.estimate < 0 else "worse"

    @property
    def points(self) -> float:
        return 100 * self.contrast.estimate

    @property
    def changes(self) -> tuple[Change, ...]:
        before, after = (group.scores[0].data.recipe for group in (self.reference, self.group))
        return result_changes(before, after) if before and after else ()

    @property
    def sessions_better(self) -> int:
        """Sessions in which the group makes fewer errors."""
        return int((self._errors_by_session < 0).sum())

    @property
    def sessions_worse(self) -> int:
        return int((self._errors_by_session > 0).sum())

    @property
    def _errors_by_session(self) -> np.ndarray:
        errors = self.group.arm.errors.mean(0) - self.reference.arm.errors.mean(0)
        return np.bincount(_session_codes(self.reference), weights=errors)

    @property
    def p_text(self) -> str:
        return p_text(self.p_adjusted)

    @property
    def interval_text(self) -> str:
        """The interval of the difference in points, such as `−2.1 to +0.3`."""
        return f"{100 * self.contrast.low:+.1f} to {100 * self.contrast.high:+.1f}".replace("-", "−")

    @property
    def sentence(self) -> str:
        """Whether the group is better than the reference, and what the interval does not cover."""
        c, b, a, n = self.contrast, self.group.name, self.reference.name, self.n_comparisons
        if c.estimate == 0 and c.low == c.high == 0:
            return f"{b} and {a} make the same number of errors in every trial."
        corrected = f"Holm-adjusted {self.p_text} for {n} comparisons" if n > 1 else p_text(c.p)
        detail = f"({100 * c.level:.0f} % interval of the difference {self.interval_text}, {corrected})"
        size = f"{abs(self.points):.1f} percentage points"
        caveat = ""
        if not c.seeds_counted:
            caveat = " One run per side: variation between seeds is not included."
        elif min(c.n_runs) == 1:
            caveat = " One side has a single run; its variation between seeds is estimated from the other."
        if self.significant:
            return f"{b} is {self.verdict} than {a} by {size} of {self.group.metric} {detail}.{caveat}"
        after = f" after correction for {n} comparisons" if c.p < ALPHA else ""
        change = f"{self.group.metric} is {'lower' if c.estimate < 0 else 'higher'} by {size}"
        return f"No significant difference between {b} and {a}{after}: {change} {detail}.{caveat}"

    @property
    def method(self) -> str:
        """How the interval was computed."""
        c, metric = self.contrast, self.group.metric
        sampled = f"{c.n_trials} trials" if c.over == "trials" else f"the sessions of {c.n_trials} trials"
        rate = f"{metric} is the sum of edits over the sum of reference lengths."
        if c.method == "bootstrap":
            return f"Paired bootstrap over {sampled}; {rate}"
        runs = " and ".join(str(n) for n in c.n_runs)
        seeds = f" and over seeds ({runs} runs)" if c.seeds_counted else ""
        return f"Variance over {sampled}{seeds}, t distribution with {c.df:.1f} degrees of freedom; {rate}"

    def to_dict(self) -> dict[str, Any]:
        c = self.contrast
        return {
            "a": self.reference.name,
            "b": self.group.name,
            "difference": c.estimate,
            **{key: getattr(c, key) for key in ("low", "high", "level", "p")},
            "p_adjusted": self.p_adjusted,
            "significant": self.significant,
            "verdict": self.verdict,
            "sentence": self.sentence,
            **{key: getattr(c, key) for key in ("method", "over", "df")},
            "runs_a": c.n_runs[0],
            "runs_b": c.n_runs[1],
            "sessions_better": self.sessions_better,
            "sessions_worse": self.sessions_worse,
            "changes": [asdict(change) for change in self.changes],
        }


def differences(pairs: Sequence[tuple[Group, Group]], over: str = "trials") -> tuple[Difference, ...]:
    """Test the second group of each pair against the first, Holm-adjusted over all pairs."""
    contrasts = []
    for before, after in pairs:
        _check_comparable([*before.scores, *after.scores])
        codes = _session_codes(before) if over == "sessions" else None
        contrasts.append(difference(before.arm, after.arm, groups=codes))
    adjusted = holm([c.p for c in contrasts])
    return tuple(Difference(*pair, c, p, len(pairs)) for pair, c, p in zip(pairs, contrasts, adjusted, strict=True))


def _session_codes(group: Group) -> np.ndarray:
    """The session of each trial as an integer."""
    return np.unique(group.scores[0].sessions, return_inverse=True)[1]


def p_text(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


# --- The comparison of runs ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Every group compared with the first."""

    split: str
    groups: tuple[Group, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]  # limits on the interpretation

    def __repr__(self) -> str:
        names = ", ".join(group.name for group in self.groups[1:])
        return f"Comparison({names} with {self.groups[0].name} on {self.n_trials:,} {self.split} trials)"

    @property
    def n_trials(self) -> int:
        return len(self.groups[0].scores[0].trials)

    @property
    def rate_name(self) -> str:
        return self.groups[0].metric

    @property
    def method(self) -> str:
        return self.differences[0].method

    def to_dict(self) -> dict[str, Any]:
        return {
            "split": self.split,
            "n_trials": self.n_trials,
            "reference": self.groups[0].name,
            "groups": [group.to_dict() for group in self.groups],
            "n_comparisons": len(self.differences),
            "comparisons": [found.to_dict() for found in self.differences],
            "notes": list(self.notes),
        }

    def plot(self) -> Any:
        """The differences with their intervals as an Altair chart."""
        return base.for_notebook(_forest_chart(self))

    def to_frame(self) -> Any:
        """One line per comparison as a pandas DataFrame."""
        return to_frame(found.to_dict() for found in self.differences)


def compare(
    *runs: Run | str | Path,
    split: str = "val",
    label: str | None = None,
    over: str = "trials",
    evaluate_missing: bool = True,
    html: str | Path | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare runs with the first one on the same trials; runs that differ only in their seed form a group.

    Args:
        runs: Run folders, or folders of runs; the first is the reference.
        split: val, test, dev or train; runs without results on it are evaluated.
        label: Compare `results/<split>.<label>.jsonl`.
        over: Unit of resampling: trials (within fixed sessions) or sessions.
        evaluate_missing: Evaluate runs without results on `split` first.
        html: HTML page with curves and differences to write.
    """
    check_writable(html, kind=PAGE)
    if over not in _SAMPLING_UNITS:
        raise UserError(f"unknown sampling unit {over!r} (--over); choose {' or '.join(_SAMPLING_UNITS)}")
    opened = _open_runs(runs)
    if label is None and _only_last_scored(opened, split):
        label = _LAST
        logger.info(f"comparing the last checkpoints (results {split}.{_LAST}), which all of these runs have")
    for run in opened:
        if evaluate_missing and not run.results_file(split, label).is_file():
            _check_complete([read_run(other) for other in opened])
            _evaluate(run, split, label, progress)
    found = [read_run(run) for run in opened]
    _check_complete(found)
    groups, notes = _make_groups([read_scores(data, split, label) for data in found])
    if over == "sessions" and len(sessions := {*groups[0].scores[0].sessions}) < 2:
        raise UserError(f"all trials belong to one session, {min(sessions)}; omit --over sessions")
    tested = differences([(groups[0], group) for group in groups[1:]], over)
    comparison = Comparison(split, groups, tested, (*notes, *_provenance_notes(groups)))
    if html is not None:
        write_text(Path(html), comparison_page(comparison))
    return comparison


def _open_runs(paths: Sequence[Run | str | Path]) -> list[Run]:
    found: list[Run] = []
    for path in paths:
        if isinstance(path, Run):
            found.append(path)
            continue
        folder = local_path(path)
        single = is_run_folder(folder) or not folder.is_dir()
        found += [open_run(p) for p in ([folder] if single else find_runs(folder))]
    if len({run.path.resolve() for run in found}) < len(found):
        raise UserError("a run is given twice; a comparison needs different runs")
    if len(found) < 2:
        given = found[0].path if found else "no run"
        raise UserError(f"{given} is a single run; give at least two, such as: arcuate compare runs/a runs/b")
    return found


def _check_complete(runs: Sequence[RunData]) -> None:
    """Reject unreadable and unfinished runs: their difference says nothing about their settings."""
    if problems := [problem for data in runs if data.recipe is None for problem in data.problems[:1]]:
        raise UserError(problems[0])
    unfinished = [f"{data.run.path} ({data.unfinished})" for data in runs if data.unfinished]
    if unfinished:
        raise UserError(
            f"a comparison needs complete runs, but training is unfinished in: {'; '.join(unfinished)}; wait for"
            " those that are training, resume the others with arcuate train RUN/recipe.yaml --run RUN --resume, or"
            " leave these runs out"
        )


def _only_last_scored(runs: Sequence[Run], split: str) -> bool:
    """Whether all runs have results of the last checkpoint, as the arms of an ablation, but not all of the best."""
    if all(run.results_file(split).is_file() for run in runs):
        return False
    return all(run.results_file(split, _LAST).is_file() for run in runs)


def _evaluate(run: Run, split: str, label: str | None, progress: Progress | None) -> None:
    if label is not None:
        raise UserError(
            f"{run.path} has no results {split}.{label}; create them with: arcuate evaluate {run.path}"
            f" --split {split} --label {label}"
        )
    from arcuate.evaluation.evaluate import evaluate  # imports torch

    logger.info(f"evaluating {run.path} on {split}")
    evaluate(run, split=split, progress=progress)


def _make_groups(scores: Sequence[RunScores]) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """Group runs that differ only in their seed; if all runs do, each forms its own group."""
    members: list[list[RunScores]] = []
    for found in scores:
        group = next((m for m in members if _are_repetitions(m[0].data, found.data)), None)
        if group is None:
            members.append([found])
        else:
            group.append(found)
    notes: tuple[str, ...] = ()
    if len(members) == 1:
        members = [[found] for found in scores]
        notes = ("These runs differ only in their seed, so their differences are variation between seeds.",)
    names = _group_names([[s.data.run for s in m] for m in members])
    return tuple(Group(name, tuple(m)) for name, m in zip(names, members, strict=True)), notes


def _are_repetitions(a: RunData, b: RunData) -> bool:
    if a.recipe is None or b.recipe is None or a.environment.get("parent") != b.environment.get("parent"):
        return False
    return differ_only_in_seed(result_changes(a.recipe, b.recipe))


def _group_names(members: Sequence[Sequence[Run]]) -> list[str]:
    """The name of the run; for several, their common folder if it holds no other group, else the first of them."""
    folders = [{run.path.resolve().parent for run in runs} for runs in members]
    suffixes = ["" if len(runs) == 1 else f" (+{len(runs) - 1})" for runs in members]
    parents = [runs[0].path.resolve().parent.name for runs in members]
    names = []
    for i, (runs, suffix, parent) in enumerate(zip(members, suffixes, parents, strict=True)):
        others = set().union(*folders[:i], *folders[i + 1 :])
        own_folder = len(folders[i]) == 1 and folders[i].isdisjoint(others)
        names.append(parent if len(runs) > 1 and own_folder else f"{runs[0].name}{suffix}")
    if len(set(names)) < len(names):
        names = [str(Path(parent) / name) for parent, name in zip(parents, names, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{runs[0].path}{suffix}" for runs, suffix in zip(members, suffixes, strict=True)]
    return names


def _provenance_notes(groups: Sequence[Group]) -> tuple[str, ...]:
    """Limits on the interpretation of the numbers."""
    scores = [s for group in groups for s in group.scores]
    notes, split = [], scores[0].split
    if any(selected_on_scored_trials(s.data.run, {"split": split, **s.summary}) for s in scores):
        notes.append(
            f"Checkpoints were selected on {split}, the trials they are scored on, so all error rates are"
            " optimistically biased."
        )
    searches = sorted({_describe_search(s.summary) for s in scores})
    if len(searches) > 1:
        notes.append(
            f"The runs were decoded with different searches ({', '.join(searches)}), which may explain the difference."
        )
    if len({str(lookup(s.data.environment, "data.hashes.train")) for s in scores}) > 1:
        notes.append("The runs were trained on different data.")
    revisions = sorted({str(r)[:12] for s in scores if (r := s.data.environment.get("revision"))})
    if len(revisions) > 1:
        notes.append(
            f"The runs were trained with different code ({', '.join(revisions)}), which may contribute to the"
            " difference."
        )
    for s in scores:
        best = best_checkpoint_step(s.data.run)
        if best is not None and s.step is not None and s.step != best and s.summary.get("label") != _LAST:
            notes.append(f"{s.data.run.path} was scored at step {s.step}, but its best checkpoint is step {best}.")
    return tuple(notes)


def _describe_search(summary: Row) -> str:
    """How the trials were decoded; equal texts are comparable."""
    head, beam = summary.get("head"), summary.get("beam")
    text = str(summary.get("search")) + (f" of size {beam}" if beam is not None else "")
    return text + (f" with the {head} head" if head not in (None, "ctc") else "")


def selected_on_scored_trials(run: Run, summary: Row) -> bool:
    """Whether the checkpoint was selected on the trials it is scored on; the last checkpoint is not selected."""
    if summary.get("selected_on") is None or summary.get("selected_on") != summary.get("split"):
        return False
    best, step = best_checkpoint_step(run), summary.get("step")
    return summary.get("label") != _LAST and (best is None or step is None or step == best)


def best_checkpoint_step(run: Run) -> int | None:
    """The step of the checkpoint that `best` points to, if there is one: step-00000600, or best-00000600 if undone."""
    link = run.checkpoints / "best"
    digits = link.resolve().name.rpartition("-")[2] if link.exists() else ""
    return int(digits) if digits.isdigit() and len(digits) < 16 else None


# --- The page: differences, overlaid learning curves and changed settings --------------------------------


def comparison_page(comparison: Comparison) -> str:
    reference, first = comparison.groups[0].name, comparison.differences[0]
    n, runs = len(comparison.differences), [(g.name, s.data) for g in comparison.groups for s in g.scores]
    corrected = f" after Holm correction for {n} comparisons" if n > 1 else ""
    caption = (
        f"Difference from {reference} in percentage points of {comparison.rate_name}, with"
        f" {100 * first.contrast.level:.0f}\u202f% intervals. Filled markers: significant{corrected}. {first.method}"
    )
    return render(
        "comparison.html",
        heading=" · ".join(group.name for group in comparison.groups),
        kind="comparison",
        simulated=any(data.simulated for _, data in runs),
        comparison=comparison,
        scored_on=f"Scored on the same {comparison.n_trials:,} {split_name(comparison.split)} trials.",
        forest=make_figure(_forest_chart(comparison), caption=caption, legend=FOREST_LEGEND),
        curves=overlaid_figures(runs, comparison.rate_name),
        changes=[
            (d.reference.name, d.group.name, [(c.path, value_text(c.before), value_text(c.after)) for c in d.changes])
            for d in comparison.differences
        ],
        runs=[
            (str(scores.data.run.path), group.name, seed, count(scores.step), percent(float(rate)))
            for group in comparison.groups
            for scores, seed, rate in zip(group.scores, group.seeds, group.arm.rates, strict=True)
        ],
    )


def _forest_chart(comparison: Comparison) -> base.Chart:
    reference, name = comparison.groups[0].name, comparison.rate_name
    rows = [(d.group.name, d.contrast, d.significant) for d in comparison.differences]
    label = f"Differences in {name} from {reference}"
    return plots.forest_chart(rows, title=f"Difference from {reference}", label=label, rate_name=name)
