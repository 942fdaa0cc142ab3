"""One bounded step of a session layer: towards labels, or towards surer frames. Everything else stays as it is."""

from collections.abc import Sequence

import torch
from torch import Tensor

from arcuate.adapt.day import Heard, Layer, Moments
from arcuate.augment.settings import Augment
from arcuate.augment.steps import augment
from arcuate.losses.ctc import ctc_loss
from arcuate.losses.settings import CTC
from arcuate.models.days import one_day
from arcuate.models.model import Model
from arcuate.models.outputs import Outputs

PER_TOKEN = CTC(reduction="mean_per_token", zero_infinity=True)
BETAS = (0.9, 0.99)  # of the running means; a day is a few hundred steps, so they are short


def read_copies(
    model: Model, layer: Layer, trials: Sequence[Heard], noise: Augment, seed: int, position: int
) -> tuple[Outputs, tuple[Tensor, Tensor]]:
    """Noisy copies of trials through the layer, with the two tensors to take gradients of."""
    n_bins = torch.tensor([len(t.bins) for t in trials], device=layer.weight.device)
    bins = layer.weight.new_zeros(len(trials), int(n_bins.max()), layer.weight.shape[0])
    for row, trial in zip(bins, trials, strict=True):
        row[: len(trial.bins)] = trial.bins
    names = ["trial"] * len(trials)  # copies of one name are told apart by their place
    bins, n_bins = augment(bins, n_bins, names, noise, seed, position)
    day = one_day(model, "today", layer.weight.detach(), layer.bias.detach())
    session = day.front_end.session_layer
    outputs = day.encode(bins, n_bins, torch.zeros_like(n_bins))
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
