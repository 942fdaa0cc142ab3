"""What the commands that train and the commands about runs print."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.text import Text

from arcuate.cli.console import Given, counted, out, percent, print_table, say
from arcuate.cli.show_data import leakage_line, print_summary
from arcuate.cli.show_results import evaluation, transcription
from arcuate.progress import Progress

if TYPE_CHECKING:
    from arcuate.adaptation.drift import DriftResult
    from arcuate.doctor import Diagnosis
    from arcuate.doctor.remedy import Remedy, TriedRemedy
    from arcuate.evaluation.decode import Transcription
    from arcuate.experiments.ablation import AblationRuns
    from arcuate.experiments.calibrate import CalibrationResult
    from arcuate.experiments.demo import DemoResult
    from arcuate.experiments.sweep import SweepResult, SweepTrial
    from arcuate.insight.ablation import AblationResult
    from arcuate.insight.compare import Comparison
    from arcuate.insight.runs import RunTable

_COLOURS = {"healthy": "green", "unfinished": "cyan", "too_short": "cyan", "plateaued": "yellow", "overfit": "yellow"}


# --- Training ------------------------------------------------------------------------------------------------


def trained(result: Any, given: Given) -> None:
    if given.get("dry_run"):
        say("dry run: nothing was written")


def demo(result: "DemoResult", given: Given) -> None:
    print_summary(result.prepared.report, result.prepared.path)
    say(leakage_line(result.prepared.leakage))
    evaluation(result.evaluation, given)
    _print_nbest(result.words)
    transcription(result.words, given)
    out.print(f"Open {result.page} in a browser. The demo took {result.seconds:.0f} s.", soft_wrap=True)


def _print_nbest(words: "Transcription") -> None:
    """The n-best list of one sentence, if possible one with errors."""
    with_errors = [t for t in words if t.word_errors and t.word_errors.errors and len(t.n_best) > 1]
    example = (with_errors or list(words))[0]
    out.print(f"\n  ref  {example.reference}", soft_wrap=True, markup=False)
    for rank, hypothesis in enumerate(example.n_best, 1):
        text = f"{rank:>5}  {hypothesis.text or '–'}  ({hypothesis.total:.1f})"
        out.print(text, soft_wrap=True, markup=False)
    out.print()


def sweep(result: "SweepResult", given: Given) -> None:
    rows = [
        (str(t.number), t.state, percent(t.per), str(t.step or ""), "\n".join(t.overrides), t.reason or "")
        for t in sorted(result.trials, key=_rank)
    ]
    print_table(("trial", "state", result.rate_name, "step", "settings", "reason"), rows, fold=True)
    if running := sum(t.state == "running" for t in result.trials):
        say(f"{running} still running, or killed less than a minute ago: the same command then continues them")
    if result.best is None or result.command is None:
        say("no trial is complete")
        return
    out.print(f"\nbest: trial {result.best.number}, {result.rate_name} {percent(result.best.per)}, {result.best.run}")
    out.print(shlex.join(result.command), markup=False, soft_wrap=True)
    if result.signal is not None:
        say(f"stopped by {result.signal.name}; run the same command again to continue")


def _rank(trial: "SweepTrial") -> tuple[bool, float, int]:
    """Complete trials first, best on top."""
    per = float("inf") if trial.per is None else trial.per
    return trial.state != "complete", per, trial.number


@dataclass(frozen=True)
class Ablation:
    """The runs of an ablation and, unless it was a dry run, the effects of its factors."""

    runs: "AblationRuns"
    effects: "AblationResult | None"

    @property
    def exit_code(self) -> int:
        if self.runs.signal is not None:
            return 128 + self.runs.signal
        return 0 if self.effects is None or self.effects.groups else 1

    def to_dict(self) -> dict[str, Any]:
        return (self.effects or self.runs).to_dict()


def judge(runs: "AblationRuns", given: Given) -> Ablation:
    from arcuate.doctor import diagnose
    from arcuate.insight.ablation import report_ablation

    return Ablation(runs, None if given.get("dry_run") else report_ablation(runs, diagnose=diagnose))


def ablation(result: Ablation, given: Given) -> None:
    _print_plan(result.runs) if result.effects is None else _print_effects(result.effects)
    if result.runs.signal is not None:
        say(f"stopped by {result.runs.signal.name}; run the same command again to continue")


def _print_plan(runs: "AblationRuns") -> None:
    experiment, planned = runs.experiment, runs.to_dict()["runs"]
    rows = []
    for arm in experiment.arms:
        seeds = ", ".join(str(row["seed"]) for row in planned if row["arm"] == arm.name)
        rows.append((arm.name, seeds, "\n".join(arm.overrides(experiment.factors)) or "the baseline"))
    print_table(("arm", "seeds", "settings"), rows, fold=True)
    say(f"{len(planned)} runs, {runs.n_steps:,} steps in total; dry run: nothing was written")


def _print_effects(ablation: "AblationResult") -> None:
    experiment = ablation.experiment
    rows = []
    for arm in ablation.arms:
        values = arm.to_dict()
        sd = "–" if values["seed_sd"] is None else f"{100 * values['seed_sd']:.1f}"
        verdicts = ", ".join(f"{name} × {n}" for name, n in arm.verdicts.items())
        rows.append((arm.arm, percent(values["per"]), sd, str(len(values["per_by_run"])), verdicts))
    title = f"{ablation.rate_name} on {experiment.split}, {experiment.checkpoint} checkpoint"
    print_table(("arm", ablation.rate_name, "SD over seeds", "runs", "verdicts"), rows, title=title, fold=True)
    for factor in ablation.factors:
        out.print(factor.sentence, markup=False, soft_wrap=True)
    out.print(f"\n{ablation.verdict}", markup=False, soft_wrap=True)
    if ablation.n_comparisons > 1:
        say(f"p-values are Holm-adjusted for {ablation.n_comparisons} comparisons; the 95 % intervals are not adjusted")
    for run, reason in ablation.failed.items():
        say(f"{run} failed: {reason}")
    if ablation.missing:
        say(f"missing or incomplete, and excluded from all effects: {'; '.join(ablation.missing)}")
    if ablation.groups:
        say(f"wrote {experiment.out / 'ablation.html'}")


def calibration(result: "CalibrationResult", given: Given) -> None:
    from arcuate.data.alphabet import error_rate_name

    if result.interrupted:
        say(f"stopped by {result.signal.name if result.signal else 'request'}: nothing was written")
        return
    rows = []
    for point in result.curve:
        interval = "–" if point.low is None else f"{percent(point.low)} to {percent(point.high)}"
        rows.append((str(point.sentences), percent(point.per), interval))
    if result.n_held_out:
        name = error_rate_name(result.classes)
        headings = ("sentences", name, "95 % interval")
        title = f"{name} on the {counted(result.n_held_out, 'later sentence')} of the session"
        print_table(headings, rows, title=title, right=headings)
    say(f"wrote {result.path} with session {result.session}; its parent {result.parent} is unchanged")
    say(f"next: arcuate report {result.path}, arcuate evaluate {result.path}")


# --- Diagnosis -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Consultation:
    """A diagnosis and what was done about it."""

    diagnosis: "Diagnosis"
    remedy: "Remedy"
    written: Path | None
    tried: "TriedRemedy | None"

    def to_dict(self) -> dict[str, Any]:
        done = {"remedy": self.remedy.to_dict(), "fix": self.written, "tried": self.tried and self.tried.to_dict()}
        return {**self.diagnosis.to_dict(), **done}


def doctor(
    path: Path,
    *,
    fix: Path | None = None,
    try_: bool = False,
    html: Path | None = None,
    data: Path | None = None,
    dataset: str | None = None,
    planned_steps: int | None = None,
    check_labels: bool = False,
    progress: Progress | None = None,
) -> Consultation:
    """Diagnose a training run.

    Args:
        path: Run folder, or log of any trainer or tracker.
        fix: Write the remedy to this file, as a recipe that extends the run's.
        try_: Train a new run with the remedy and the same budget beside the run, and compare.
        html: Write an HTML page with the curves to this file.
        data: Store of the run, if moved after training.
        dataset: Data set, b2t24 or b2t25; default: inferred.
        planned_steps: Planned number of steps; default: inferred.
        check_labels: Decode the training trials too, to find wrong labels.
    """
    from arcuate.doctor import diagnose, try_remedy, write_remedy
    from arcuate.doctor.remedy import check_remedy_file

    check_remedy_file(fix)
    diagnosis = diagnose(
        path,
        dataset=dataset,
        planned_steps=planned_steps,
        html=html,
        check_store=True,
        check_labels=check_labels,
        data=data,
        progress=progress,
    )
    remedy = diagnosis.fix()
    written = write_remedy(remedy, fix) if fix is not None and remedy else None
    tried = try_remedy(remedy, data=data, progress=progress) if try_ and remedy else None
    return Consultation(diagnosis, remedy, written, tried)


def consultation(result: Consultation, given: Given) -> None:
    diagnosis, remedy, written, tried = result.diagnosis, result.remedy, result.written, result.tried
    if given.get("html") is not None:
        say(f"page: {given['html']}")
    print_diagnosis(diagnosis)
    if (given.get("fix") is not None or given.get("try_")) and not remedy:
        out.print(f"\nno remedy: {remedy.message}", markup=False, soft_wrap=True)
    if written is not None:
        train = remedy.train_command(written, diagnosis.store)
        out.print(f"\nwrote {written}; train it with: {train}", markup=False, soft_wrap=True)
    if tried is not None:
        out.print(f"\n{tried.sentence}", markup=False, soft_wrap=True)
        say(f"the remedy was trained in {tried.run.path}")


def print_diagnosis(diagnosis: "Diagnosis") -> None:
    colour = _COLOURS.get(diagnosis.primary, "red")
    line = Text.assemble((diagnosis.primary.replace("_", " "), f"bold {colour}"), f"  {diagnosis.name}")
    if diagnosis.since:
        line.append(f"  {diagnosis.since}")
    if diagnosis.secondary:
        line.append(f"  (also: {', '.join(diagnosis.secondary).replace('_', ' ')})", "dim")
    if diagnosis.best_per is not None and diagnosis.best_step is not None:
        best, last = percent(diagnosis.best_per), percent(diagnosis.last_per)
        line.append(f"\n{diagnosis.error_name}: best {best} at {diagnosis.best_step:,}, last {last}")
    out.print(line)
    for sentence in diagnosis.evidence:
        out.print(Padding(Text(f"· {sentence}"), (0, 0, 0, 2)))
    if diagnosis.runs:
        _print_runs(diagnosis)
    if diagnosis.causes:
        out.print("\nlikely causes, most likely first")
        for i, cause in enumerate(diagnosis.causes, start=1):
            out.print(Padding(Text(f"{i}. {cause.cause}: {cause.because}"), (0, 0, 0, 2)))
            out.print(Padding(Text(f"try {cause.change}", style="dim"), (0, 0, 0, 5)))
    if diagnosis.suggestion:
        prefix = ("\ntry first ", "bold") if diagnosis.causes else "\n"
        out.print(Text.assemble(prefix, diagnosis.suggestion))
    remarks = [*diagnosis.inferences, *diagnosis.notes, f"read as {diagnosis.source}"]
    out.print(Padding(Text("\n".join(remarks), style="dim"), (1, 0, 0, 0)))


def _print_runs(diagnosis: "Diagnosis") -> None:
    numbers = (f"best {diagnosis.error_name}", "at step", f"last {diagnosis.error_name}", "last step")
    rows = []
    for run in diagnosis.runs:
        steps = [f"{step:,}" if step is not None else "–" for step in (run.best_step, run.last_step)]
        verdict = run.primary.replace("_", " ")
        rows.append((run.name, verdict, percent(run.best_per), steps[0], percent(run.last_per), steps[1]))
    print_table(("run", "verdict", *numbers), rows, right=numbers)


# --- Lists and pages -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """A page and, for a store, the changes that it shows."""

    page: Path
    drift: "DriftResult | None" = None

    def to_dict(self) -> dict[str, Any]:
        return {"report": str(self.page), **(self.drift.to_dict() if self.drift else {})}


def write_report(run: Path, *, split: str | None = None, progress: Progress | None = None) -> Report:
    """Write a page.

    Args:
        run: Run folder, or prepared store.
        split: Split whose results are shown; default: the first evaluated of val, test, dev, train.
    """
    from arcuate.insight.report.drift import is_store, report_file, write_drift
    from arcuate.insight.report.page import write_report

    if not is_store(run):
        return Report(write_report(run, split))
    drift = write_drift(run, progress=progress)
    return Report(report_file(drift.store), drift)


def report(result: Report, given: Given) -> None:
    if result.drift is not None:
        _print_drift(result.drift)
    out.print(f"{result.page}", soft_wrap=True, markup=False)


def _print_drift(result: "DriftResult") -> None:
    columns = ("channels", *result.sessions[0].arrays, "flat")
    rows = []
    for row in result.sessions:
        arrays = [percent(array.profile_similarity) for array in row.arrays.values()]
        rows.append((row.session, percent(row.profile_similarity), *arrays, str(len(row.flat))))
    print_table(("session", *columns), rows, title=f"similarity to {result.reference}", right=columns)
    for row in result.sessions:
        if row.reordered:
            say(f"warning: the channels of {row.session} look re-ordered relative to the previous session")
        if row.newly_flat:
            say(f"{row.session}: {counted(len(row.newly_flat), 'channel')} became flat")


def runs(found: "RunTable", given: Given) -> None:
    cells = found.cells()
    head = list(cells[0])[:6]  # parent and changes are below each run, because names and settings are long
    table = [head, *([row[name] for name in head] for row in cells)]
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    narrow = sum(widths) + 2 * len(widths) > out.width
    for i, line in enumerate(table):
        padded = [cell.ljust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        name = f"{line[0]}\n    " if narrow else f"{line[0].ljust(widths[0])}  "
        out.print(Text(name + "  ".join(padded).rstrip(), style="bold" if i == 0 else ""), soft_wrap=True)
        if i and cells[i - 1]["parent"] != "–":
            changes = "relative to {parent}: {changes}".format_map(cells[i - 1])
            out.print(Padding(Text(changes, style="dim"), (0, 0, 0, 4)))
    for data in found:
        for problem in data.problems:
            say(f"{data.name}: {problem}")


def ledger(text: str, given: Given) -> None:
    if given.get("out") is None:
        out.print(text, markup=False, soft_wrap=True, end="")
    else:
        say(f"wrote {given['out']}")


def serve(prepared: Any, given: Given) -> None:
    prepared.run()


def comparison(comparison: "Comparison", given: Given) -> None:
    from arcuate.insight.runs import changes_text

    rows = []
    for group in comparison.groups:
        sd = "–" if group.arm.seed_sd is None else f"{100 * group.arm.seed_sd:.1f}"
        rows.append((group.name, percent(group.arm.rate), str(len(group.scores)), sd))
    title = f"{comparison.rate_name} on {comparison.n_trials} {comparison.split} trials"
    print_table(("", comparison.rate_name, "runs", "SD over seeds"), rows, title=title, fold=True)
    for found in comparison.differences:
        out.print(f"\n{found.sentence}", markup=False, soft_wrap=True)
        n_sessions = found.sessions_better + found.sessions_worse
        if n_sessions > 1:
            out.print(f"Fewer errors in {found.sessions_better} of the {n_sessions} sessions that differ.")
        changed = changes_text(found.changes, n_shown=12) if found.changes else "nothing"
        out.print(f"Changed: {changed}.", markup=False, soft_wrap=True)
    say("")
    for note in (*comparison.notes, comparison.method):
        say(note)
    if given.get("html") is not None:
        say(f"wrote {given['html']}")
