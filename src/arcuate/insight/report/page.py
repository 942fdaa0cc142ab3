"""`write_report`: the result in one sentence, the main figures as tiles, then the sections in reading order."""

import shlex
from pathlib import Path
from typing import Any

from arcuate.config import value_text
from arcuate.data.releases import published_results
from arcuate.experiments.recipe import diff_recipes, load_recipe
from arcuate.files import finite_int, finite_number, write_text
from arcuate.insight.charts.formats import (
    MISSING,
    confidence_text,
    count,
    interval,
    parameter_count,
    percent,
    split_name,
)
from arcuate.insight.render import render
from arcuate.insight.report.curves import confidence_section, learning_curves, read_calibration
from arcuate.insight.report.drift import is_store, report_file, write_drift
from arcuate.insight.report.errors import confusions_section, examples_section, sessions_figure
from arcuate.insight.report.trial import trial_figures
from arcuate.insight.run_data import Results, Row, RunData, lookup, read_results, read_run, read_words
from arcuate.insight.runs import packaged_ancestor
from arcuate.progress import counted, duration
from arcuate.run import Run, RunLike, open_run

_MAX_INCIDENTS = 12
_ERROR_KINDS = {"sub": "substitutions", "ins": "insertions", "del": "deletions"}
_Tile = tuple[str, str, tuple[str, ...]]  # name, value, remarks


def write_report(run: RunLike, split: str | None = None) -> Path:
    """Write report.html into a run folder, or the report of a store beside it, and return the path of the page.

    `split` selects results/<split>.jsonl; by default the first scored one of val, test, dev and train is shown.
    """
    if is_store(Path(run)):
        return report_file(write_drift(Path(run)).store)
    run = run if isinstance(run, Run) else open_run(run)
    write_text(run.report_file, report_page(read_run(run), split))
    return run.report_file


def report_page(data: RunData, split: str | None = None) -> str:
    results = read_results(data, split)
    words = read_words(data, results.split if results else None)
    calibration = read_calibration(data)
    others = {name: s for name, s in data.results.items() if results is None or name != results.name}
    text = data.run.recipe_file.read_text("utf-8", errors="replace") if data.run.recipe_file.is_file() else ""
    return render(
        "report.html",
        heading=data.name,
        kind="run report",
        simulated=data.simulated,
        version=data.environment.get("arcuate"),
        problems=data.problems,
        lead=_lead(data, results, words) or (calibration.headline if calibration else "") or _unevaluated_lead(data),
        notice=_selection_notice(data, results),
        tiles=[tile for tile in _tiles(data, results, words) if tile],
        error_kinds=_error_kinds(results),
        n_tokens=_n_tokens(results),
        unit=data.unit,
        boundary="silence" if data.unit == "phoneme" else "word boundaries",
        calibration=calibration,
        curves=learning_curves(data, results),
        incidents=_incidents(data),
        results=results,
        run_path=shlex.quote(str(data.run.path)),
        other_results=", ".join(f"{name} {percent(summary.get('per'))}" for name, summary in others.items()),
        by_session=sessions_figure(data, results),
        confusions=confusions_section(data, results),
        trials=trial_figures(data, results),
        decodings=examples_section(data, results),
        words=words,
        sentences=examples_section(data, words),
        published=_published(data, results, words),
        confidence=confidence_section(words),
        recipe=text,
        remarks=[r for r in (data.recipe.summary, data.recipe.purpose, data.recipe.notes) if r] if data.recipe else [],
        base=packaged_ancestor(data.recipe) if data.recipe else None,
        changes=_changes(data),
        cards=_cards(data),
        command=_command(data.environment.get("command")),
    )


# --- Headline --------------------------------------------------------------------------------------------


def _lead(data: RunData, results: Results | None, words: Results | None) -> str:
    """What was measured and on which trials, in one or two sentences; figures between `**` are bold."""
    if results is None:
        return ""
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
    rate = f"{data.rate_title} **{percent(results.rate)}**{confidence_text(results.interval)}"
    text = f"{rate} on {trials}{checkpoint}{_decoding_text(results.summary)}."
    if words is None or words.rate is None:
        return text
    lm = f" with the language model {words.summary['lm']}" if isinstance(words.summary.get("lm"), str) else ""
    return f"{text} Word error rate **{percent(words.rate)}**{confidence_text(words.interval)}{lm}."


def _decoding_text(summary: Row) -> str:
    """How the trials were decoded, unless greedily from the CTC head."""
    head, search, beam = summary.get("head"), summary.get("search"), finite_int(summary.get("beam"))
    parts = []
    if isinstance(head, str) and head != "ctc":
        parts.append(f"the {head} head" if head != "both" else "both heads")
    if search == "beam":
        parts.append(f"beam size {beam:,}" if beam is not None else "beam search")
    return f", decoded with {' and '.join(parts)}" if parts else ""


def _unevaluated_lead(data: RunData) -> str:
    step, planned, best = data.last_step, data.planned_steps, data.best
    if step is None:
        return "The log is still empty. Not evaluated yet."
    done = f"Trained for {step:,}" + (f" of {planned:,}" if planned else "") + " steps"
    if best:
        done += f"; best {split_name(best.split)} error rate in the log {percent(best.rate)}, at step {best.step:,}"
    return f"{done}. Not evaluated yet."


def _selection_notice(data: RunData, results: Results | None) -> str | None:
    """Whether the checkpoint was selected on the trials that are scored."""
    if results is None or results.rate is None:
        return None
    selected_on = results.summary.get("selected_on") or data.environment.get("selected_on")
    if not isinstance(selected_on, str):
        return "The split on which the checkpoint was selected is not recorded."
    name = split_name(selected_on)
    if selected_on == results.split:
        return (
            f"The checkpoint was selected on the same {name} trials that are scored here, so the error rate is"
            " optimistically biased."
        )
    return f"The checkpoint was selected on the {name} split, not on the trials scored here."


def _tiles(data: RunData, results: Results | None, words: Results | None) -> list[_Tile | None]:
    best, steps, planned = data.best, data.last_step, data.planned_steps
    best_at = f"best {split_name(best.split)} error rate at {best.step:,}" if best else ""
    channels, n_sessions = finite_int(lookup(data.environment, "data.n_channels")), len(data.sessions)
    sizes = [f"{channels} channels" if channels else "", counted(n_sessions, "session") if n_sessions else ""]
    tiles = [
        _rate_tile(data.rate_title, results)
        or (("Best error rate in the log", percent(best.rate), (_where(best.split, best.step),)) if best else None),
        _rate_tile("Word error rate", words) or _logged_word_tile(data),
        _speed_tile(results, words),
        ("Optimizer steps", count(steps), (f"of {planned:,} planned" if planned and planned != steps else "", best_at)),
        ("Parameters", parameter_count(data.environment.get("n_parameters")), (", ".join(filter(None, sizes)),)),
    ]
    if data.seconds is not None and steps:
        device = data.environment.get("device")
        remarks = f"{data.seconds / steps:.2g}\u202fs per step", f"on {device}" if device else ""
        tiles.append(("Training time", duration(data.seconds), remarks))
    return tiles


def _rate_tile(name: str, results: Results | None) -> _Tile | None:
    if results is None or results.rate is None:
        return None
    bounds = interval(results.interval)
    return name, percent(results.rate), (bounds, "95\u202f% interval") if bounds else (split_name(results.split),)


def _logged_word_tile(data: RunData) -> _Tile | None:
    rates = [
        (wer, row["step"], split)
        for split, rows in data.validation.items()
        for row in rows
        if (wer := finite_number(row.get("wer"))) is not None
    ]
    if not rates:
        return None
    rate, step, split = min(rates)
    return "Best word error rate in the log", percent(rate), (_where(split, step),)


def _where(split: str, step: int) -> str:
    return f"{split_name(split)}, step {step:,}"


def _speed_tile(results: Results | None, words: Results | None) -> _Tile | None:
    """Words per minute, of decoded words or else of the references, and the delay of the model."""
    for found in (words, results):
        speed = finite_number(found.summary.get("words_per_minute")) if found else None
        if found is not None and speed is not None:
            correct = finite_number(found.summary.get("correct_words_per_minute"))
            delay = finite_number(results.summary.get("delay_ms")) if results else None
            remarks = (
                "" if correct is None else f"{correct:.0f} of them correct",
                "" if delay is None else f"delay {delay:.0f}\u202fms",
            )
            return "Words per minute", f"{speed:.0f}", remarks
    return None


def _n_tokens(results: Results | None) -> int:
    if results is None:
        return 0
    return finite_int(results.summary.get("n_tokens")) or sum(d.score.length for d in results.decodings if d.score)


def _error_kinds(results: Results | None) -> list[tuple[str, str, int, float, str]]:
    """Substitutions, insertions and deletions as segments of one bar: kind, name, number, share and rate."""
    if results is None or results.rate is None:
        return []
    scores, length = [d.score for d in results.decodings if d.score], _n_tokens(results)
    numbers = {
        kind: sum(getattr(s, name) for s in scores) if (n := finite_int(results.summary.get(name))) is None else n
        for kind, name in _ERROR_KINDS.items()
    }
    n_errors = sum(numbers.values()) or 1
    return [
        (kind, _ERROR_KINDS[kind], n, n / n_errors, f" · {percent(n / length)}" if length else "")
        for kind, n in numbers.items()
    ]


# --- Sections without a chart ----------------------------------------------------------------------------


def _incidents(data: RunData) -> list[str]:
    """Interventions of the guard during training, if there were any."""
    rows = data.incidents
    items = [", ".join(f"{k} {v}" for k, v in row.items())[:300] for row in rows[:_MAX_INCIDENTS]]
    n_more = len(rows) - len(items)
    return [*items, f"… and {n_more} more in {data.run.incidents_file.name}"] if n_more else items


def _published(data: RunData, results: Results | None, words: Results | None) -> list[tuple[str, ...]]:
    """Rows of the published results on the data set of the run, below its own; empty without any."""
    found = published_results(lookup(data.environment, "data.layout"), data.simulated)
    own: list[tuple[str, ...]] = [
        (name, percent(r.rate), "this run", r.name, MISSING, MISSING)
        for name, r in ((data.rate_name, results), ("WER", words))
        if found and r is not None and r.rate is not None
    ]
    return own + [
        (r.metric, f"{r.percent:.1f} %", r.system, r.split, "yes" if r.streaming else "no", r.source) for r in found
    ]


def _changes(data: RunData) -> list[tuple[str, str, str]]:
    """Settings that differ from the packaged recipe that the run used or extended."""
    base = packaged_ancestor(data.recipe) if data.recipe else None
    if data.recipe is None or base is None:
        return []
    found = diff_recipes(load_recipe(base), data.recipe)
    return [(c.path, value_text(c.before), value_text(c.after)) for c in found]


def _cards(data: RunData) -> list[tuple[str, list[tuple[str, str]]]]:
    """Data, run, and versions and machine, each with its facts."""
    environment = data.environment
    store = {name: lookup(environment, f"data.{name}") for name in ("path", "layout", "n_channels", "manifest_hash")}
    store |= {"origin": "simulated" if data.simulated else None, "sessions": len(data.sessions) or None}
    run = {
        "parameters": count(environment.get("n_parameters")) if "n_parameters" in environment else None,
        "checkpoint selected on": environment.get("selected_on"),
        "started": environment.get("started"),
    }
    shown = {"data", "n_parameters", "started", "command", "selected_on"}
    machine = {name: value for name, value in environment.items() if name not in shown}
    groups = (("Data", store), ("Run", run), ("Machine", machine)) if environment else ()
    return [
        (title, [(name.replace("_", " "), value_text(v)[:300]) for name, v in facts.items() if v is not None][:30])
        for title, facts in groups
    ]


def _command(words: Any) -> str:
    return (" ".join(str(w) for w in words) if isinstance(words, list) else str(words or ""))[:4000]
