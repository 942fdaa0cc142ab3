"""`write_report`: the result in one sentence, the main figures as tiles, then the sections in reading order."""

import shlex
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from arcuate.config import to_tree
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe, recipe_names
from arcuate.files import read_jsonl, write_text
from arcuate.insight.formats import (
    MISSING,
    count,
    duration,
    finite_int,
    finite_number,
    parameter_count,
    percent,
    split_name,
)
from arcuate.insight.pages import Html, Section, card, join, muted, notice, page, scroll_table, tag, tile
from arcuate.insight.report.curves import calibration_points, calibration_section, learning_curves, read_calibration
from arcuate.insight.report.errors import confusions_section, decodings_section, sentences_section, sessions_section
from arcuate.insight.report.run_data import RunData, lookup, read_run_data
from arcuate.insight.report.trial import trial_section
from arcuate.progress import counted
from arcuate.run import Run, open_run
from arcuate.training.config import DESCRIPTIVE_KEYS


def write_report(run: Run | str | Path, split: str | None = None) -> Path:
    """Write report.html into a run folder and return its path.

    `split` selects results/<split>.jsonl; by default the first scored one of val, test, dev and train is shown.
    """
    if not isinstance(run, Run):
        run = open_run(Path(run))
    write_text(run.report_file, report_page(read_run_data(run, split)))
    return run.report_file


def report_page(data: RunData) -> str:
    version = data.environment.get("arcuate")
    trained_with = f" (trained with version {version})" if version else ""
    footer = f"Written by arcuate from the files of the run folder{trained_with}."
    return page(f"{data.run.name} · arcuate report", _headline(data), list(_sections(data)), footer)


def _sections(data: RunData) -> Iterator[Section]:
    if (calibration := read_calibration(data.run)) is not None:
        yield "calibration", "Calibration", calibration_section(calibration)
    yield "learning", "Learning curves", join(learning_curves(data), _incidents(data))
    if data.results is None:
        yield "results", "Results", join(_evaluation_hint(data), _other_results(data))
    else:
        yield "sessions", "Error rate by session", join(sessions_section(data), _other_results(data))
        yield "confusions", f"{data.unit.capitalize()} confusions", confusions_section(data)
        yield "trial", "Example trial", trial_section(data)
        yield "decodings", "Example decodings", decodings_section(data)
    if data.words is not None:
        yield "sentences", "Decoded sentences", sentences_section(data)
    yield "recipe", "Recipe", recipe_section(data)
    yield "environment", "Data and machine", environment_section(data)


def _incidents(data: RunData, n_shown: int = 12) -> Html:
    """Interventions of the guard during training, if there were any."""
    file = data.run.incidents_file
    rows = read_jsonl(file, growing=True) if file.exists() else []
    if not rows:
        return Html()
    items = [tag("li", ", ".join(f"{k} {v}" for k, v in row.items())[:300]) for row in rows[:n_shown]]
    if len(rows) > n_shown:
        items.append(tag("li", f"… and {len(rows) - n_shown} more in {file.name}"))
    return tag("div", tag("h3", "Incidents"), tag("ul", *items), class_="notice")


# Headline.

_ERROR_KINDS = (("sub", "substitutions"), ("ins", "insertions"), ("del", "deletions"))


def _headline(data: RunData) -> Html:
    rates = _rate_tile(data), _word_tile(data), _errors_tile(data)
    tiles = *rates, _steps_tile(data), _size_tile(data), _time_tile(data)
    return tag(
        "header",
        tag("p", "arcuate run report", class_="kicker"),
        tag("h1", data.run.name),
        tag("p", *_lead(data), class_="lead"),
        _selection_notice(data),
        tag("div", *filter(None, tiles), class_="tiles"),
    )


def _lead(data: RunData) -> list[Html | str]:
    """What was measured and on which trials, in one sentence."""
    results = data.results
    if results is None:
        return _calibrated_lead(read_calibration(data.run), data.rate_name) or _unevaluated_lead(data)
    trials = counted(results.n_trials, f"{split_name(results.split)} trial")
    if n_sessions := len({d.session for d in results.decodings}):
        trials += f" of {counted(n_sessions, 'session')}"
    if results.rate is None:
        return [f"{trials} decoded. The trials have no labels, so the error rate is unknown."]
    n_scored = finite_int(results.summary.get("n_scored"))
    if n_scored is not None and n_scored < results.n_trials:
        trials += f" ({n_scored:,} with labels)"
    step = finite_int(results.summary.get("step"))
    checkpoint = f", checkpoint of step {step:,}" if step is not None else ""
    interval = _interval_text(*(results.interval or (None, None)))
    return [
        f"{data.rate_name} ",
        tag("b", percent(results.rate)),
        f"{interval} on {trials}{checkpoint}{_decoding_text(results.summary)}.",
        *_word_lead(data),
    ]


def _word_lead(data: RunData) -> list[Html | str]:
    """The word error rate in a second sentence, if the same split was decoded to words."""
    words = data.words
    if words is None or words.rate is None:
        return []
    lm = f" with the language model {words.summary['lm']}" if isinstance(words.summary.get("lm"), str) else ""
    return [
        " Word error rate ",
        tag("b", percent(words.rate)),
        f"{_interval_text(*(words.interval or (None, None)))}{lm}.",
    ]


def _interval_text(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" (95\u202f% interval {100 * low:.1f}–{100 * high:.1f})"


def _decoding_text(summary: Mapping[str, Any]) -> str:
    """How the trials were decoded, unless greedily from the CTC head."""
    head, search, beam = summary.get("head"), summary.get("search"), finite_int(summary.get("beam"))
    parts = []
    if isinstance(head, str) and head != "ctc":
        parts.append(f"the {head} head" if head != "both" else "both heads")
    if search == "beam":
        parts.append(f"beam size {beam:,}" if beam is not None else "beam search")
    return f", decoded with {' and '.join(parts)}" if parts else ""


def _calibrated_lead(calibration: Mapping[str, Any] | None, rate_name: str) -> list[Html | str]:
    """The lead of a run that was calibrated but not evaluated; empty without a calibration curve."""
    points = calibration_points(calibration) if calibration else []
    if calibration is None or not points:
        return []
    first, last = points[0], points[-1]
    before = f"; {percent(first.per)} without" if first.sentences == 0 and len(points) > 1 else ""
    trials = f"{counted(last.n_trials, 'sentence')} of {calibration.get('session', MISSING)}"
    after = f"after calibration with {counted(last.sentences, 'sentence')}{before}"
    interval = _interval_text(last.low, last.high)
    return [f"{rate_name} ", tag("b", percent(last.per)), f"{interval} on {trials}, {after}."]


def _unevaluated_lead(data: RunData) -> list[Html | str]:
    step, planned, best = data.last_step, finite_int(data.setting("train.steps")), data.best
    if step is None:
        return ["The log is still empty. Not evaluated yet."]
    done = f"Trained for {step:,}" + (f" of {planned:,}" if planned else "") + " steps"
    if best:
        done += f"; best {split_name(best[0])} error rate in the log {percent(best[2])}, at step {best[1]:,}"
    return [f"{done}. Not evaluated yet."]


def _selection_notice(data: RunData) -> Html | None:
    """Whether the checkpoint was selected on the trials that are scored."""
    results, selected_on = data.results, data.selected_on
    if results is None or results.rate is None:
        return None
    if selected_on is None:
        return notice("The split on which the checkpoint was selected is not recorded.")
    name = split_name(selected_on)
    if selected_on == results.split.split(".")[0]:
        return notice(
            f"The checkpoint was selected on the same {name} trials that are scored here, so the error rate is"
            " optimistically biased."
        )
    return notice(f"The checkpoint was selected on the {name} split, not on the trials scored here.")


def _rate_tile(data: RunData) -> Html | None:
    results = data.results
    if results and results.rate is not None:
        remarks: list[str] = []
        if results.interval:
            low, high = results.interval
            remarks = [f"{100 * low:.1f}–{100 * high:.1f}\u202f%", "95\u202f% interval"]
        return tile(data.rate_name, percent(results.rate), *remarks, kind="first")
    if data.best:
        split, step, rate = data.best
        remark = f"{split_name(split)}, step {step:,}"
        return tile("Best error rate in the log", percent(rate), remark, kind="first")
    return None


def _word_tile(data: RunData) -> Html | None:
    """WER of the decoded words, or the one in the log at the best validation."""
    words = data.words
    if words and words.rate is not None:
        interval = [f"{100 * words.interval[0]:.1f}–{100 * words.interval[1]:.1f}\u202f%"] if words.interval else []
        return tile("Word error rate", percent(words.rate), *interval, split_name(words.split))
    rates = [
        (wer, row["step"], split)
        for split, rows in data.validation.items()
        for row in rows
        if (wer := finite_number(row.get("wer"))) is not None
    ]
    if not rates:
        return None
    rate, step, split = min(rates)
    return tile("Best word error rate in the log", percent(rate), f"{split_name(split)}, step {step:,}")


def _errors_tile(data: RunData) -> Html | None:
    """Substitutions, insertions and deletions as segments of one bar."""
    results = data.results
    if results is None or results.rate is None:
        return None
    counts = [finite_int(results.summary.get(name)) for _, name in _ERROR_KINDS]
    if any(n is None for n in counts):
        counts = [results.total.substitutions, results.total.insertions, results.total.deletions]
    kinds = [(n or 0, kind, name) for n, (kind, name) in zip(counts, _ERROR_KINDS, strict=True)]
    n_errors = sum(n for n, _, _ in kinds)
    length = finite_int(results.summary.get("n_tokens")) or results.total.length
    items = []
    for n, kind, name in kinds:
        rate = f" · {percent(n / length)}" if length else ""
        items.append(tag("li", tag("i", class_=f"mark {kind}"), tag("b", f"{n:,}"), f" {name}{rate}"))
    segments = [(n / n_errors, kind, name) for n, kind, name in kinds if n]
    label = ", ".join(f"{name} {percent(fraction, 0)}" for fraction, _, name in segments)
    pieces = [tag("span", class_=kind, style=f"flex-grow:{fraction:.4f}") for fraction, kind, _ in segments]
    bar = tag("div", *pieces, class_="bar", role="img", aria_label=label)
    return tag(
        "div",
        tag("p", "Errors by kind", class_="name"),
        bar if n_errors else tag("p", "none", class_="value"),
        tag("ul", *items),
        tag("p", f"of {length:,} {data.unit}s, including {_boundary_name(data)}", class_="below") if length else None,
        class_="tile kinds",
    )


def _boundary_name(data: RunData) -> str:
    return "silence" if data.unit == "phoneme" else "word boundaries"


def _steps_tile(data: RunData) -> Html:
    planned, best = finite_int(data.setting("train.steps")), data.best
    of_planned = f"of {planned:,} planned" if planned and planned != data.last_step else None
    best_at = f"best {split_name(best[0])} error rate at {best[1]:,}" if best else None
    return tile("Optimizer steps", count(data.last_step), of_planned, best_at)


def _size_tile(data: RunData) -> Html:
    channels, n_sessions = finite_int(lookup(data.environment, "data.n_channels")), len(data.sessions)
    sizes = [f"{channels} channels" if channels else "", counted(n_sessions, "session") if n_sessions else ""]
    n_parameters = parameter_count(data.environment.get("n_parameters"))
    return tile("Parameters", n_parameters, ", ".join(size for size in sizes if size))


def _time_tile(data: RunData) -> Html | None:
    seconds, steps, device = data.training_seconds, data.last_step, data.environment.get("device")
    if seconds is None or not steps:
        return None
    per_step = f"{finite_number(seconds / steps):.2g}\u202fs per step"
    return tile("Training time", duration(seconds), per_step, f"on {device}" if device else None)


def _evaluation_hint(data: RunData) -> Html:
    """The commands that create the missing part of the report."""
    path = shlex.quote(str(data.run.path))
    text = (
        "This run has not been evaluated yet. An evaluation adds error rates by session, confusions, an"
        " example trial and example decodings. Run"
    )
    commands = tag("pre", f"arcuate evaluate {path} --split val\narcuate report {path}")
    return join(tag("p", text), commands)


def _other_results(data: RunData) -> Html:
    """The results in the folder that are not shown in this report."""
    if not data.other_results:
        return Html()
    names = ", ".join(f"{name} {percent(summary.get('per'))}" for name, summary in data.other_results)
    return muted(f"Other results in this folder: {names}.")


# How the run was made: recipe, command, data and machine.

_TITLES = {
    "augment": "Augmentation",
    "ema": "EMA",
    "schedule": "Learning rate",
    "session_schedule": "Learning rate of session layers",
    "swa": "SWA",
    "track": "Tracking",
    "train": "Training",
    "validate": "Validation",
}
_MAX_SETTINGS = 400


def recipe_section(data: RunData) -> Html:
    """The settings by component, the differences from the packaged recipe, and the complete YAML."""
    if not data.recipe_text:
        return muted("This folder has no recipe.yaml.")
    recipe = data.recipe
    head = [
        tag("p", str(recipe[key]))
        for key in ("summary", "purpose", "notes")
        if isinstance(recipe.get(key), str) and recipe[key]
    ]
    cards = [
        card(_TITLES.get(key, key.replace("_", " ").capitalize()), _settings(value))
        for key, value in list(recipe.items())[:40]
        if isinstance(value, Mapping)
    ]
    yaml_text = tag("details", tag("summary", "The complete recipe as YAML"), tag("pre", data.recipe_text))
    return join(*head, _differences(recipe), tag("div", *cards, class_="cards"), yaml_text)


def _settings(tree: Any) -> Iterator[tuple[str, str]]:
    for path, value in islice(_flatten(tree), _MAX_SETTINGS):
        yield path.replace(".", " · ").replace("_", " "), _value_text(value)


def _flatten(tree: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Dotted paths and their values."""
    if not isinstance(tree, Mapping) or depth > 8:
        yield prefix, tree
        return
    for key, value in tree.items():
        yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key), depth + 1)


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


def _differences(recipe: Mapping[str, Any]) -> Html:
    """Settings that differ from the packaged recipe that this one is or extends."""
    base = next((str(recipe[k]) for k in ("name", "extends") if recipe.get(k) in recipe_names()), None)
    if base is None:
        return Html()
    try:
        packaged = dict(_flatten(to_tree(load_recipe(base))))
    except UserError:
        return Html()
    own = dict(islice(_flatten(recipe), _MAX_SETTINGS))
    rows = [
        (path, _value_text(packaged.get(path)), _value_text(own.get(path)))
        for path in sorted({*packaged, *own})
        if packaged.get(path) != own.get(path) and path.split(".")[0] not in DESCRIPTIVE_KEYS
    ]
    if not rows:
        return tag("p", "All settings are those of the packaged recipe ", tag("code", base), ".")
    verb = "differs" if len(rows) == 1 else "differ"
    lead = tag("p", f"{counted(len(rows), 'setting')} {verb} from the packaged recipe ", tag("code", base), ":")
    return join(lead, scroll_table(("setting", "packaged", "this run"), rows[:_MAX_SETTINGS]))


def environment_section(data: RunData) -> Html:
    """Data, versions and machine, and the command that started the run."""
    environment = data.environment
    if not environment:
        return muted("This folder has no environment.json.")
    store = [
        ("path", _value_text(lookup(environment, "data.path"))),
        ("layout", _value_text(lookup(environment, "data.layout"))),
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
    cards = card("Data", store), card("Run", model), card("Machine", machine[:30])
    words = environment.get("command")
    command = " ".join(str(w) for w in words) if isinstance(words, list) else str(words or "")
    started = [tag("p", "Command"), tag("pre", command[:4000])] if command else []
    return join(tag("div", *cards, class_="cards"), *started)
