"""Online adaptation of a session layer without labels: after each trial, one bounded update.

Methods:

    statistics  normalisation by running statistics: the layer's outputs keep the mean and SD of the known session
    one-step    DietCORP (Feghhi et al. 2025, arXiv:2507.02800): one gradient step on augmented copies of the trial
                just decoded, with the decoded tokens as pseudo-label. Here the session layer is updated, not the patch
                embedding.
    replay      CORP (Fan et al. 2023): as one-step, with past trials of the session in the batch, decoded again
    entropy     entropy minimisation (TENT, Wang et al. 2021) over gains and offsets of the layer's outputs

All other weights stay fixed. `state.py` decides whether a trial is used and when the layer is discarded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from arcuate.adaptation.config import Adaptation
from arcuate.adaptation.state import (
    AdamMoments,
    AffineLayer,
    DecodedTrial,
    ExpectedConfidence,
    InputStatistics,
    SessionState,
    compare,
    fall_back,
    fallback_reason,
    has_signal,
    is_disabled,
    is_usable,
    step_factor,
    track_confidence,
)
from arcuate.data.alphabet import CLASSES, SILENCE_NAME, encode, token_unit
from arcuate.data.augmentation import augment
from arcuate.data.config import AugmentationConfig
from arcuate.data.seeds import derive_seed
from arcuate.data.text import pronounce, text_to_characters
from arcuate.data.trial import nearest_session
from arcuate.decoding.hypothesis import Hypothesis, greedy
from arcuate.decoding.log_probs import WordColumns, reorder_for_words
from arcuate.errors import UserError
from arcuate.losses.combined import ctc_loss
from arcuate.losses.config import CTCSettings
from arcuate.models.front_end import smooth
from arcuate.models.interfaces import ModelInputs, Outputs
from arcuate.models.model import Model, copy_session_layer, single_session_model

if TYPE_CHECKING:  # compiles Numba kernels, which greedy pseudo-labels do not need
    from arcuate.decoding.word_search.search import WordSearch

Labeller = Callable[[np.ndarray], Sequence[int]]  # log-probabilities (F, V) to pseudo-label tokens

_MIN_VARIANCE = 1e-6  # a channel with a lower variance keeps gain 1
_MAX_GAIN = 4.0  # gains are clipped to [1/4, 4]
_LOSS_PER_TOKEN = CTCSettings(reduction="mean_per_token", zero_infinity=True)
_BETAS = (0.9, 0.99)  # short averages: a session has a few hundred steps
_NO_AUGMENTATION = AugmentationConfig()


@dataclass(frozen=True, eq=False)
class OnlineAdapter:
    """A model, an adaptation method and the augmentation used in training. The model is never changed."""

    model: Model
    settings: Adaptation
    augmentation: AugmentationConfig
    labeller: Labeller = greedy

    def start(
        self, session: str, reference: InputStatistics | None = None, expected: ExpectedConfidence | None = None
    ) -> SessionState:
        """Start a session with its own layer if the model has one, else with that of the nearest known session.

        `reference` holds the `input_statistics` of that known session's trials; required by the method `statistics`.
        `expected` is the confidence on known sessions; without it, steps are not scaled down.
        """
        if self.settings.method == "statistics" and reference is None:
            raise UserError(
                "adapt=statistics needs recordings of the nearest known session; give a store that contains them, or"
                " choose another method"
            )
        init_session = self.init_session(session)
        layer = AffineLayer(*copy_session_layer(self.model, init_session))
        return SessionState(session, init_session, layer, layer, AdamMoments.zero(layer), reference, expected)

    def init_session(self, session: str) -> str:
        """Return the known session whose layer a session starts with."""
        known = self.model.config.sessions
        return session if session in known else nearest_session(session, known)

    def adapted_model(self, state: SessionState, bins: Tensor | None = None) -> Model:
        """Return the model for the next trial, as session 0; `bins` (T, C) are the normalised bins of that trial."""
        layer = self.layer(state, bins)
        return single_session_model(self.model, state.session, layer.weight, layer.bias)

    def unadapted_model(self, state: SessionState) -> Model:
        """Return the model with the session's initial layer."""
        return single_session_model(self.model, state.session, state.initial.weight, state.initial.bias)

    def layer(self, state: SessionState, bins: Tensor | None = None) -> AffineLayer:
        """Return the layer for the next trial: the initial one unless the session has drifted."""
        safety = self.settings.safety
        if is_disabled(state, safety) or step_factor(state, safety) == 0.0:
            return state.initial
        if self.settings.method != "statistics":
            return state.layer
        return self._matched_layer(state, bins if self.settings.use_current_trial else None)

    def update(
        self, state: SessionState, trial: DecodedTrial, unadapted: np.ndarray | None = None
    ) -> tuple[SessionState, str | None]:
        """Update the state after a trial; also return the reason if it fell back to the unadapted model.

        `unadapted` are the log-probabilities (F, V) of the unadapted model, if the caller has them already.
        """
        safety = self.settings.safety
        state = replace(state, n_trials=state.n_trials + 1)
        if self.settings.method == "none" or is_disabled(state, safety):
            return state, None
        if unadapted is None:
            unadapted = compute_log_probs(self.unadapted_model(state), trial.bins)
        comparison = compare(state.comparison, trial.log_probs, unadapted, safety)
        state = track_confidence(replace(state, comparison=comparison), unadapted)
        if reason := fallback_reason(state.comparison, safety):
            return fall_back(state), reason
        if self.settings.method == "statistics":
            return self._add_statistics(state, trial), None
        if step_factor(state, safety) == 0.0 or not is_usable(trial, safety):
            return state, None
        return self._gradient_step(state, trial), None

    def _add_statistics(self, state: SessionState, trial: DecodedTrial) -> SessionState:
        if not has_signal(trial.bins):
            return state
        added = input_statistics(self.model, trial.bins)
        observed = added if state.observed is None else state.observed + added
        return replace(state, observed=observed, n_steps=state.n_steps + 1)

    def _matched_layer(self, state: SessionState, bins: Tensor | None) -> AffineLayer:
        assert state.reference is not None
        settings = self.settings
        prior_bins = settings.prior_bins / settings.safety.lr_factor**state.comparison.n_fallbacks
        current = state.reference.reweighted(prior_bins)
        if state.observed is not None:
            current = current + state.observed
        if bins is not None and has_signal(bins):
            current = current + input_statistics(self.model, bins)
        matched = match_statistics(state.initial, state.reference, current)
        return clip_distance(matched, state.initial, settings.max_distance)

    def _gradient_step(self, state: SessionState, trial: DecodedTrial) -> SessionState:
        settings = self.settings
        if settings.method == "entropy":
            outputs, parameters = _forward(self.model, state.layer, [trial], _NO_AUGMENTATION, settings.seed, 0)
            gradients = _entropy_gradients(outputs, parameters)
        else:
            trials = [trial] * settings.copies
            if settings.method == "replay":
                state, past = self._sample_buffer(state)
                trials += past
                state = replace(state, buffer=(*state.buffer, trial)[-settings.replay_buffer :])
            outputs, parameters = _forward(
                self.model, state.layer, trials, self.augmentation, settings.seed, state.n_trials
            )
            gradients = _ctc_gradients(outputs, trials, parameters)
        safety = settings.safety
        lr = settings.lr * safety.lr_factor**state.comparison.n_fallbacks * step_factor(state, safety)
        gains = settings.method == "entropy"
        layer, moments = adam_step(
            state.layer, state.moments, gradients, state.initial, lr, settings.max_distance, gains
        )
        return replace(state, layer=layer, moments=moments, n_steps=state.n_steps + 1)

    def _sample_buffer(self, state: SessionState) -> tuple[SessionState, list[DecodedTrial]]:
        """Draw past trials and decode them again with the current layer, which gives better pseudo-labels."""
        n = min(self.settings.replay_trials, len(state.buffer))
        rng = np.random.default_rng(derive_seed(self.settings.seed, state.session, state.n_trials))
        chosen = rng.choice(len(state.buffer), size=n, replace=False).tolist() if n else []
        model = single_session_model(self.model, state.session, state.layer.weight, state.layer.bias)
        buffer = list(state.buffer)
        for i in chosen:
            log_probs = compute_log_probs(model, buffer[i].bins)
            decoded = DecodedTrial(buffer[i].bins, log_probs, tuple(self.labeller(log_probs)))
            if is_usable(decoded, self.settings.safety):
                buffer[i] = decoded
        return replace(state, buffer=tuple(buffer)), [buffer[i] for i in chosen]


def make_adapter(
    model: Model, settings: Adaptation, augmentation: AugmentationConfig, labeller: Labeller = greedy
) -> OnlineAdapter:
    """Create an adapter; puts the model in evaluation mode without gradients."""
    return OnlineAdapter(model.eval().requires_grad_(False), settings, augmentation, labeller)


@torch.inference_mode()
def compute_log_probs(model: Model, bins: Tensor) -> np.ndarray:
    """Log-probabilities (F, V) of one trial of normalised bins (T, C) under session 0 of the model."""
    zero = torch.zeros(1, dtype=torch.int64, device=bins.device)
    outputs = model.encode(ModelInputs(bins[None], zero + len(bins), zero))
    log_probs: np.ndarray = outputs.log_probs["ctc"][0, : int(outputs.n_frames[0])].float().cpu().numpy()
    return log_probs


# --- running statistics ------------------------------------------------------------------------------------------


def input_statistics(model: Model, bins: Tensor) -> InputStatistics:
    """Statistics of the session layer's input (smoothed bins), from normalised bins (T, C)."""
    kernel = model.front_end.kernel
    smoothed = smooth(bins[None], kernel)[0] if len(bins) >= len(kernel) else bins
    return InputStatistics.of(smoothed)


def match_statistics(initial: AffineLayer, reference: InputStatistics, current: InputStatistics) -> AffineLayer:
    """Return the layer whose outputs on current input have the mean and SD of those on the reference session.

    Only mean and SD of each output channel are matched. Matching the complete covariance made results worse: covariance
    does not determine a rotation of the tuning, so the smallest map that matches it need not be the correct one
    (docs/new-days.md).
    """
    weight, bias = initial.weight.double(), initial.bias.double()
    before, now = _output_variance(reference, weight), _output_variance(current, weight)
    gain = torch.where(
        (before > _MIN_VARIANCE) & (now > _MIN_VARIANCE),
        (before / now.clamp(min=_MIN_VARIANCE)).sqrt(),
        torch.ones_like(now),
    ).clamp(1 / _MAX_GAIN, _MAX_GAIN)
    scaled = weight * gain
    offset = bias + reference.mean @ weight - current.mean @ scaled
    return AffineLayer(scaled.to(initial.weight.dtype), offset.to(initial.bias.dtype))


def _output_variance(statistics: InputStatistics, weight: Tensor) -> Tensor:
    """Variance of every output channel of x W. (C,)"""
    return ((statistics.covariance @ weight) * weight).sum(0).clamp(min=0.0)


# --- gradient steps ----------------------------------------------------------------------------------------------


def _forward(
    model: Model,
    layer: AffineLayer,
    trials: Sequence[DecodedTrial],
    augmentation: AugmentationConfig,
    seed: int,
    position: int,
) -> tuple[Outputs, tuple[Tensor, Tensor]]:
    """Run augmented trials through the layer and the model; also return the layer's weight and bias tensors."""
    n_bins = torch.tensor([len(t.bins) for t in trials], device=layer.weight.device)
    bins = layer.weight.new_zeros(len(trials), int(n_bins.max()), layer.weight.shape[0])
    for row, trial in zip(bins, trials, strict=True):
        row[: len(trial.bins)] = trial.bins
    names = ["trial"] * len(trials)  # draws differ by position in the batch
    bins, n_bins = augment(bins, n_bins, names, augmentation, seed, position)
    adapted = single_session_model(model, "current", layer.weight.detach(), layer.bias.detach())
    session_layer = adapted.front_end.session_layer
    outputs = adapted.encode(ModelInputs(bins, n_bins, torch.zeros_like(n_bins)))
    return outputs, (session_layer.weights[0], session_layer.biases[0])


def _ctc_gradients(
    outputs: Outputs, trials: Sequence[DecodedTrial], parameters: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Gradients of the CTC loss per token, averaged over trials."""
    device = parameters[0].device
    lengths = torch.tensor([len(t.pseudo_label) for t in trials], device=device)
    tokens = torch.zeros(len(trials), int(lengths.max()), dtype=torch.int64, device=device)
    for row, trial in zip(tokens, trials, strict=True):
        row[: len(trial.pseudo_label)] = torch.tensor(trial.pseudo_label)
    log_probs = outputs.log_probs["ctc"].float()
    losses = ctc_loss(log_probs, outputs.n_frames, tokens, lengths, _LOSS_PER_TOKEN)
    return torch.autograd.grad(losses.mean(), parameters)


def _entropy_gradients(outputs: Outputs, parameters: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Gradients of the mean frame entropy with respect to each output channel's gain and offset."""
    log_probs = outputs.log_probs["ctc"]
    entropy = -(log_probs.exp() * log_probs).sum(-1)  # (B, F)
    is_frame = torch.arange(entropy.shape[1], device=entropy.device) < outputs.n_frames[:, None]
    d_weight, d_bias = torch.autograd.grad(entropy[is_frame].mean(), parameters)
    weight = parameters[0].detach()
    gain = (d_weight * weight).sum(0)  # a gain g multiplies a column: d/dg = sum over rows of dW * W
    return gain.expand_as(weight), d_bias


def adam_step(
    layer: AffineLayer,
    moments: AdamMoments,
    gradients: Sequence[Tensor],
    initial: AffineLayer,
    lr: float,
    max_distance: float,
    gains: bool = False,
) -> tuple[AffineLayer, AdamMoments]:
    """Adam step (Kingma & Ba 2015) that moves no weight by more than `lr` and stays within `max_distance`.

    With `gains`, only a gain per column of the weight is learnt, and `gradients` holds the gradients of these gains.
    """
    n = moments.n + 1
    moved, means, squares = [], [], []
    direction = layer.weight / layer.weight.abs().max().clamp(min=1.0) if gains else 1.0
    for weight, gradient, mean, square, scale in zip(
        (layer.weight, layer.bias), gradients, moments.mean, moments.square, (direction, 1.0), strict=True
    ):
        gradient = torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)
        means.append(torch.lerp(gradient, mean, _BETAS[0]))
        squares.append(torch.lerp(gradient.square(), square, _BETAS[1]))
        step = means[-1] / (1 - _BETAS[0] ** n) / ((squares[-1] / (1 - _BETAS[1] ** n)).sqrt() + 1e-8)
        moved.append(weight - lr * step.clamp(-1.0, 1.0) * scale)
    unbounded = AffineLayer(moved[0], moved[1])
    bounded = clip_distance(unbounded, initial, max_distance)
    if bounded is not unbounded:  # the projection can move single weights by more than lr
        largest = max(
            float((b - a).abs().max()) for a, b in ((layer.weight, bounded.weight), (layer.bias, bounded.bias))
        )
        bounded = bounded if largest <= lr else layer.lerp(bounded, lr / largest)
    return bounded, AdamMoments((means[0], means[1]), (squares[0], squares[1]), n)


def clip_distance(layer: AffineLayer, initial: AffineLayer, max_distance: float) -> AffineLayer:
    """Pull a layer back towards its initial value if it is further away than `max_distance`."""
    distance = layer.distance(initial)
    return layer if distance <= max_distance else initial.lerp(layer, max_distance / distance)


# --- pseudo-labels through a language model: the words of the word search, converted back to phonemes ---------------

_ALL_FRAMES = 1 << 30


def word_labeller(
    search: "WordSearch", chunk_frames: int = _ALL_FRAMES, columns: WordColumns | None = None
) -> Callable[[np.ndarray], Sequence[int]]:
    """Return a function from log-probabilities (F, V) to the tokens of the best word sequence.

    `columns` maps the classes of the model, by default phonemes, to those of the search.

    The search runs in chunks of `chunk_frames`: compiled code holds the interpreter lock, and a thread that decodes in
    real time must not wait for a complete sentence.
    """

    columns = reorder_for_words(CLASSES, search.settings) if columns is None else columns

    def label(log_probs: np.ndarray) -> Sequence[int]:
        frames, state = columns(log_probs), search.start()
        for first in range(0, len(frames), chunk_frames):
            state = search.step(state, frames[first : first + chunk_frames])
        return hypothesis_tokens(search, search.finish(state), columns.model_classes)

    return label


def hypothesis_tokens(
    search: "WordSearch", nbest: Sequence[Hypothesis], classes: Sequence[str] = CLASSES
) -> Sequence[int]:
    """Tokens of the best hypothesis as in training labels; empty if it has no words.

    Phonemes have a silence after every word, characters a boundary between words.
    """
    if not nbest or not nbest[0].words:
        return ()
    if token_unit(classes) == "character":
        return text_to_characters(" ".join(nbest[0].words), classes)[0]
    return encode(list(word_phonemes(search, nbest[0].words)))


def word_phonemes(search: "WordSearch", words: Sequence[str]) -> Iterator[str]:
    """Phonemes of words as in training labels, or the first in the lexicon if it lacks that pronunciation."""
    in_context = iter(_split_words(pronounce(" ".join(words)).names))  # homographs depend on neighbours
    for word in words:
        parts = [next(in_context, ()) for _ in _split_words(pronounce(word).names)]
        known = _lexicon_pronunciations(search, word)
        if known and tuple(phone for part in parts for phone in part) not in known:
            parts = [known[0]]
        for part in parts:
            yield from part
            yield SILENCE_NAME


def _split_words(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Split phonemes into words at silences."""
    ends = [i for i, name in enumerate(names) if name == SILENCE_NAME]
    return [tuple(names[a:b]) for a, b in zip([0, *(e + 1 for e in ends)], ends, strict=False)]


def _lexicon_pronunciations(search: "WordSearch", word: str) -> list[tuple[str, ...]]:
    """All pronunciations of a word in the search's lexicon, shortest first."""
    if word not in search.words:
        return []
    tree, found = search.tree, []
    for node in tree.entry_nodes[tree.entry_words == search.words.index(word)].tolist():
        phones = []
        while node > 0:
            phones.append(search.classes[tree.tokens[node]])
            node = int(tree.parents[node])
        found.append(tuple(reversed(phones)))
    return sorted(found, key=lambda phones: (len(phones), phones))
