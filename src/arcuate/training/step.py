"""One optimizer step: augmentation, forward pass, losses, gradients, metrics, and the update of the weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from arcuate.data.alphabet import BLANK
from arcuate.data.augmentation import augment, draw_cut
from arcuate.data.batching import Batch
from arcuate.data.seeds import derive_seed
from arcuate.losses.combined import LOSS_NAMES, TOKEN_LOSSES, compute_losses, weighted_loss
from arcuate.losses.config import LossSettings
from arcuate.models.interfaces import ModelInputs, Outputs
from arcuate.models.model import Model
from arcuate.training.config import TrainingConfig
from arcuate.training.environment import Distributed, autocast
from arcuate.training.metrics import StepMetrics
from arcuate.training.optim import fill_absent_gradients
from arcuate.training.state import TrainingState

Encode = Callable[[ModelInputs, bool], Outputs]  # forward pass of a model; the flag adds the flow of the denoiser

# Sums over the batches of a step, in the order in which they are packed into one tensor.
_SUMS = ("loss", "blank_frames", "frames", "output_tokens", "target_tokens", *LOSS_NAMES)
_VALUES = (*_SUMS, "grad_norm", "loss_scale", "update_ratio", "n_distinct")


@dataclass(frozen=True)
class DeviceMetrics:
    """Metrics of one step that are still on the device, so that the host does not wait for it."""

    values: Tensor  # `_VALUES`, over all processes
    n_trials: int
    n_classes: int
    loss_settings: LossSettings
    loss_names: tuple[str, ...]  # losses that were computed

    def read(self) -> StepMetrics:
        """Transfer the values: the only synchronisation of a step."""
        return read_metrics([self])[0]


def read_metrics(steps: Sequence[DeviceMetrics]) -> list[StepMetrics]:
    """Transfer the metrics of several steps at once."""
    return [_step_metrics(step, row) for step, row in zip(steps, _transfer([s.values for s in steps]), strict=True)]


def _transfer(rows: list[Tensor]) -> list[list[float]]:
    values: list[list[float]] = torch.stack(rows).tolist() if rows else []
    return values


def _step_metrics(step: DeviceMetrics, values: Sequence[float]) -> StepMetrics:
    totals = dict(zip(_VALUES, values, strict=True))
    n_trials = step.n_trials
    means = {name: totals[name] / n_trials for name in step.loss_names}
    n_tokens, n_frames = totals["target_tokens"] / n_trials, totals["frames"] / n_trials
    return StepMetrics(
        loss=totals["loss"] / n_trials,
        grad_norm=totals["grad_norm"],
        normalised_loss=_normalised_loss(means, step.loss_settings, n_tokens, n_frames, step.n_classes),
        blank_share=totals["blank_frames"] / max(totals["frames"], 1),
        n_distinct=int(totals["n_distinct"]),
        length_ratio=totals["output_tokens"] / max(totals["target_tokens"], 1),
        losses=means,
        loss_scale=totals["loss_scale"] or None,
        update_ratio=totals["update_ratio"] if math.isfinite(totals["update_ratio"]) else None,
    )


def compute_gradients(
    state: TrainingState, encode: Encode, batches: Sequence[Batch], device: torch.device, distributed: Distributed
) -> DeviceMetrics:
    """Compute and clip the gradients of the mean loss per trial over all batches; return the metrics of the step.

    Nothing is read from the device: everything the host has to know (lengths, sessions, masks, cuts) is known before
    the step, and the metrics stay on the device until they are read.
    """
    loss_settings = state.loss
    n_trials = sum(batch.n_trials for batch in batches)  # over all processes
    n_classes = len(state.model.config.classes)
    sums = torch.zeros(len(_SUMS) + n_classes, device=device)
    state.model.zero_grad(set_to_none=True)  # also of components that an earlier stage trained
    for batch in batches:
        is_last = batch is batches[-1]
        with encode.no_sync() if isinstance(encode, DistributedEncode) and not is_last else nullcontext():
            outputs, losses = _batch_losses(state, encode, batch, device, distributed)
            per_trial = weighted_loss(losses, loss_settings)
            # A process without trials of its own repeats one, because every process needs the graph; it must not
            # count, even if its loss is infinite.
            loss = per_trial.sum() if batch.n_counted else _zero_loss(outputs)
            if distributed.size > 1 and loss_settings.has_custom:
                loss = loss + _zero_loss(outputs)  # every output has a gradient, whatever the custom loss uses
            state.scaler.scale(loss * (distributed.size / n_trials)).backward()
        with torch.no_grad():
            sums += _summarise(outputs, batch, loss, losses)
    grad_norm = _clip_gradients(state)
    scale = state.scaler.scale(sums.new_ones(())) if state.scaler.is_enabled() else sums.new_zeros(())
    ratio = sums.new_full((), math.nan) if state.unread_update_ratio is None else state.unread_update_ratio
    state.unread_update_ratio = None
    # Every process computes these from the same gradients. Those of rank 0 count, because GPUs of different kinds may
    # round differently, and all processes have to reach the same verdict.
    own = torch.stack([grad_norm.to(device), scale.to(device), ratio.to(sums.dtype)])
    summed = distributed.sum(torch.cat([sums, own if distributed.is_main else torch.zeros_like(own)]))
    sums, class_counts, own = summed.split([len(_SUMS), n_classes, len(own)])
    class_counts[BLANK].zero_()  # assigning a number would copy it to the device, and wait for the copy
    values = torch.cat([sums, own, (class_counts > 0).sum()[None]])
    return DeviceMetrics(values, n_trials, n_classes, loss_settings, tuple(n for n in LOSS_NAMES if n in losses))


def _batch_losses(
    state: TrainingState, encode: Encode, batch: Batch, device: torch.device, distributed: Distributed
) -> tuple[Outputs, dict[str, Tensor]]:
    """Outputs and losses per trial of one batch; all random numbers depend on its position."""
    torch.manual_seed(derive_seed(state.recipe.train.seed, "dropout", batch.position, distributed.rank))
    with autocast(state.precision, device):
        outputs = forward(state.model, encode, batch, state.recipe, state.loss)
    modes = state.modes.targets([t.id for t in batch.trials], device) if state.modes else None
    lengths, mean_frames = batch.token_lengths, _mean_frames(state, batch)
    return outputs, compute_losses(outputs, batch.tokens, batch.n_tokens, state.loss, modes, lengths, mean_frames)


@torch.no_grad()
def measure_loss(
    state: TrainingState, batches: Sequence[Batch], device: torch.device, distributed: Distributed
) -> float:
    """Mean loss per trial of the batches of a step with the present weights, in the same mode as in the step."""
    total, encode = torch.zeros((), device=device), partial(encode_for_training, state.model)
    for batch in batches:
        _, losses = _batch_losses(state, encode, batch, device, distributed)
        if batch.n_counted:
            total += weighted_loss(losses, state.loss).sum()
    return float(distributed.sum(total)) / sum(batch.n_trials for batch in batches)


def _mean_frames(state: TrainingState, batch: Batch) -> float:
    """Mean number of frames over the trials of all processes, which every process knows without communication."""
    cut = draw_cut(state.recipe.augment, state.recipe.train.seed, batch.position)
    count_frames = state.recipe.front_end.patch.count_frames
    frames = [count_frames(max(trial.n_bins - cut, 1)) for trial in batch.all_trials]
    return float(torch.tensor(frames, dtype=torch.float32).mean())


def _zero_loss(outputs: Outputs) -> Tensor:
    """Zero, as a function of all outputs that a loss uses, so that every parameter gets a gradient of zero."""
    parts = [part for part in outputs.tensors().values() if part.requires_grad]
    return torch.stack([0.0 * part.float().sum() for part in parts]).sum()


def forward(model: Model, encode: Encode, batch: Batch, recipe: TrainingConfig, loss: LossSettings) -> Outputs:
    """Augment and encode one batch.

    Augmentation acts on normalised bins, so that its strengths mean the same on every data set.
    """
    clean = model.normalise(batch.bins, batch.statistics)
    trials = [t.id for t in batch.trials]
    bins, lengths = augment(
        clean, torch.tensor(batch.lengths), trials, recipe.augment, recipe.train.seed, batch.position
    )
    cut = clean.shape[1] - bins.shape[1]  # random cuts remove the first bins
    inputs = ModelInputs(
        bins,
        (batch.n_bins - cut).clamp(min=1) if cut else batch.n_bins,
        batch.session,
        tokens=batch.tokens if loss.rnnt.weight > 0 else None,
        clean=clean[:, cut:] if model.mode is not None or model.denoiser is not None else None,
        layers=loss.intermediate.layers,
        lengths=tuple(lengths.tolist()),
        without_gradient=_unused_outputs(loss),
    )
    return encode(inputs, loss.denoise.weight > 0)


def _unused_outputs(loss: LossSettings) -> tuple[str, ...]:
    """Outputs that no loss uses; which ones a custom loss uses is not known."""
    if loss.has_custom:
        return ()
    used = {"frames": False, "log_probs.ctc": loss.ctc.weight > 0, "mode": loss.mode.weight > 0}
    return tuple(name for name, is_used in used.items() if not is_used)


def encode_for_training(model: Model, inputs: ModelInputs, match_flow: bool = False) -> Outputs:
    """Return the outputs of `Model.encode`, and with `match_flow` the denoiser's flow from augmented to clean frames.

    The target frames are those of the clean bins without dropout and gradients. Times are drawn between encoder and
    heads, which fixes the order of all draws of a step.
    """
    encoded = model.encode_frames(inputs)
    flow = None
    if match_flow and model.denoiser is not None and inputs.clean is not None:
        noisy = encoded.frames
        times = torch.rand(len(noisy), device=noisy.device, dtype=noisy.dtype)
        training = model.training
        model.eval()
        with torch.no_grad():
            clean = replace(inputs, bins=inputs.clean.clone(), layers=())
            target = model.encode_frames(clean, encoded.mode).frames
        model.train(training)
        flow = model.denoiser.match(noisy, target, encoded.n_frames, times)
    return replace(model.predict(encoded, inputs.tokens), flow=flow)


def _clip_gradients(state: TrainingState) -> Tensor:
    """Unscale and clip the gradients; return their norm before clipping."""
    if state.recipe.optimizer.absent_sessions == "decay":
        fill_absent_gradients(state.optimizer)
    state.scaler.unscale_(state.optimizer)
    max_norm = state.recipe.train.clip_norm or math.inf
    return torch.nn.utils.clip_grad_norm_(state.model.parameters(), max_norm)


def apply_update(state: TrainingState, measure: bool = False) -> None:
    """Update the weights from their gradients, and the averages from the weights; call `finish_step` afterwards.

    The gradients are unscaled and known to be finite if there is a loss scaler, so its own check, which would
    synchronise once more, is not needed. With `measure`, norm of the update / norm of the weights before it is computed
    as well, which copies the weights; it stays on the device and is read with the metrics of the next step.
    """
    before = [p.detach().clone() for p in state.model.parameters() if p.grad is not None] if measure else []
    state.optimizer.step()
    state.average.update(state.model)
    if before:
        after = [p.detach() for p in state.model.parameters() if p.grad is not None]
        size = torch.nn.utils.get_total_norm(before)
        torch._foreach_sub_(before, after)
        state.unread_update_ratio = torch.nn.utils.get_total_norm(before) / size


def finish_step(state: TrainingState) -> None:
    """Adjust the loss scale; after every step, with or without an update, because the next `unscale_` needs it."""
    state.scaler.update()


def make_encode(model: Model, recipe: TrainingConfig, device: torch.device, distributed: Distributed) -> Encode:
    """Return the forward pass of a model: plain, compiled (runtime.compile), or with gradients averaged over processes.

    Call it again when other components become trainable.
    """
    if distributed.size > 1:
        return DistributedEncode(model, device)
    if recipe.runtime.compile and device.type == "cuda":
        compile_blocks(model)
    return partial(encode_for_training, model)


def compile_blocks(model: Model, backend: str = "inductor") -> None:
    """Compile the repeated blocks of the encoder in place (regional compilation, as PyTorch recommends it).

    The rest stays as it is: the front end depends on which sessions and lengths a batch has, so it would be compiled
    again for every batch, up to torch's limit. A GRU has no such blocks, because cuDNN computes all its layers in one
    call, and neither has the state-space encoder, whose scan has a step per chunk of frames.
    """
    for block in model.encoder.blocks_to_compile():
        block.compile(dynamic=True, backend=backend)


class DistributedEncode:
    """Forward pass of a model whose gradients are averaged over all processes in the backward pass."""

    def __init__(self, model: Model, device: torch.device) -> None:
        # Unused parameters: session layers without a trial in the batch get no gradient on any process.
        device_ids = [device.index] if device.type == "cuda" else None
        self.module = DistributedDataParallel(EncodeModule(model), device_ids=device_ids, find_unused_parameters=True)

    def __call__(self, inputs: ModelInputs, match_flow: bool) -> Outputs:
        outputs: Outputs = self.module(inputs, match_flow)
        return outputs

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which gradients accumulate in each process; the next pass outside of it averages them all."""
        context: AbstractContextManager[None] = self.module.no_sync()
        return context


class EncodeModule(nn.Module):
    """Model and forward pass as a module, as DistributedDataParallel requires."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: ModelInputs, match_flow: bool) -> Outputs:
        def prepare(name: str, tensor: Tensor) -> Tensor:
            # The reducer waits for the gradient of every parameter behind an output: detach outputs without a loss.
            # It finds no parameter that is itself an output, as those of the joiner are: pass a view of it.
            return tensor.detach() if name in inputs.without_gradient else tensor.view_as(tensor)

        return encode_for_training(self.model, inputs, match_flow).map(prepare)


def _summarise(outputs: Outputs, batch: Batch, loss: Tensor, losses: Mapping[str, Tensor]) -> Tensor:
    """Return the sums of one batch in the order of `_SUMS`, then the number of frames per most probable class.

    Trials that only pad the batch of this process are left out.
    """
    n = batch.n_counted
    log_probs = outputs.log_probs["ctc"][:n]
    best = log_probs.argmax(-1)  # (B, F)
    valid = torch.arange(best.shape[1], device=best.device) < outputs.n_frames[:n, None]
    changes = torch.ones_like(valid)
    changes[:, 1:] = best[:, 1:] != best[:, :-1]
    blank = best == BLANK
    n_output_tokens = (changes & ~blank & valid).sum()  # tokens in the greedy output
    counts = [(blank & valid).sum(), valid.sum(), n_output_tokens, batch.n_tokens[:n].sum()]
    by_loss = [losses[name][:n].sum() if name in losses else loss.new_zeros(()) for name in LOSS_NAMES]
    sums = torch.stack([loss.detach(), *(c.float() for c in counts), *by_loss])
    by_class = sums.new_zeros(log_probs.shape[-1])  # without boolean indexing and bincount, which synchronise
    return torch.cat([sums, by_class.scatter_add_(0, best.flatten(), valid.flatten().to(sums.dtype))])


def _normalised_loss(
    losses: Mapping[str, float], settings: LossSettings, n_tokens: float, n_frames: float, n_classes: int
) -> float | None:
    """Return loss per token / log(number of classes), the loss of a uniform distribution; None without a token loss.

    The loss is CTC, or RNN-T if CTC has weight 0; all arguments are means over trials.
    """
    name = next((name for name in TOKEN_LOSSES if name in losses), None)
    if name is None:
        return None
    match getattr(settings, name).reduction:
        case "mean_per_token":
            per_token = losses[name]
        case "half_mean_frames":
            per_token = losses[name] * n_frames / 2 / max(n_tokens, 1)
        case _:
            per_token = losses[name] / max(n_tokens, 1)
    return per_token / math.log(n_classes)
