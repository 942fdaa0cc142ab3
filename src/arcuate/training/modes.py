"""Speaking modes of the training trials: from labels, or inferred without them.

Vocalised speech modulates cortical activity more strongly than silent speech. A mixture of two normal distributions of
log energy with a common SD, the component with the higher mean being vocalised, is fitted by expectation-maximisation.
Trials of a block share one mode; labelled trials keep their mode and determine that of their
block. The mode head of the model, which classifies single trials, is initialised by a ridge regression on the result
and trained further with the model.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from arcuate.data.batching import evaluation_batches, group_by_length, to_device
from arcuate.data.store import Store, TrialInfo
from arcuate.errors import UserError
from arcuate.files import read_jsonl, write_jsonl
from arcuate.models.config import SpeakingModeSettings
from arcuate.models.mode import MODES, SpeakingMode
from arcuate.models.model import Model
from arcuate.progress import Progress

_LABEL_LOG_ODDS = 1e3  # log-odds that one labelled trial adds to its block
_RIDGE = 0.1  # penalty of the regression per trial
_LOGITS_PER_UNIT = 2.0  # logits per unit of the regression's output
_MIN_PROPORTION = 0.05  # a rarer mode is weighted as if it were this common
_VOCALISED = MODES.index("vocalised")


@dataclass(frozen=True)
class Modes:
    """Probability that a trial is vocalised, by trial."""

    vocalised: dict[str, float]

    def targets(self, trials: Sequence[str], device: torch.device) -> Tensor:
        """Return the weighted targets of the mode loss; zeros for unknown trials. (B, 2)"""
        silent_weight, vocalised_weight = self.weights
        rows = [[0.0, 0.0] for _ in trials]
        for row, trial in zip(rows, trials, strict=True):
            p = self.vocalised.get(trial)
            if p is not None:
                row[_VOCALISED], row[1 - _VOCALISED] = p * vocalised_weight, (1 - p) * silent_weight
        return to_device(torch.tensor(rows), device)

    @property
    def weights(self) -> tuple[float, float]:
        """Weights of silent and vocalised trials, which balance the two modes."""
        proportion = float(np.mean(list(self.vocalised.values()))) if self.vocalised else 0.5
        return 0.5 / max(1 - proportion, _MIN_PROPORTION), 0.5 / max(proportion, _MIN_PROPORTION)

    @property
    def n_silent(self) -> int:
        return sum(p < 0.5 for p in self.vocalised.values())


def infer_modes(model: Model, store: Store, trials: Sequence[TrialInfo], progress: Progress | None = None) -> Modes:
    """Infer the modes of training trials, and initialise the mode head of the model from them."""
    assert model.mode is not None
    evidence = _collect_evidence(model, store, trials, progress)  # (N, lags * C)
    model.mode.set_evidence_statistics(torch.from_numpy(evidence.mean(0)), torch.from_numpy(evidence.std(0)))
    settings = model.config.settings.mode
    energy = _log_energy(evidence, settings.lags)
    groups = [f"{t.session}/{t.block}" for t in trials]
    vocalised = fit_mixture(energy, groups, labelled_modes(trials, settings))
    modes = Modes({t.id: float(p) for t, p in zip(trials, vocalised, strict=True)})
    n_frames = model.mode.count_frames(torch.tensor([t.n_bins for t in trials])).numpy()
    _initialise_head(model.mode, evidence, n_frames, modes.targets([t.id for t in trials], torch.device("cpu")))
    return modes


@torch.no_grad()
def _initialise_head(head: SpeakingMode, evidence: np.ndarray, n_frames: np.ndarray, targets: Tensor) -> None:
    """Set the classifier of the head to a ridge regression of the targets."""
    mean, sd = head.evidence_mean.double().cpu().numpy(), head.evidence_sd.double().cpu().numpy()
    shrinkage = n_frames / (n_frames + head.settings.prior_frames)
    inputs = np.column_stack([shrinkage[:, None] * (evidence - mean) / sd, np.ones(len(evidence))])
    weights, target = targets.sum(1).double().numpy(), (targets[:, 1] - targets[:, 0]).double().numpy()
    penalty = np.full(inputs.shape[1], _RIDGE * len(inputs))
    penalty[-1] = 1e-6  # the intercept
    solution = np.linalg.solve(inputs.T @ (weights[:, None] * inputs) + np.diag(penalty), inputs.T @ target)
    logits = torch.from_numpy(_LOGITS_PER_UNIT * np.stack([-solution, solution])).to(head.classifier.weight)
    head.classifier.weight.copy_(logits[:, :-1])
    head.classifier.bias.copy_(logits[:, -1])


def _collect_evidence(model: Model, store: Store, trials: Sequence[TrialInfo], progress: Progress | None) -> np.ndarray:
    """Return the mean evidence of every trial, in their order. (N, lags * C)"""
    head = model.mode
    assert head is not None
    device, front_end = head.classifier.weight.device, model.config.settings.front_end
    rows: dict[int, np.ndarray] = {}
    with torch.inference_mode():
        plan = group_by_length(trials, 16)
        for chosen, batch in evaluation_batches(store, trials, model.config.sessions, front_end.statistics_spec, plan):
            batch = batch.to(device)
            means = head.mean_evidence(model.normalise(batch.bins, batch.statistics), batch.n_bins)
            rows.update(zip(chosen, means.cpu().numpy(), strict=True))
            if progress:
                progress(len(rows), len(trials), "inferring speaking modes")
    return np.stack([rows[i] for i in range(len(trials))])


def _log_energy(evidence: np.ndarray, n_lags: int) -> np.ndarray:
    """Return the log of the lag-1 autocorrelation, in which noise independent between frames cancels. (N,)"""
    by_lag = evidence.reshape(len(evidence), n_lags, -1).mean(-1)
    return np.log(np.maximum(by_lag[:, min(1, n_lags - 1)], 1e-6))


def labelled_modes(trials: Sequence[TrialInfo], settings: SpeakingModeSettings) -> np.ndarray:
    """Return 1 for vocalised, 0 for silent, NaN without a label or if labels are ignored. (N,)"""
    if settings.labels == "ignore":
        return np.full(len(trials), np.nan)
    return np.array([float(MODES.index(t.mode)) if t.mode in MODES else np.nan for t in trials])


def fit_mixture(energy: np.ndarray, groups: Sequence[str], labels: np.ndarray, n_iterations: int = 200) -> np.ndarray:
    """Fit two normal distributions with one SD by EM, with one mode per group; return P(vocalised) per trial. (N,)"""
    group = np.unique(np.asarray(groups), return_inverse=True)[1]
    labelled = ~np.isnan(labels)
    label_log_odds = np.bincount(group[labelled], _LABEL_LOG_ODDS * (2 * labels[labelled] - 1), group.max() + 1)
    proportion, spread = 0.5, float(energy.std())
    low, high = np.quantile(energy, [0.25, 0.75])
    if spread < 1e-9:  # all energies are equal: only labels distinguish the modes
        high, low, spread = float(energy[0]), float(energy[0]), 1.0
    vocalised = np.full(len(energy), 0.5)
    for _ in range(n_iterations):
        log_ratio = ((energy - low) ** 2 - (energy - high) ** 2) / (2 * spread**2)
        log_odds = np.bincount(group, log_ratio) + label_log_odds + np.log(proportion / (1 - proportion))
        before, vocalised = vocalised, 1 / (1 + np.exp(-np.clip(log_odds[group], -500, 500)))
        vocalised = np.where(labelled, np.nan_to_num(labels), vocalised)
        proportion = float(np.clip(vocalised.mean(), 0.01, 0.99))
        low, high = _weighted_mean(energy, 1 - vocalised, low), _weighted_mean(energy, vocalised, high)
        variance = vocalised * (energy - high) ** 2 + (1 - vocalised) * (energy - low) ** 2
        spread = max(float(np.sqrt(variance.mean())), 1e-6)
        if np.abs(vocalised - before).max() < 1e-6:
            break
    return vocalised


def _weighted_mean(values: np.ndarray, weights: np.ndarray, default: float) -> float:
    total = float(weights.sum())
    return float(weights @ values / total) if total > 1e-9 else default


def write_modes(path: Path, modes: Modes) -> None:
    write_jsonl(path, ({"trial": trial, "vocalised": p} for trial, p in modes.vocalised.items()))


def read_modes(path: Path) -> Modes:
    """Read and validate the modes that were written when the run was started."""
    vocalised: dict[str, float] = {}
    for number, row in enumerate(read_jsonl(path), start=1):
        trial, p = row.get("trial"), row.get("vocalised")
        if not isinstance(trial, str) or not isinstance(p, (int, float)) or not 0 <= p <= 1:
            raise UserError(f"{path} line {number}: expected a trial and P(vocalised); start a new run")
        vocalised[trial] = float(p)
    return Modes(vocalised)


def describe_modes(trials: Sequence[TrialInfo], modes: Modes, settings: SpeakingModeSettings) -> str:
    """Return one line on the modes of the training trials."""
    n_labelled = int((~np.isnan(labelled_modes(trials, settings))).sum())
    unknown = Counter(t.mode for t in trials if t.mode is not None and t.mode not in MODES)
    note = "".join(f"; {n} trials of mode {name!r} count as unlabelled" for name, n in unknown.items())
    source = f"{n_labelled} labelled and the others inferred"
    if n_labelled in (0, len(trials)):
        source = "all labelled" if n_labelled else "all inferred"
    return f"speaking modes: {modes.n_silent} of {len(trials)} training trials silent, {source}{note}"
