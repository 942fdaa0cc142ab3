"""`write_report`: the result in one sentence, the main figures as tiles, then the sections in reading order."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from arcuate.config import value_text
from arcuate.data.releases import published_results
from arcuate.errors import UserError
from arcuate.experiments.recipe import diff_recipes, load_recipe, recipe_names, run_recipe
from arcuate.files import finite_int, finite_number, read_jsonl, write_text
from arcuate.insight.charts.formats import (
    MISSING,
    confidence_text,
    count,
    duration,
    interval,
    parameter_count,
    percent,
    split_name,
)
from arcuate.insight.render import render
from arcuate.insight.report.confidence import confidence_section
from arcuate.insight.report.curves import calibration_points, calibration_section, learning_curves, read_calibration
from arcuate.insight.report.drift import is_store, report_file, write_drift
from arcuate.insight.report.errors import confusions_section, decodings_section, sentences_section, sessions_section
from arcuate.insight.report.run_data import RunData, lookup, read_run_data
from arcuate.insight.report.trial import trial_figures
from arcuate.progress import counted
from arcuate.run import Run, RunLike, open_run


@dataclass(frozen=True)
class Tile:
    """One figure of the headline in a box."""

    name: str
    value: str
    remarks: tuple[str | None, ...] = ()
    kind: str = ""


@dataclass(frozen=True)
class ErrorKind:
    """Substitutions, insertions or deletions: a segment of the bar in the headline."""

    kind: str
    name: str
    n: int
    fraction: float
    rate: str


def write_report(run: RunLike, split: str | None = None) -> Path:
    """Write report.html into a run folder, or the report of a store beside it, and return the path of the page.

    `split` selects results/<split>.jsonl; by default the first scored one of val, test, dev and train is shown.
    """
    if is_store(Path(run)):
        return report_file(write_drift(Path(run)).store)
    run = run if isinstance(run, Run) else open_run(run)
    write_text(run.report_file, report_page(read_run_data(run, split)))
    return run.report_file


def report_page(data: RunData) -> str:
    version = data.environment.get("arcuate")
    calibration, results = read_calibration(data.run), data.results
    tiles = _rate_tile(data), _word_tile(data), _speed_tile(data), _steps_tile(data), _size_tile(data), _time_tile(data)
    return render(
        "report.html",
        heading=data.run.name,
        kind="run report",
        simulated=data.simulated,
        version=version,
        lead=_lead(data),
        notice=_selection_notice(data),
        tiles=[tile for tile in tiles if tile],
        error_kinds=_error_kinds(data),
        n_phonemes=_n_phonemes(data),
        unit=data.unit,
        boundary="silence" if data.unit == "phoneme" else "word boundaries",
        calibration=calibration_section(calibration) if calibration is not None else None,
        curves=learning_curves(data),
        incidents=_incidents(data),
        evaluated=results is not None,
        run_path=shlex.quote(str(data.run.path)),
        other_results=", ".join(f"{name} {percent(summary.get('per'))}" for name, summary in data.other_results),
        by_session=sessions_section(data),
        confusions=confusions_section(data),
        trials=trial_figures(data),
        examples_problem=results.examples_problem if results else None,
        decodings=decodings_section(data),
        decoded=data.words is not None,
        words=sentences_section(data),
        published=_published(data),
        confidence=confidence_section(data),
        recipe=recipe_section(data),
        environment=environment_section(data),
    )


def _published(data: RunData) -> list[tuple[str, ...]]:
    """Rows of the published results on the data set of the run, below its own; empty without any."""
    found = published_results(lookup(data.environment, "data.layout"), data.simulated)
    if not found:
        return []
    own = [(data.short_rate_name, data.results.rate, data.results.split)] if data.results is not None else []
    if data.words is not None:
        own.append(("WER", data.words.rate, data.words.split))
    rows: list[tuple[str, ...]] = [
        (metric, percent(rate), "this run", split, MISSING, MISSING) for metric, rate, split in own if rate is not None
    ]
    for r in found:
        rows.append((r.metric, f"{r.percent:.1f} %", r.system, r.split, "yes" if r.streaming else "no", r.source))
    return rows


def _incidents(data: RunData, n_shown: int = 12) -> list[str]:
    """Interventions of the guard during training, if there were any."""
    file = data.run.incidents_file
    rows = read_jsonl(file, growing=True) if file.exists() else []
    items = [", ".join(f"{k} {v}" for k, v in row.items())[:300] for row in rows[:n_shown]]
    return [*items, f"… and {len(rows) - n_shown} more in {file.name}"] if len(rows) > n_shown else items


# Headline.

_ERROR_KINDS = (("sub", "substitutions"), ("ins", "insertions"), ("del", "deletions"))


def _lead(data: RunData) -> str:
    """What was measured and on which trials, in one sentence; figures between `**` are bold."""
    results = data.results
    if results is None:
        return _calibrated_lead(read_calibration(data.run), data.rate_name) or _unevaluated_lead(data)
    trials = counted(results.n_trials, f"{split_name(results.split)} trial")
    if n_sessions := len({d.session for d in results.decodings}):
        trials += f" of {counted(n_sessions, 'session')}"
    if results.rate is None:
        return f"{trials} decoded. The trials have no labels, so the error rate is unknown."
    n_scored = finite_int(results.summary.get("n_scored"))
    if n_scored is not None and n_scored < results.n_trials:
        trials += f" ({n_scored:,} with labels)"
    step = finite_int(results.summary.get("step"))
    checkpoint = f", checkpoint of step {step:,}" if step is not None else ""
    rate = f"{data.rate_name} **{percent(results.rate)}**{confidence_text(results.interval)}"
    return f"{rate} on {trials}{checkpoint}{_decoding_text(results.summary)}.{_word_lead(data)}"


def _word_lead(data: RunData) -> str:
    """The word error rate in a second sentence, if the same split was decoded to words."""
    words = data.words
    if words is None or words.rate is None:
        return ""
    lm = f" with the language model {words.summary['lm']}" if isinstance(words.summary.get("lm"), str) else ""
    return f" Word error rate **{percent(words.rate)}**{confidence_text(words.interval)}{lm}."


def _decoding_text(summary: Mapping[str, Any]) -> str:
    """How the trials were decoded, unless greedily from the CTC head."""
    head, search, beam = summary.get("head"), summary.get("search"), finite_int(summary.get("beam"))
    parts = []
    if isinstance(head, str) and head != "ctc":
        parts.append(f"the {head} head" if head != "both" else "both heads")
    if search == "beam":
        parts.append(f"beam size {beam:,}" if beam is not None else "beam search")
    return f", decoded with {' and '.join(parts)}" if parts else ""


def _calibrated_lead(calibration: Mapping[str, Any] | None, rate_name: str) -> str:
    """The lead of a run that was calibrated but not evaluated; empty without a calibration curve."""
    points = calibration_points(calibration) if calibration else []
    if calibration is None or not points:
        return ""
    first, last = points[0], points[-1]
    before = f"; {percent(first.per)} without" if first.sentences == 0 and len(points) > 1 else ""
    trials = f"{counted(last.n_trials, 'sentence')} of {calibration.get('session', MISSING)}"
    after = f"after calibration with {counted(last.sentences, 'sentence')}{before}"
    return f"{rate_name} **{percent(last.per)}**{confidence_text((last.low, last.high))} on {trials}, {after}."


def _unevaluated_lead(data: RunData) -> str:
    step, planned, best = data.last_step, finite_int(data.setting("train.steps")), data.best
    if step is None:
        return "The log is still empty. Not evaluated yet."
    done = f"Trained for {step:,}" + (f" of {planned:,}" if planned else "") + " steps"
    if best:
        done += f"; best {split_name(best[0])} error rate in the log {percent(best[2])}, at step {best[1]:,}"
    return f"{done}. Not evaluated yet."


def _selection_notice(data: RunData) -> str | None:
    """Whether the checkpoint was selected on the trials that are scored."""
    results, selected_on = data.results, data.selected_on
    if results is None or results.rate is None:
        return None
    if selected_on is None:
        return "The split on which the checkpoint was selected is not recorded."
    name = split_name(selected_on)
    if selected_on == results.split.split(".")[0]:
        return (
            f"The checkpoint was selected on the same {name} trials that are scored here, so the error rate is"
            " optimistically biased."
        )
    return f"The checkpoint was selected on the {name} split, not on the trials scored here."


def _rate_tile(data: RunData) -> Tile | None:
    results = data.results
    if results and results.rate is not None:
        remarks = (interval(results.interval), "95\u202f% interval") if results.interval else ()
        return Tile(data.rate_name, percent(results.rate), remarks, "first")
    if data.best:
        split, step, rate = data.best
        remark = f"{split_name(split)}, step {step:,}"
        return Tile("Best error rate in the log", percent(rate), (remark,), "first")
    return None


def _word_tile(data: RunData) -> Tile | None:
    """WER of the decoded words, or the one in the log at the best validation."""
    words = data.words
    if words and words.rate is not None:
        remarks = (interval(words.interval), "95\u202f% interval") if words.interval else (split_name(words.split),)
        return Tile("Word error rate", percent(words.rate), remarks)
    rates = [
        (wer, row["step"], split)
        for split, rows in data.validation.items()
        for row in rows
        if (wer := finite_number(row.get("wer"))) is not None
    ]
    if not rates:
        return None
    rate, step, split = min(rates)
    return Tile("Best word error rate in the log", percent(rate), (f"{split_name(split)}, step {step:,}",))


def _speed_tile(data: RunData) -> Tile | None:
    """Words per minute, of decoded words or else of the references, and the delay of the model."""
    summaries = [found.summary for found in (data.words, data.results) if found]
    found = next((s for s in summaries if finite_number(s.get("words_per_minute")) is not None), {})
    speed, correct = (finite_number(found.get(key)) for key in ("words_per_minute", "correct_words_per_minute"))
    if speed is None:
        return None
    delay = finite_number(data.results.summary.get("delay_ms")) if data.results else None
    remarks = (
        None if correct is None else f"{correct:.0f} of them correct",
        None if delay is None else f"delay {delay:.0f}\u202fms",
    )
    return Tile("Words per minute", f"{speed:.0f}", remarks)


def _steps_tile(data: RunData) -> Tile:
    planned, best = finite_int(data.setting("train.steps")), data.best
    of_planned = f"of {planned:,} planned" if planned and planned != data.last_step else None
    best_at = f"best {split_name(best[0])} error rate at {best[1]:,}" if best else None
    return Tile("Optimizer steps", count(data.last_step), (of_planned, best_at))


def _size_tile(data: RunData) -> Tile:
    channels, n_sessions = finite_int(lookup(data.environment, "data.n_channels")), len(data.sessions)
    sizes = [f"{channels} channels" if channels else "", counted(n_sessions, "session") if n_sessions else ""]
    n_parameters = parameter_count(data.environment.get("n_parameters"))
    return Tile("Parameters", n_parameters, (", ".join(size for size in sizes if size),))


def _time_tile(data: RunData) -> Tile | None:
    seconds, steps, device = data.training_seconds, data.last_step, data.environment.get("device")
    if seconds is None or not steps:
        return None
    per_step = f"{finite_number(seconds / steps):.2g}\u202fs per step"
    return Tile("Training time", duration(seconds), (per_step, f"on {device}" if device else None))


def _n_phonemes(data: RunData) -> int:
    results = data.results
    return (finite_int(results.summary.get("n_tokens")) or results.total.length) if results else 0


def _error_kinds(data: RunData) -> list[ErrorKind]:
    """Substitutions, insertions and deletions as segments of one bar."""
    results = data.results
    if results is None or results.rate is None:
        return []
    counts = [finite_int(results.summary.get(name)) for _, name in _ERROR_KINDS]
    if any(n is None for n in counts):
        counts = [results.total.substitutions, results.total.insertions, results.total.deletions]
    numbers = [n or 0 for n in counts]
    n_errors, length = sum(numbers), _n_phonemes(data)
    return [
        ErrorKind(kind, name, n, n / n_errors if n_errors else 0.0, f" · {percent(n / length)}" if length else "")
        for n, (kind, name) in zip(numbers, _ERROR_KINDS, strict=True)
    ]


# How the run was made: recipe, command, data and machine.


@dataclass(frozen=True)
class RecipeSection:
    """The recipe as YAML, and its differences from the packaged recipe that it is or extends."""

    text: str
    remarks: tuple[str, ...]
    base: str | None  # the packaged recipe
    changes: tuple[tuple[str, str, str], ...]


def recipe_section(data: RunData) -> RecipeSection | None:
    if not data.recipe_text:
        return None
    recipe = data.recipe
    remarks = tuple(recipe[key] for key in ("summary", "purpose", "notes") if isinstance(recipe.get(key), str))
    base = next((str(recipe[key]) for key in ("name", "extends") if recipe.get(key) in recipe_names()), None)
    try:
        changes = diff_recipes(load_recipe(base), run_recipe(data.run)) if base else []
    except UserError:  # a damaged recipe
        base, changes = None, []
    shown = tuple((c.path, value_text(c.before), value_text(c.after)) for c in changes)
    return RecipeSection(data.recipe_text, tuple(filter(None, remarks)), base, shown)


def _value_text(value: Any, depth: int = 0) -> str:
    if value is None:
        return MISSING
    if depth > 2:
        return "…"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        shown = ", ".join(_value_text(v, depth + 1) for v in value[:12])
        return shown + (f", … ({len(value)})" if len(value) > 12 else "")
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {_value_text(v, depth + 1)}" for k, v in islice(value.items(), 12))
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    return str(value)[:300]


@dataclass(frozen=True)
class EnvironmentSection:
    """Data, versions and machine, and the command that started the run."""

    cards: tuple[tuple[str, Sequence[tuple[str, str]]], ...]  # title, facts
    command: str


def environment_section(data: RunData) -> EnvironmentSection | None:
    environment = data.environment
    if not environment:
        return None
    store = [
        ("path", _value_text(lookup(environment, "data.path"))),
        ("layout", _value_text(lookup(environment, "data.layout"))),
        ("origin", "simulated" if data.simulated else MISSING),
        ("channels", _value_text(lookup(environment, "data.n_channels"))),
        ("sessions", str(len(data.sessions)) if data.sessions else MISSING),
        ("manifest", _value_text(lookup(environment, "data.manifest_hash"))),
    ]
    model = [
        ("parameters", count(environment.get("n_parameters"))),
        ("checkpoint selected on", split_name(data.selected_on) if data.selected_on else MISSING),
        ("started", _value_text(environment.get("started"))),
    ]
    shown = {"data", "n_parameters", "started", "command", "selected_on"}
    machine = [(str(k).replace("_", " "), _value_text(v)) for k, v in environment.items() if k not in shown]
    words = environment.get("command")
    command = " ".join(str(w) for w in words) if isinstance(words, list) else str(words or "")
    groups = ("Data", store), ("Run", model), ("Machine", machine[:30])
    cards = tuple((title, [row for row in rows if row[1] != MISSING]) for title, rows in groups)
    return EnvironmentSection(cards, command[:4000])
