"""Which speaking mode each training trial is taken to have: as labelled, or inferred without labels.

Vocalised speech moves the cortex more. A mixture of two normal distributions of log energy, the louder one vocalised,
is fitted by expectation-maximisation; trials of a block share one mode unless told otherwise. Trials whose mode is
known keep it, and speak for their block. The model's head, which hears one trial alone, begins as a regression on the
outcome and is trained on from there.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from arcuate.data.batching import evaluation_batches, group_by_length
from arcuate.data.store import Store, TrialInfo
from arcuate.errors import UserError
from arcuate.files import read_jsonl, write_jsonl
from arcuate.models.config import SpeakingModeSettings
from arcuate.models.mode import MODES
from arcuate.models.mode import SpeakingMode as Head
from arcuate.models.model import Model
from arcuate.progress import Progress

CERTAIN = 1e3  # log odds that a label adds to its block
RIDGE, STEEPNESS = 0.1, 2.0  # of the regression: penalty per trial, and logits per unit of its answer
RAREST = 0.05  # a mode rarer than this is weighed as if it were this common
VOCALISED = MODES.index("vocalised")


@dataclass(frozen=True)
class Modes:
    """By trial, how likely it is vocalised; and the weights that make both modes count alike."""

    vocalised: dict[str, float]

    def wanted(self, trials: Sequence[str], device: torch.device) -> Tensor:
        """What a loss should ask for; zeros for trials that nothing is known of. (B, 2)"""
        rows = [[0.0, 0.0] for _ in trials]
        for row, trial in zip(rows, trials, strict=True):
            p = self.vocalised.get(trial)
            if p is not None:
                row[VOCALISED], row[1 - VOCALISED] = p * self.weights[1], (1 - p) * self.weights[0]
        return torch.tensor(rows, device=device)

    @property
    def weights(self) -> tuple[float, float]:
        """Of silent and vocalised trials."""
        share = float(np.mean(list(self.vocalised.values()))) if self.vocalised else 0.5
        return 0.5 / max(1 - share, RAREST), 0.5 / max(share, RAREST)

    @property
    def n_silent(self) -> int:
        return sum(p < 0.5 for p in self.vocalised.values())


def learn_modes(
    model: Model, store: Store, trials: Sequence[TrialInfo], progress: Progress | None = None
) -> Modes:
    """The modes of training trials; the model's head is told what the evidence of a trial looks like."""
    assert model.mode is not None
    evidence = gather(model, store, trials, progress)  # (N, lags * C)
    model.mode.set_evidence_statistics(torch.from_numpy(evidence.mean(0)), torch.from_numpy(evidence.std(0)))
    settings = model.config.settings.mode
    energy = log_energy(evidence, settings.lags)
    groups = [f"{t.session}/{t.block}" if settings.infer_per == "block" else t.id for t in trials]
    vocalised = infer(energy, groups, known_modes(trials, settings))
    modes = Modes({t.id: float(p) for t, p in zip(trials, vocalised, strict=True)})
    n_frames = model.mode.count_frames(torch.tensor([t.n_bins for t in trials])).numpy()
    begin_head(model.mode, evidence, n_frames, modes.wanted([t.id for t in trials], torch.device("cpu")))
    return modes


@torch.no_grad()
def begin_head(head: Head, evidence: np.ndarray, n_frames: np.ndarray, wanted: Tensor) -> None:
    """A ridge regression of the wanted modes, as the head's first answer."""
    centre, spread = head.evidence_mean.double().cpu().numpy(), head.evidence_sd.double().cpu().numpy()
    heard = n_frames / (n_frames + head.settings.prior_frames)
    inputs = np.column_stack([heard[:, None] * (evidence - centre) / spread, np.ones(len(evidence))])
    weights, target = wanted.sum(1).double().numpy(), (wanted[:, 1] - wanted[:, 0]).double().numpy()
    penalty = np.full(inputs.shape[1], RIDGE * len(inputs))
    penalty[-1] = 1e-6
    found = np.linalg.solve(inputs.T @ (weights[:, None] * inputs) + np.diag(penalty), inputs.T @ target)
    both = torch.from_numpy(STEEPNESS * np.stack([-found, found])).to(head.classifier.weight)
    head.classifier.weight.copy_(both[:, :-1])
    head.classifier.bias.copy_(both[:, -1])


def gather(model: Model, store: Store, trials: Sequence[TrialInfo], progress: Progress | None) -> np.ndarray:
    """Mean evidence of every trial, in their order. (N, lags * C)"""
    head = model.mode
    assert head is not None
    device, front_end = head.classifier.weight.device, model.config.settings.front_end
    rows: dict[int, np.ndarray] = {}
    with torch.inference_mode():
        plan = group_by_length(trials, 16)
        for chosen, batch in evaluation_batches(
            store, trials, model.config.sessions, front_end.statistics_spec, plan
        ):
            batch = batch.to(device)
            means = head.mean_evidence(model.normalise(batch.bins, batch.statistics), batch.n_bins)
            rows.update(zip(chosen, means.cpu().numpy(), strict=True))
            if progress:
                progress(len(rows), len(trials), "looking for speaking modes")
    return np.stack([rows[i] for i in range(len(trials))])


def log_energy(evidence: np.ndarray, n_lags: int) -> np.ndarray:
    """How strongly a trial swings from frame to frame; noise that differs between frames does not count. (N,)"""
    parts = evidence.reshape(len(evidence), n_lags, -1).mean(-1)
    return np.log(np.maximum(parts[:, min(1, n_lags - 1)], 1e-6))


def known_modes(trials: Sequence[TrialInfo], settings: SpeakingModeSettings) -> np.ndarray:
    """1 vocalised, 0 silent, NaN where it is not known or not to be used. (N,)"""
    if settings.labels == "ignore":
        return np.full(len(trials), np.nan)
    return np.array([float(MODES.index(t.mode)) if t.mode in MODES else np.nan for t in trials])


def infer(
    energy: np.ndarray, groups: Sequence[str], known: np.ndarray, n_rounds: int = 200
) -> np.ndarray:  # (N,) how likely each trial is vocalised
    """Expectation-maximisation of two normal distributions with one spread; a group has one mode."""
    places = np.unique(np.asarray(groups), return_inverse=True)[1]
    labelled = ~np.isnan(known)
    pull = np.bincount(places[labelled], CERTAIN * (2 * known[labelled] - 1), places.max() + 1)
    share, spread = 0.5, float(energy.std())
    low, high = np.quantile(energy, [0.25, 0.75])
    if spread < 1e-9:  # nothing to tell them apart by, except labels
        high, low, spread = float(energy[0]), float(energy[0]), 1.0
    vocalised = np.full(len(energy), 0.5)
    for _ in range(n_rounds):
        odds = ((energy - low) ** 2 - (energy - high) ** 2) / (2 * spread**2)
        log_odds = np.bincount(places, odds) + pull + np.log(share / (1 - share))
        before, vocalised = vocalised, 1 / (1 + np.exp(-np.clip(log_odds[places], -500, 500)))
        vocalised = np.where(labelled, np.nan_to_num(known), vocalised)
        share = float(np.clip(vocalised.mean(), 0.01, 0.99))
        low, high = mean_of(energy, 1 - vocalised, low), mean_of(energy, vocalised, high)
        middle = vocalised * (energy - high) ** 2 + (1 - vocalised) * (energy - low) ** 2
        spread = max(float(np.sqrt(middle.mean())), 1e-6)
        if np.abs(vocalised - before).max() < 1e-6:
            break
    return vocalised


def mean_of(energy: np.ndarray, weights: np.ndarray, instead: float) -> float:
    total = float(weights.sum())
    return float(weights @ energy / total) if total > 1e-9 else instead


def write_modes(path: Path, modes: Modes) -> None:
    write_jsonl(path, ({"trial": trial, "vocalised": p} for trial, p in modes.vocalised.items()))


def read_modes(path: Path) -> Modes:
    """What an earlier start of this run had found out; nothing in the file is trusted."""
    found: dict[str, float] = {}
    for number, row in enumerate(read_jsonl(path), start=1):
        trial, p = row.get("trial"), row.get("vocalised")
        if not isinstance(trial, str) or not isinstance(p, (int, float)) or not 0 <= p <= 1:
            raise UserError(f"{path} line {number} is not a trial and its mode; start a new run")
        found[trial] = float(p)
    return Modes(found)


def describe_modes(trials: Sequence[TrialInfo], modes: Modes, settings: SpeakingModeSettings) -> str:
    """One line for the terminal."""
    known = known_modes(trials, settings)
    strange: dict[str, int] = defaultdict(int)
    for trial in trials:
        if trial.mode is not None and trial.mode not in MODES:
            strange[trial.mode] += 1
    n_known = int((~np.isnan(known)).sum())
    note = "".join(f"; {n} trials of mode {name!r} count as unlabelled" for name, n in strange.items())
    how = f"{n_known} by their labels and the others inferred"
    if n_known in (0, len(trials)):
        how = "all by their labels" if n_known else "all inferred"
    return f"speaking modes: {modes.n_silent} of {len(trials)} training trials silent, {how}{note}"
