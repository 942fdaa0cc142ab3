"""Floor of a run: the error rate that the same recipe reaches on input without neural information.

Two inputs are trained and scored: `exchanged`, where every trial has the bins of another trial of about the same
length, and `silence`, where all channels carry the same binary speech/silence signal, so that only the length and the
pauses are left. `language model` decodes uniform frame scores of the same length to words, without training. A run
whose error rate is close to a floor has learnt little from neural activity.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.data.alphabet import CLASSES, error_rate_name
from arcuate.data.store import ChangedStore, Store, TrialInfo
from arcuate.decoding.load import load_search
from arcuate.decoding.options import SearchOptions
from arcuate.errors import UserError
from arcuate.evaluation.evaluate import find_source, open_store, select_trials
from arcuate.evaluation.metrics import score_text, total
from arcuate.evaluation.trials import decode_trials
from arcuate.experiments.recipe import run_recipe
from arcuate.experiments.train import train
from arcuate.files import fields_to_dict, write_json
from arcuate.models.io import load_model
from arcuate.models.layout import Frames
from arcuate.models.model import Model
from arcuate.models.runtime import available_runtime, configure_runtime
from arcuate.progress import Progress, logger, percent
from arcuate.run import RunLike, find_checkpoint

INPUTS = ("exchanged", "silence")
LANGUAGE_MODEL = "language model"
# Training on such input stays near chance level, so the guard must not search for a better learning rate.
_CHANGES = ("data.workers=0", "guard.stuck.patience=10000000", "guard.collapse.action=ignore")


@dataclass(frozen=True)
class Floor:
    """Result of `measure_floor`."""

    run: str
    split: str
    n_trials: int
    per: float | None  # PER of the run on these trials
    per_floor: dict[str, float | None]  # PER by input
    wer: float | None  # WER of the run; None: words were not decoded, or no trial has a text
    wer_floor: dict[str, float | None]  # WER by input, and of the language model alone
    classes: tuple[str, ...] = CLASSES  # alphabet of the model

    @property
    def lowest(self) -> float | None:
        """The lowest PER without neural information."""
        known = [rate for rate in self.per_floor.values() if rate is not None]
        return min(known) if known else None

    def summary(self) -> str:
        """Error rate and floors: one line each."""
        lines = [f"{error_rate_name(self.classes)} {percent(self.per)} on {self.n_trials} {self.split} trials"]
        lines += [f"floor {percent(rate)} with input {name!r}" for name, rate in self.per_floor.items()]
        if self.wer is not None:
            lines.append(f"WER {percent(self.wer)}")
            lines += [f"floor {percent(rate)} with {_describe(name)}" for name, rate in self.wer_floor.items()]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {**fields_to_dict(self, "classes"), "lowest": self.lowest}


def _describe(name: str) -> str:
    return "the language model alone" if name == LANGUAGE_MODEL else f"input {name!r}"


def uninformative(store: Store, kind: str) -> ChangedStore:
    """A store that replaces the bins of every trial by input without neural information about its sentence."""
    partners = _partners(store.trials)

    def exchanged(info: TrialInfo) -> np.ndarray:
        """Bins of the partner, repeated or cut to the length of the trial."""
        other = store.read_bins(partners[info.id])
        return other[np.arange(info.n_bins) % max(1, len(other))]

    def silence(info: TrialInfo) -> np.ndarray:
        """All channels at their mean, plus one SD in bins where the smoothed activity is high."""
        bins, statistics = store.read_bins(info), store.block_statistics(info)
        sd = np.maximum(statistics.sd, 1e-3)
        activity = np.abs((bins - statistics.mean) / sd).mean(axis=1)
        smooth = np.convolve(activity, np.ones(15) / 15, mode="same")
        threshold = 0.5 * (np.quantile(smooth, 0.1) + np.quantile(smooth, 0.9))
        speech = (smooth > threshold).astype(np.float32)[:, None]
        return statistics.mean + sd * speech

    return ChangedStore(store, exchanged if kind == "exchanged" else silence)


def _partners(trials: tuple[TrialInfo, ...]) -> dict[str, TrialInfo]:
    """For each trial, the trial nearest in length with another text, in the same session and split."""
    partners: dict[str, TrialInfo] = {}
    groups: dict[tuple[str, str], list[TrialInfo]] = {}
    for trial in trials:
        groups.setdefault((trial.session, trial.split), []).append(trial)
    for members in groups.values():
        for trial in members:
            others = [t for t in members if t.text != trial.text and t.n_bins] or [t for t in members if t is not trial]
            partners[trial.id] = min(others, key=lambda t: (abs(t.n_bins - trial.n_bins), t.id), default=trial)
    return partners


def measure_floor(
    run: RunLike, split: str = "val", data: str | Path | Store | None = None, *, progress: Progress | None = None
) -> Floor:
    """Train the recipe of a run on input without neural information and score it; write results/floor/<split>.json.

    Each input takes as long as the run did.

    Args:
        run: RUN or RUN@CHECKPOINT.
        split: Split to score on.
        data: Prepared store; default: that of the run.
    """
    source = find_source(run)
    if not source.run.recipe_file.is_file():
        raise UserError(f"{source.run.path} is an imported model without a recipe; a floor needs the recipe to train")
    store, model = open_store(source, data), load_model(source.checkpoint)
    trials = [t for t in select_trials(source, store, split, model.config) if t.tokens is not None]
    if not trials:
        raise UserError(f"{store.path} has no labelled {split} trials; a floor needs labels")
    recipe = run_recipe(source.run)
    runtime, batch_size = available_runtime(recipe.runtime), source.config.validate_.batch_size
    device = configure_runtime(runtime, recipe.encoder.width, batch_size).device
    words = [t for t in trials if t.text]
    search = load_search(model.config.classes, SearchOptions()) if words else None

    def decode(frames: np.ndarray) -> str:
        found = search.search(Frames(frames)) if search is not None else []
        return (found[0].text or "") if found else ""

    def word_error_rate(texts: Iterable[str]) -> float | None:
        return total(score_text(t.text or "", text).words for t, text in zip(words, texts, strict=True)).rate

    def rates(trained: Model, seen: Store) -> tuple[float | None, float | None]:
        """PER and WER of a model."""
        results = decode_trials(trained.to(device), seen, trials, batch_size=batch_size, keep_log_probs=bool(words))
        frames = {r.trial.id: r.log_probs for r in results if r.log_probs is not None}
        per = total(r.score for r in results if r.score is not None).rate
        return per, word_error_rate(decode(frames[t.id]) for t in words)

    floors: dict[str, tuple[float | None, float | None]] = {}
    for kind in INPUTS:
        logger.info(f"training on the input {kind!r}")
        without = uninformative(store, kind)
        with tempfile.TemporaryDirectory() as folder:
            changes = [*_CHANGES, f"runtime.device={runtime.device}"]
            train(recipe, without, Path(folder) / "floor", changes, progress=progress)
            floors[kind] = rates(load_model(find_checkpoint(Path(folder) / "floor", "best")), without)
    per, wer = rates(model, store)
    # Uniform frame scores: only the language model and the number of frames are left.
    lengths = [int(model.config.settings.front_end.patch.count_frames(t.n_bins)) for t in words]
    n_classes = len(model.config.classes)
    uniform = {n: decode(np.full((n, n_classes), -np.log(n_classes), np.float32)) for n in set(lengths)}
    floor = Floor(
        source.run.name,
        split,
        len(trials),
        per,
        {kind: rate for kind, (rate, _) in floors.items()},
        wer,
        {kind: rate for kind, (_, rate) in floors.items()}
        | ({LANGUAGE_MODEL: word_error_rate(uniform[n] for n in lengths)} if words else {}),
        model.config.classes,
    )
    file = source.run.measurement_file("floor", split)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, floor.to_dict())
    return floor
