"""Running statistics: the layer's outputs keep the mean and SD that they had on the known day.

Only mean and SD of each output channel. Matching the whole covariance was tried and made things worse: a rotation
of the tuning cannot be seen in it, and the map of least change that fits it is a wrong one (docs/new-days.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from arcuate.adaptation.config import Adaptation
from arcuate.adaptation.safety import (
    compare,
    fall_back,
    gave_up,
    judged,
    must_fall_back,
    need,
    recorded,
    worth_learning,
)
from arcuate.adaptation.state import Day, Expected, Heard, Layer, Moments, Sums
from arcuate.data.augmentation import augment
from arcuate.data.config import AugmentationConfig
from arcuate.data.sessions import nearest_session
from arcuate.decoding.greedy import greedy
from arcuate.errors import UserError
from arcuate.losses.config import CTCSettings
from arcuate.losses.ctc import ctc_loss
from arcuate.models.front_end import smooth
from arcuate.models.interfaces import ModelInputs, Outputs
from arcuate.models.model import Model, copy_session_layer, single_session_model
from arcuate.seeds import derive_seed

FLOOR = 1e-6  # of a variance: a channel that never moves is left as it is
WIDEST = 4.0  # a gain further from 1 than this factor is not believed


def input_sums(model: Model, bins: Tensor) -> Sums:
    """Of what the session layer reads, from normalised bins (T, C)."""
    kernel = model.front_end.kernel
    ready = smooth(bins[None], kernel)[0] if len(bins) >= len(kernel) else bins
    return Sums.of(ready)


def matched(start: Layer, reference: Sums, today: Sums) -> Layer:
    """The layer under which today's outputs have the mean and SD of the reference day's."""
    weight, bias = start.weight.double(), start.bias.double()
    before, now = output_variance(reference, weight), output_variance(today, weight)
    gain = torch.where(
        (before > FLOOR) & (now > FLOOR), (before / now.clamp(min=FLOOR)).sqrt(), torch.ones_like(now)
    ).clamp(1 / WIDEST, WIDEST)
    scaled = weight * gain
    offset = bias + reference.mean @ weight - today.mean @ scaled
    return Layer(scaled.to(start.weight.dtype), offset.to(start.bias.dtype))


def output_variance(sums: Sums, weight: Tensor) -> Tensor:
    """Of every output channel of x W. (C,)"""
    return ((sums.covariance @ weight) * weight).sum(0).clamp(min=0.0)


# One bounded step of a session layer: towards labels, or towards surer frames. Everything else stays as it is.

PER_TOKEN = CTCSettings(reduction="mean_per_token", zero_infinity=True)
BETAS = (0.9, 0.99)  # of the running means; a day is a few hundred steps, so they are short


def read_copies(
    model: Model, layer: Layer, trials: Sequence[Heard], noise: AugmentationConfig, seed: int, position: int
) -> tuple[Outputs, tuple[Tensor, Tensor]]:
    """Noisy copies of trials through the layer, with the two tensors to take gradients of."""
    n_bins = torch.tensor([len(t.bins) for t in trials], device=layer.weight.device)
    bins = layer.weight.new_zeros(len(trials), int(n_bins.max()), layer.weight.shape[0])
    for row, trial in zip(bins, trials, strict=True):
        row[: len(trial.bins)] = trial.bins
    names = ["trial"] * len(trials)  # copies of one name are told apart by their place
    bins, n_bins = augment(bins, n_bins, names, noise, seed, position)
    day = single_session_model(model, "today", layer.weight.detach(), layer.bias.detach())
    session = day.front_end.session_layer
    outputs = day.encode(ModelInputs(bins, n_bins, torch.zeros_like(n_bins)))
    return outputs, (session.weights[0], session.biases[0])


def label_gradients(
    outputs: Outputs, trials: Sequence[Heard], of: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Of the mean CTC loss per token, each trial counting alike."""
    lengths = torch.tensor([len(t.tokens) for t in trials], device=of[0].device)
    tokens = torch.zeros(len(trials), int(lengths.max()), dtype=torch.int64, device=of[0].device)
    for row, trial in zip(tokens, trials, strict=True):
        row[: len(trial.tokens)] = torch.tensor(trial.tokens)
    log_probs = outputs.log_probs["ctc"].float()
    losses = ctc_loss(log_probs, outputs.n_frames, tokens, lengths, PER_TOKEN)
    return torch.autograd.grad(losses.mean(), of)


def entropy_gradients(outputs: Outputs, of: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Of the mean entropy of the frames of a trial, by gain of each output channel and by offset."""
    log_probs = outputs.log_probs["ctc"]
    entropy = -(log_probs.exp() * log_probs).sum(-1)  # (B, F)
    true = torch.arange(entropy.shape[1], device=entropy.device) < outputs.n_frames[:, None]
    d_weight, d_bias = torch.autograd.grad(entropy[true].mean(), of)
    weight = of[0].detach()
    gain = (d_weight * weight).sum(0)  # a gain g multiplies a column: d/dg = sum over rows of dW * W
    return gain.expand_as(weight), d_bias


def move(
    layer: Layer,
    moments: Moments,
    gradients: Sequence[Tensor],
    start: Layer,
    rate: float,
    reach: float,
    gains: bool = False,
) -> tuple[Layer, Moments]:
    """The layer one step on: no weight by more than `rate`, the whole no further than `reach` from its start.

    With `gains` the gradients of the weights are those of the gains of their columns, and columns keep their direction.
    """
    n = moments.n + 1
    moved, means, squares = [], [], []
    along = layer.weight / layer.weight.abs().max().clamp(min=1.0) if gains else 1.0
    for weight, gradient, mean, square, scale in zip(
        (layer.weight, layer.bias), gradients, moments.mean, moments.square, (along, 1.0), strict=True
    ):
        gradient = torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)
        means.append(torch.lerp(gradient, mean, BETAS[0]))
        squares.append(torch.lerp(gradient.square(), square, BETAS[1]))
        step = means[-1] / (1 - BETAS[0] ** n) / ((squares[-1] / (1 - BETAS[1] ** n)).sqrt() + 1e-8)
        moved.append(weight - rate * step.clamp(-1.0, 1.0) * scale)
    free = Layer(moved[0], moved[1])
    new = within(free, start, reach)
    if new is not free:
        new = no_faster(layer, new, rate)
    return new, Moments((means[0], means[1]), (squares[0], squares[1]), n)


def within(layer: Layer, start: Layer, reach: float) -> Layer:
    """The layer, drawn back to `reach` from its start where it is further away."""
    far = layer.distance(start)
    if far <= reach:
        return layer
    return between(start, layer, reach / far)


def no_faster(layer: Layer, new: Layer, rate: float) -> Layer:
    """As far towards the new layer as no weight moves by more than `rate`: being drawn back moves some by more."""
    fastest = max(float((b - a).abs().max()) for a, b in pairs(layer, new))
    return new if fastest <= rate else between(layer, new, rate / fastest)


def between(layer: Layer, other: Layer, share: float) -> Layer:
    weight, bias = (torch.lerp(a, b, share) for a, b in pairs(layer, other))
    return Layer(weight, bias)


def pairs(layer: Layer, other: Layer) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return (layer.weight, other.weight), (layer.bias, other.bias)


# The adapter: which model reads the next trial of a day, and what is learned from it once it was read.

Label = Callable[[np.ndarray], Sequence[int]]
STILL = AugmentationConfig()  # no noise at all


@dataclass(frozen=True, eq=False)
class Adapter:
    """A model, a method, and the noise of the model's training. The model's weights are never changed."""

    model: Model
    settings: Adaptation
    noise: AugmentationConfig
    label: Label = greedy  # frame scores to the tokens to learn from

    def start(self, session: str, reference: Sums | None = None, expected: Expected | None = None) -> Day:
        """A day begins: with its own layer where the model has one, else with that of the nearest known day.

        `reference` is what that known day's input looked like (`input_sums` of its trials), for `statistics`;
        `expected` is how sure the model is of trials of days it knows, without which every step is a whole one.
        """
        if self.settings.method == "statistics" and reference is None:
            raise UserError(
                "adapting by statistics needs recordings of the nearest known day to compare with; give a store"
                " that holds them, or choose another method"
            )
        like = self.start_like(session)
        layer = Layer(*copy_session_layer(self.model, like))
        return Day(session, like, layer, layer, Moments.zero(layer), reference, expected)

    def start_like(self, session: str) -> str:
        """The known session whose layer a day begins with."""
        known = self.model.config.sessions
        return session if session in known else nearest_session(session, known)

    def before(self, day: Day, bins: Tensor | None = None) -> Model:
        """The model for the next trial, its session numbered 0; `bins` (T, C) are the trial's own, normalised."""
        layer = self.layer(day, bins)
        return single_session_model(self.model, day.session, layer.weight, layer.bias)

    def layer(self, day: Day, bins: Tensor | None = None) -> Layer:
        """The session layer that the next trial is read with: the one it began with where nothing calls for another."""
        safety = self.settings.safety
        if gave_up(day, safety) or need(day, safety) == 0.0:
            return day.start
        if self.settings.method != "statistics":
            return day.layer
        return self._matched(day, bins if self.settings.own_input else None)

    def unadapted(self, day: Day) -> Model:
        """The model as it would read this day had nothing been learned."""
        return single_session_model(self.model, day.session, day.start.weight, day.start.bias)

    def after(self, day: Day, heard: Heard, unadapted: np.ndarray | None = None) -> tuple[Day, str | None]:
        """The day after a trial was read, and why it fell back to the unadapted model if it did.

        `unadapted` are the frame scores (F, V) of the unadapted model, where the caller has them already.
        """
        safety = self.settings.safety
        day = replace(day, n_trials=day.n_trials + 1)
        if self.settings.method == "none" or gave_up(day, safety):
            return day, None
        if unadapted is None:
            unadapted = read(self.unadapted(day), heard.bins)
        day = judged(replace(day, trust=compare(day.trust, heard.log_probs, unadapted, safety)), unadapted)
        if reason := must_fall_back(day.trust, safety):
            return fall_back(day), reason
        if self.settings.method == "statistics":
            return self._count(day, heard), None
        if need(day, safety) == 0.0 or not worth_learning(heard, safety):
            return day, None
        return self._learn(day, heard), None

    def _count(self, day: Day, heard: Heard) -> Day:
        if not recorded(heard.bins):
            return day
        fresh = input_sums(self.model, heard.bins)
        return replace(day, seen=fresh if day.seen is None else day.seen + fresh, n_steps=day.n_steps + 1)

    def _learn(self, day: Day, heard: Heard) -> Day:
        settings = self.settings
        if settings.method == "entropy":
            outputs, of = read_copies(self.model, day.layer, [heard], STILL, settings.seed, 0)
            gradients = entropy_gradients(outputs, of)
        else:
            trials = [heard] * settings.copies
            if settings.method == "replay":
                day, past = self._recall(day)
                trials += past
                day = replace(day, memory=(*day.memory, heard)[-settings.memory :])
            outputs, of = read_copies(self.model, day.layer, trials, self.noise, settings.seed, day.n_trials)
            gradients = label_gradients(outputs, trials, of)
        rate = settings.rate * settings.safety.cool**day.trust.n_falls * need(day, settings.safety)
        gains = settings.method == "entropy"
        layer, moments = move(day.layer, day.moments, gradients, day.start, rate, settings.reach, gains)
        return replace(day, layer=layer, moments=moments, n_steps=day.n_steps + 1)

    def _recall(self, day: Day) -> tuple[Day, list[Heard]]:
        """Some past trials of the day, read anew: the model knows the day better than when it first heard them."""
        n = min(self.settings.past, len(day.memory))
        rng = np.random.default_rng(derive_seed(self.settings.seed, day.session, day.n_trials))
        chosen = rng.choice(len(day.memory), size=n, replace=False).tolist() if n else []
        model = single_session_model(self.model, day.session, day.layer.weight, day.layer.bias)
        memory = list(day.memory)
        for i in chosen:
            log_probs = read(model, memory[i].bins)
            fresh = Heard(memory[i].bins, log_probs, tuple(self.label(log_probs)))
            if worth_learning(fresh, self.settings.safety):
                memory[i] = fresh
        return replace(day, memory=tuple(memory)), [memory[i] for i in chosen]

    def _matched(self, day: Day, bins: Tensor | None) -> Layer:
        assert day.reference is not None
        prior = self.settings.prior_bins / self.settings.safety.cool**day.trust.n_falls
        today = day.reference.counting_as(prior)
        if day.seen is not None:
            today = today + day.seen
        if bins is not None and recorded(bins):
            today = today + input_sums(self.model, bins)
        return within(matched(day.start, day.reference, today), day.start, self.settings.reach)


def make_adapter(
    model: Model, settings: Adaptation, noise: AugmentationConfig, label: Label = greedy
) -> Adapter:
    """An adapter for a model, which is put in reading mode: nothing but session layers is ever adapted."""
    return Adapter(model.eval().requires_grad_(False), settings, noise, label)


@torch.inference_mode()
def read(model: Model, bins: Tensor) -> np.ndarray:
    """Frame scores (F, V) of one trial of normalised bins (T, C), by a model of one day."""
    zero = torch.zeros(1, dtype=torch.int64, device=bins.device)
    outputs = model.encode(ModelInputs(bins[None], zero + len(bins), zero))
    scores: np.ndarray = outputs.log_probs["ctc"][0, : int(outputs.n_frames[0])].float().cpu().numpy()
    return scores
