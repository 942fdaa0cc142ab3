"""Online adaptation of a session layer without labels: after each trial, one bounded update.

The method is DietCORP (Feghhi et al. 2025, arXiv:2507.02800): one gradient step on augmented copies of the trial just
decoded, with the decoded tokens as pseudo-label. Here the session layer is updated, not the patch embedding. All other
weights stay fixed. `state.py` decides whether a trial is used and when the layer is discarded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from arcuate.adaptation.config import Adaptation
from arcuate.adaptation.state import (
    LR_FACTOR,
    MAX_DISTANCE,
    AdamMoments,
    AffineLayer,
    DecodedTrial,
    ExpectedConfidence,
    SessionState,
    compare,
    fall_back,
    fallback_reason,
    is_disabled,
    is_usable,
    step_factor,
    track_confidence,
)
from arcuate.data.augmentation import augment
from arcuate.data.config import AugmentationConfig
from arcuate.data.text import sentence_tokens
from arcuate.data.trial import nearest_session
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.losses.combined import ctc_loss
from arcuate.losses.config import CTCSettings
from arcuate.models.interfaces import ModelInputs
from arcuate.models.model import Model, copy_session_layer, single_session_model

_LOSS_PER_TOKEN = CTCSettings(reduction="mean_per_token", zero_infinity=True)
_BETAS = (0.9, 0.99)  # short averages: a session has a few hundred steps


@dataclass(frozen=True, eq=False)
class OnlineAdapter:
    """A model, the settings of adaptation and the augmentation used in training. The model is never changed."""

    model: Model
    settings: Adaptation
    augmentation: AugmentationConfig

    def start(self, session: str, expected: ExpectedConfidence | None = None) -> SessionState:
        """Start a session with its own layer if the model has one, else with that of the nearest known session.

        `expected` is the confidence on known sessions; without it, steps are not scaled down.
        """
        known = self.model.config.sessions
        init_session = session if session in known else nearest_session(session, known)
        layer = AffineLayer(*copy_session_layer(self.model, init_session))
        return SessionState(session, init_session, layer, layer, AdamMoments.zero(layer), expected)

    def adapted_model(self, state: SessionState) -> Model:
        """The model for the next trial, as session 0."""
        layer = self.layer(state)
        return single_session_model(self.model, state.session, layer.weight, layer.bias)

    def unadapted_model(self, state: SessionState) -> Model:
        """The model with the session's initial layer."""
        return single_session_model(self.model, state.session, state.initial.weight, state.initial.bias)

    def layer(self, state: SessionState) -> AffineLayer:
        """The layer for the next trial: the initial one unless the session has drifted."""
        return state.initial if is_disabled(state) or step_factor(state) == 0.0 else state.layer

    def update(
        self, state: SessionState, trial: DecodedTrial, unadapted: np.ndarray | None = None
    ) -> tuple[SessionState, str | None]:
        """Update the state after a trial; also return the reason if it fell back to the unadapted model.

        `unadapted` are the log-probabilities (F, V) of the unadapted model, if the caller has them already.
        """
        state = replace(state, n_trials=state.n_trials + 1)
        if is_disabled(state):
            return state, None
        if unadapted is None:
            unadapted = compute_log_probs(self.unadapted_model(state), trial.bins)
        comparison = compare(state.comparison, trial.log_probs, unadapted)
        state = track_confidence(replace(state, comparison=comparison), unadapted)
        if reason := fallback_reason(state.comparison):
            return fall_back(state), reason
        factor = step_factor(state)
        if factor == 0.0 or not is_usable(trial):
            return state, None
        lr = self.settings.lr * LR_FACTOR**state.comparison.n_fallbacks * factor
        layer, moments = adam_step(state.layer, state.moments, self._gradients(state, trial), state.initial, lr)
        return replace(state, layer=layer, moments=moments, n_steps=state.n_steps + 1), None

    def _gradients(self, state: SessionState, trial: DecodedTrial) -> tuple[Tensor, ...]:
        """Gradients of the CTC loss per token, averaged over augmented copies of the trial."""
        n, device = self.settings.copies, state.layer.weight.device
        n_bins = torch.full((n,), len(trial.bins), device=device)
        names = ["trial"] * n  # draws differ by position in the batch
        copies = trial.bins.repeat(n, 1, 1)
        bins, n_bins = augment(copies, n_bins, names, self.augmentation, self.settings.seed, state.n_trials)
        layer = state.layer
        adapted = single_session_model(self.model, "current", layer.weight.detach(), layer.bias.detach())
        outputs = adapted.encode(ModelInputs(bins, n_bins, torch.zeros_like(n_bins)))
        tokens = torch.tensor(trial.pseudo_label, device=device).repeat(n, 1)
        lengths = torch.full((n,), tokens.shape[1], device=device)
        losses = ctc_loss(outputs.log_probs["ctc"].float(), outputs.n_frames, tokens, lengths, _LOSS_PER_TOKEN)
        session_layer = adapted.front_end.session_layer
        return torch.autograd.grad(losses.mean(), (session_layer.weights[0], session_layer.biases[0]))


def make_adapter(model: Model, settings: Adaptation, augmentation: AugmentationConfig) -> OnlineAdapter:
    """Create an adapter; puts the model in evaluation mode without gradients."""
    return OnlineAdapter(model.eval().requires_grad_(False), settings, augmentation)


@torch.inference_mode()
def compute_log_probs(model: Model, bins: Tensor) -> np.ndarray:
    """Log-probabilities (F, V) of one trial of normalised bins (T, C) under session 0 of the model."""
    zero = torch.zeros(1, dtype=torch.int64, device=bins.device)
    outputs = model.encode(ModelInputs(bins[None], zero + len(bins), zero))
    log_probs: np.ndarray = outputs.log_probs["ctc"][0, : int(outputs.n_frames[0])].float().cpu().numpy()
    return log_probs


def adam_step(
    layer: AffineLayer, moments: AdamMoments, gradients: Sequence[Tensor], initial: AffineLayer, lr: float
) -> tuple[AffineLayer, AdamMoments]:
    """Adam step (Kingma & Ba 2015) that moves no weight by more than `lr` and stays within `MAX_DISTANCE`."""
    n = moments.n + 1
    moved, means, squares = [], [], []
    for weight, gradient, mean, square in zip(
        (layer.weight, layer.bias), gradients, moments.mean, moments.square, strict=True
    ):
        gradient = torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)
        means.append(torch.lerp(gradient, mean, _BETAS[0]))
        squares.append(torch.lerp(gradient.square(), square, _BETAS[1]))
        step = means[-1] / (1 - _BETAS[0] ** n) / ((squares[-1] / (1 - _BETAS[1] ** n)).sqrt() + 1e-8)
        moved.append(weight - lr * step.clamp(-1.0, 1.0))
    unbounded = AffineLayer(moved[0], moved[1])
    bounded = clip_distance(unbounded, initial)
    if bounded is not unbounded:  # the projection can move single weights by more than lr
        largest = max(
            float((b - a).abs().max()) for a, b in ((layer.weight, bounded.weight), (layer.bias, bounded.bias))
        )
        bounded = bounded if largest <= lr else layer.lerp(bounded, lr / largest)
    return bounded, AdamMoments((means[0], means[1]), (squares[0], squares[1]), n)


def clip_distance(layer: AffineLayer, initial: AffineLayer) -> AffineLayer:
    """Pull a layer back towards its initial value if it is further away than `MAX_DISTANCE`."""
    distance = layer.distance(initial)
    return layer if distance <= MAX_DISTANCE else initial.lerp(layer, MAX_DISTANCE / distance)


def words_label(best: Hypothesis, classes: Sequence[str]) -> tuple[int, ...]:
    """The best hypothesis of a word search as a training label; empty if it has no words."""
    return tuple(sentence_tokens(" ".join(best.words), classes) or ()) if best.words else ()
