"""`arcuate evaluate --adapt METHOD`: days in the order of recording, followed without labels."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from arcuate.adaptation.config import METHODS, Adaptation
from arcuate.adaptation.online import Label, make_adapter
from arcuate.adaptation.stream import LEARNING, follow, summarise_courses
from arcuate.cli._day_health import tell_health
from arcuate.cli.console import counted, out, percent, progress, say
from arcuate.cli.set_option import read_set
from arcuate.data.selection import select_split
from arcuate.data.sessions import days_between, nearest_session
from arcuate.data.store import Store, TrialInfo
from arcuate.decoding.greedy import greedy
from arcuate.errors import UserError
from arcuate.evaluation.evaluate import (
    ModelSource,
    ScoredSplit,
    SearchOptions,
    check_outputs,
    choose_search,
    find_provenance,
    find_source,
    open_store,
    write_frame_scores,
)
from arcuate.evaluation.results import summarise, write_results
from arcuate.evaluation.transcribe import peak_rss_mb
from arcuate.evaluation.trials import phoneme_search
from arcuate.models.config import ModelConfig
from arcuate.models.io import load_model
from arcuate.models.model import Model
from arcuate.models.runtime import configure_runtime
from arcuate.run import Run


@dataclass(frozen=True)
class Following:
    """How days are to be followed, as asked for on the command line."""

    method: str
    sessions: tuple[str, ...] = ()  # none named: all of the store
    settings: tuple[str, ...] = ()  # key=value, of Adaptation
    lm: str | None = None  # a language model for the labels
    lexicon: str = "default"
    config: Path | None = None  # weights of the word search


def follow_run(
    run: Run,
    split: str,
    data: Path | None,
    checkpoint: str,
    label: str | None,
    scores: Path | None,
    following: Following,
    reading: SearchOptions,
    quiet: bool = False,
) -> dict[str, Any]:
    """Everything `arcuate evaluate --adapt` does; returns the summary it writes to results/<split>.<label>.json."""
    settings = adaptation(following)
    label = label or f"adapt-{settings.method}"
    check_outputs(label, scores)
    if reading.head != "ctc":
        raise UserError("--adapt learns through the CTC head; use --head ctc")
    if following.lm is None and (following.config is not None or following.lexicon != "default"):
        raise UserError("--lexicon and --config belong to a language model; name one with --lm")
    subject = find_source(run, checkpoint)
    recipe, validate = subject.config, choose_search(subject.config.validate_, reading)
    store = open_store(subject, data)
    model = load_model(subject.checkpoint)
    trials = choose_trials(subject, store, split, model.config, following.sessions)
    tell_days(store, model, trials)
    machine = configure_runtime(recipe.runtime, recipe.encoder.width, 1)
    tell_unmeasured(store, model, settings)
    reader = label_reader(following)
    adapter = make_adapter(model.to(machine.device), settings, recipe.augment, reader)
    with nullcontext() if quiet else progress("checking trials") as report:
        store.check_unchanged(trials, report)
    with nullcontext() if quiet else progress("reading trials") as report:
        courses = follow(adapter, store, trials, phoneme_search(validate), True, report)
    results = [f.result for course in courses for f in course.trials]
    scored = ScoredSplit(subject, store, model, validate, "ctc", None, results)
    summary = {
        **summarise(results).to_dict(),
        **find_provenance(scored, split, label).to_dict(),
        "adapt": settings.model_dump(mode="json"),
        "labels_by": "greedy" if reader is greedy else f"words of {following.lm}",
        **summarise_courses(courses),
        "peak_rss_mb": peak_rss_mb(),
    }
    write_results(run, split, label, results, summary, store)
    if scores is not None:
        write_frame_scores(scores, results)
    return summary


def adaptation(following: Following) -> Adaptation:
    if following.method not in METHODS:
        raise UserError(f"--adapt {following.method!r} is unknown; choose {', '.join(METHODS)}")
    return read_set(Adaptation, following.settings, "rate=5e-4", {"method": following.method})


def choose_trials(
    subject: ModelSource, store: Store, split: str, config: ModelConfig, sessions: Sequence[str]
) -> tuple[TrialInfo, ...]:
    """The trials of a split in known and unknown sessions alike."""
    if config.n_channels != store.n_channels:
        raise UserError(
            f"the model has {config.n_channels} channels, {store.path.name} has {store.n_channels}; adaptation moves"
            " a layer, it cannot add channels: prepare the same channels as for training"
        )
    missing = [s for s in sessions if s not in store.sessions]
    if missing:
        raise UserError(
            f"{store.path.name} has no session {missing[0]}; it holds {', '.join(store.sessions)}"
        )
    wanted = set(sessions or store.sessions)
    recipe = subject.config
    known = tuple(s for s in config.sessions if s in wanted)
    stored = "train" if split == "dev" else split
    chosen = (
        select_split(store, recipe.data, recipe.front_end.patch.count_frames, split, known) if known else ()
    )
    new = [
        t
        for t in store.trials
        if t.session in wanted and t.session not in config.sessions and t.split == stored
    ]
    trials = (*chosen, *(t for t in new if t.usable or split != "train"))
    if not trials:
        raise UserError(f"{store.path.name} has no {split} trials in these sessions")
    return trials


def tell_days(store: Store, model: Model, trials: Sequence[TrialInfo]) -> None:
    """How days that the model was not trained on are read."""
    for session in dict.fromkeys(t.session for t in trials):
        if session in model.config.sessions:
            continue
        like = nearest_session(session, model.config.sessions)
        tell_health(store, session, like)
        if not model.config.settings.front_end.session_layer.enabled:
            say(f"{session} is new to the model, which has no session layers and reads it as any other day")
            continue
        gap = days_between(session, like)
        when = "" if gap is None else f", {counted(abs(gap), 'day')} {'earlier' if gap > 0 else 'later'}"
        say(f"{session} is new to the model: read with the layer of {like}{when}")


def tell_unmeasured(store: Store, model: Model, settings: Adaptation) -> None:
    """Where the store has no known day, nobody can say how sure the model usually is."""
    if settings.method in LEARNING and not set(store.sessions) & set(model.config.sessions):
        say(
            f"note: {store.path.name} has no day that the model knows, so how much a day has drifted cannot be measured"
            " and every step is a whole one"
        )


def label_reader(following: Following) -> Label:
    """What turns frame scores into the tokens to learn from: greedily, or through words."""
    if following.lm is None:
        return greedy
    from arcuate.adaptation.word_labels import word_labels
    from arcuate.data.alphabet import CLASSES, SILENCE
    from arcuate.decoding.config import DecodingConfig
    from arcuate.decoding.word_search.search import build_word_search
    from arcuate.evaluation.transcribe import read_weights
    from arcuate.language.lexicon import open_lexicon
    from arcuate.language.ngram.io import open_model

    settings = read_weights(following.config)[0] if following.config else DecodingConfig()
    with progress("reading the lexicon and the language model") as report:
        lexicon = open_lexicon(following.lexicon, CLASSES)
        model = open_model(following.lm, report)
    return word_labels(build_word_search(lexicon, model, settings, boundary=SILENCE))


def show(run: Run, summary: dict[str, Any]) -> None:
    """The result for a person."""
    table = Table(
        box=None, header_style="bold", title=f"PER by day ({summary['split']})", title_justify="left"
    )
    for name in ("session", "layer of", "trials", "unadapted", "adapted", "steps", "fell back"):
        table.add_column(name, justify="left" if name in ("session", "layer of") else "right")
    for day in summary["days"]:
        table.add_row(
            day["session"],
            "its own" if day["known"] else day["layer_of"],
            str(day["n_trials"]),
            percent(day["per_unadapted"]),
            percent(day["per"]),
            str(day["n_steps"]),
            str(day["n_falls"]),
        )
    out.print(table)
    out.print(headline(summary), soft_wrap=True)
    say(f"one line per trial in {run.results_file(summary['split'], summary['label'])}")


def headline(summary: dict[str, Any]) -> str:
    method = summary["adapt"]["method"]
    if summary["per"] is None:
        return f"{counted(summary['n_trials'], 'trial')} read without labels, so there is no PER"
    spread = f"95 % interval {percent(summary['per_low'])} to {percent(summary['per_high'])}"
    if summary["per_low"] is None:
        spread = "no interval from a single trial"
    if method == "none":
        return f"PER {percent(summary['per'])} unadapted, {spread}"
    cost = 1000 * summary["seconds_per_trial"]
    chance = "" if summary["p"] is None else f" (p = {summary['p']:.4f})"
    return (
        f"PER {percent(summary['per'])} with {method}, {spread}; {percent(summary['per_unadapted'])} unadapted{chance};"
        f" {cost:.0f} ms of adapting per trial, {summary['peak_rss_mb']:.0f} MB"
    )
