"""Robustness benchmark: error rate of a run on corrupted input, as it is and with statistics of the corrupted block.

The mean corruption error (mCE) is the mean PER over all corruptions and severities. Unlike
in Hendrycks & Dietterich (2019), it is not divided by the error of a reference model. All corruptions are determined by
the seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.data.alphabet import CLASSES, error_rate_name
from arcuate.data.store import Store, TrialInfo
from arcuate.errors import UserError
from arcuate.evaluation.corruption import CORRUPTIONS, SEVERITIES, corrupt
from arcuate.evaluation.evaluate import ModelSource, find_source, open_store, select_trials
from arcuate.evaluation.metrics import mean, total
from arcuate.evaluation.trials import decode_trials
from arcuate.files import fields_to_dict, write_json
from arcuate.models.io import load_model
from arcuate.models.model import Model
from arcuate.models.runtime import available_runtime, configure_runtime
from arcuate.progress import Progress, percent
from arcuate.run import RunLike

NORMALISATIONS = ("undefended", "renormalised")  # with the statistics of the clean, and of the corrupted block


@dataclass(frozen=True)
class CorruptionErrors:
    """PER of one corruption by severity, with each way of normalisation (`NORMALISATIONS`)."""

    name: str
    per: dict[str, list[float | None]]

    def mean(self, normalisation: str) -> float | None:
        """Mean PER over the severities."""
        return mean(self.per[normalisation])


@dataclass(frozen=True)
class RobustnessResult:
    """Result of `bench_robustness`."""

    run: str
    split: str
    checkpoint: str
    n_trials: int
    seed: int
    clean_per: float | None
    corruptions: tuple[CorruptionErrors, ...]
    mce: dict[str, float | None]  # mean corruption error, by normalisation
    classes: tuple[str, ...] = CLASSES  # alphabet of the model

    @property
    def relative(self) -> dict[str, float | None]:
        """Mean corruption error relative to the undefended one."""
        base = self.mce.get("undefended")
        return {name: None if not base or value is None else value / base for name, value in self.mce.items()}

    def summary(self) -> str:
        """Clean error and mean corruption errors."""
        name = error_rate_name(self.classes)
        lines = [f"{name} {percent(self.clean_per)} on clean input, {self.n_trials} {self.split} trials"]
        for name, value in self.mce.items():
            ratio = self.relative[name]
            relative = "" if name == "undefended" or ratio is None else f", {ratio:.2f} × undefended"
            lines.append(f"mean corruption error {percent(value)} {name}{relative}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {**fields_to_dict(self, "classes"), "relative": self.relative}


def bench_robustness(
    run: RunLike,
    *,
    split: str = "val",
    data: str | Path | Store | None = None,
    corruptions: Sequence[str] = (),
    severities: Sequence[int] = SEVERITIES,
    n_trials: int | None = 100,
    seed: int = 0,
    progress: Progress | None = None,
) -> RobustnessResult:
    """Measure the PER of a run on corrupted trials, undefended and renormalised with the corrupted block.

    Writes results/robustness/<split>.json into the run folder.

    Args:
        run: RUN or RUN@CHECKPOINT.
        split: val, test, dev or train.
        data: Store; default: the store of the training run.
        corruptions: Names; default: all.
        severities: Severities from 1 to 5.
        n_trials: Maximum number of trials, spread over the split; None: all.
        seed: Seed of the corruptions.
    """
    unknown = [name for name in corruptions if name not in CORRUPTIONS]
    if unknown:
        raise UserError(f"corruption {unknown[0]!r} is unknown; choose from {', '.join(CORRUPTIONS)}")
    if not severities or any(s not in SEVERITIES for s in severities):
        raise UserError(f"severities must be from {SEVERITIES[0]} to {SEVERITIES[-1]}, not {list(severities)}")
    source = find_source(run)
    store, model = open_store(source, data), load_model(source.checkpoint)
    trials = _labelled_trials(source, store, split, model, n_trials)
    batch_size = source.config.validate_.batch_size
    machine = configure_runtime(available_runtime(source.config.runtime), source.config.encoder.width, batch_size)
    model = model.to(machine.device)
    names = list(corruptions) or list(CORRUPTIONS)
    cells = list(product(names, severities, NORMALISATIONS))
    rates: dict[tuple[str, int, str], float | None] = {}
    for n, (name, severity, label) in enumerate(cells, start=1):
        corrupted = corrupt(store, CORRUPTIONS[name], severity, renormalise=label == "renormalised", seed=seed)
        rates[name, severity, label] = _error_rate(model, corrupted, trials, batch_size)
        if progress:
            progress(n, len(cells), f"{name}, severity {severity}")
    errors = tuple(
        CorruptionErrors(name, {label: [rates[name, s, label] for s in severities] for label in NORMALISATIONS})
        for name in names
    )
    result = RobustnessResult(
        source.run.name,
        split,
        source.checkpoint.name,
        len(trials),
        seed,
        _error_rate(model, store, trials, batch_size),
        errors,
        {label: mean(rate for e in errors for rate in e.per[label]) for label in NORMALISATIONS},
        model.config.classes,
    )
    file = source.run.measurement_file("robustness", split)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, result.to_dict())
    return result


def _labelled_trials(
    source: ModelSource, store: Store, split: str, model: Model, n_trials: int | None
) -> list[TrialInfo]:
    """At most `n_trials` labelled trials, spread over the split."""
    trials = [t for t in select_trials(source, store, split, model.config) if t.tokens is not None]
    if not trials:
        raise UserError(f"{store.path} has no labelled {split} trials; the benchmark needs labels")
    if n_trials is None or len(trials) <= n_trials:
        return trials
    return [trials[i] for i in np.linspace(0, len(trials) - 1, n_trials).round().astype(int)]


def _error_rate(model: Model, store: Store, trials: Sequence[TrialInfo], batch_size: int) -> float | None:
    results = decode_trials(model, store, trials, batch_size=batch_size)
    return total(r.score for r in results if r.score is not None).rate
