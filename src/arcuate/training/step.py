"""One optimizer step: augmentation, forward pass, losses, gradients, metrics, and the update of the weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from arcuate.data.alphabet import BLANK, min_frames
from arcuate.data.augmentation import augment, change_speed, draw_cut
from arcuate.data.batching import Batch, to_device
from arcuate.data.seeds import derive_seed
from arcuate.losses.combined import LOSS_NAMES, TOKEN_LOSSES, compute_view_losses, weighted_loss
from arcuate.losses.config import LossSettings
from arcuate.models.interfaces import Flow, Joint, ModelInputs, Outputs, Reconstruction
from arcuate.models.model import Model
from arcuate.training.config import TrainingConfig
from arcuate.training.distillation import Teacher
from arcuate.training.environment import Distributed, autocast
from arcuate.training.metrics import StepMetrics
from arcuate.training.optim import fill_absent_gradients
from arcuate.training.state import TrainingState

Encode = Callable[[ModelInputs, bool], Outputs]  # forward pass of a model; the flag adds the flow of the denoiser

# Sums over the batches of a step, in the order in which they are packed into one tensor.
_SUMS = ("loss", "blank_frames", "frames", "output_tokens", "target_tokens", *LOSS_NAMES)
_VALUES = (*_SUMS, "grad_norm", "loss_scale", "update_ratio", "n_distinct")
_INTERMEDIATE = "intermediate."  # prefix of the tensors of `EncodeModule`


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
    """Outputs (of the first view) and losses per trial of one batch; all random numbers depend on its position."""
    torch.manual_seed(derive_seed(state.recipe.train.seed, "dropout", batch.position, distributed.rank))
    with autocast(state.precision, device):
        outputs = forward(state.model, encode, batch, state.recipe, state.loss, state.teacher)
    views = split_views(outputs, state.loss.consistency.n_views)
    modes = state.modes.targets([t.id for t in batch.trials], device) if state.modes else None
    lengths, mean_frames = batch.token_lengths, _mean_frames(state, batch)
    losses = compute_view_losses(views, batch.tokens, batch.n_tokens, state.loss, modes, lengths, mean_frames)
    return views[0], losses


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
    """Mean number of frames over the trials of all processes, which every process knows without communication.

    Changes of speed are not counted: they are known only to the process that has the trial, and average out.
    """
    cut = draw_cut(state.recipe.augment, state.recipe.train.seed, batch.position)
    count_frames = state.recipe.front_end.patch.count_frames
    frames = [count_frames(max(trial.n_bins - cut, 1)) for trial in batch.all_trials]
    return float(torch.tensor(frames, dtype=torch.float32).mean())


def _zero_loss(outputs: Outputs) -> Tensor:
    """Zero, as a function of all outputs that a loss uses, so that every parameter gets a gradient of zero."""
    parts = [part for part in tensors_from_outputs(outputs).values() if part.requires_grad]
    return torch.stack([0.0 * part.float().sum() for part in parts]).sum()


def forward(
    model: Model,
    encode: Encode,
    batch: Batch,
    recipe: TrainingConfig,
    loss: LossSettings,
    teacher: Teacher | None = None,
) -> Outputs:
    """Augment and encode one batch; several views of it (`loss.consistency`) follow one another.

    Augmentation acts on normalised bins, so that its strengths mean the same on every data set.
    """
    clean, n_bins = model.normalise(batch.bins, batch.statistics), batch.n_bins
    draws = ([t.id for t in batch.trials], recipe.augment, recipe.train.seed, batch.position)
    on_host = torch.tensor(batch.lengths)
    if recipe.augment.speed_change > 0:
        count_bins, cut = recipe.front_end.patch.count_bins, recipe.augment.random_cut
        least = [count_bins(min_frames(t.tokens or ())) + cut for t in batch.trials]
        clean, on_host = change_speed(clean, on_host, *draws, least)
        n_bins = to_device(on_host, clean.device)
    n_views = loss.consistency.n_views
    views, lengths = zip(*(augment(clean, on_host, *draws, view) for view in range(n_views)), strict=True)
    cut = clean.shape[1] - views[0].shape[1]  # random cuts remove the first bins
    n_bins = (n_bins - cut).clamp(min=1) if cut else n_bins
    needs_clean = any(part is not None for part in (model.mode, model.denoiser, model.reconstruction))
    inputs = ModelInputs(
        views[0] if n_views == 1 else torch.cat(views),
        n_bins.repeat(n_views),
        batch.session.repeat(n_views),
        tokens=batch.tokens.repeat(n_views, 1) if loss.rnnt.weight > 0 else None,
        clean=clean[:, cut:].repeat(n_views, 1, 1) if needs_clean else None,
        layers=loss.intermediate.active_layers,
        lengths=tuple(lengths[0].tolist()) * n_views,
        without_gradient=_unused_outputs(loss, teacher),
    )
    outputs = encode(inputs, loss.denoise.weight > 0)
    if teacher is None:
        return outputs
    own = tuple(lengths[0].tolist())
    return replace(outputs, teacher=teacher.log_probs(clean[:, cut:], n_bins, batch.session, own))


def _unused_outputs(loss: LossSettings, teacher: Teacher | None) -> tuple[str, ...]:
    """Outputs that no loss uses; which ones a custom loss uses is not known, except that it gets no reconstruction."""
    weights = (loss.ctc.weight, loss.consistency.weight, loss.alignment.weight, teacher is not None)
    used = {
        "frames": loss.has_custom,
        "ctc": loss.has_custom or any(weights),
        "mode": loss.has_custom or loss.mode.weight > 0,
        "reconstruction": loss.reconstruction.weight > 0,
    }
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
    reconstruction = None if "reconstruction" in inputs.without_gradient else model.reconstruct(encoded, inputs)
    return replace(model.predict(encoded, inputs.tokens), flow=flow, reconstruction=reconstruction)


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
    state.averages.update(state.model, state.step + 1)
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
        self._count_frames = model.count_frames
        self.module = DistributedDataParallel(EncodeModule(model), device_ids=device_ids, find_unused_parameters=True)

    def __call__(self, inputs: ModelInputs, match_flow: bool) -> Outputs:
        outputs = outputs_from_tensors(self.module(inputs, match_flow))
        return replace(outputs, lengths=self._count_frames(inputs.lengths))

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which gradients accumulate in each process; the next pass outside of it averages them all."""
        context: AbstractContextManager[None] = self.module.no_sync()
        return context


class EncodeModule(nn.Module):
    """Model and forward pass as a module that returns named tensors, as DistributedDataParallel requires."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: ModelInputs, match_flow: bool) -> dict[str, Tensor]:
        parts = tensors_from_outputs(encode_for_training(self.model, inputs, match_flow))
        # The reducer waits for the gradient of every parameter behind an output: detach outputs without a loss.
        return {name: t.detach() if name in inputs.without_gradient else t for name, t in parts.items()}


def tensors_from_outputs(outputs: Outputs) -> dict[str, Tensor]:
    """All tensors of the outputs, by name."""
    parts = {"frames": outputs.frames, "n_frames": outputs.n_frames, "ctc": outputs.log_probs["ctc"]}
    parts |= {f"{_INTERMEDIATE}{layer}": log_probs for layer, log_probs in outputs.intermediate.items()}
    if outputs.joint is not None:
        joint = outputs.joint  # views, so that DistributedDataParallel finds the parameters in the output
        weight, bias = joint.weight.view_as(joint.weight), joint.bias.view_as(joint.bias)
        parts |= {"joint.0": joint.frames, "joint.1": joint.predicted, "joint.2": weight, "joint.3": bias}
    if outputs.mode is not None:
        parts["mode"] = outputs.mode
    if outputs.flow is not None:
        parts |= {"flow.0": outputs.flow.predicted, "flow.1": outputs.flow.target}
    if outputs.reconstruction is not None:
        parts |= {f"reconstruction.{name}": part for name, part in vars(outputs.reconstruction).items()}
    return parts


def outputs_from_tensors(parts: dict[str, Tensor]) -> Outputs:
    """Rebuild the outputs from the tensors of `EncodeModule`."""
    joint = [parts[f"joint.{i}"] for i in range(4) if f"joint.{i}" in parts]
    flow = [parts[f"flow.{i}"] for i in range(2) if f"flow.{i}" in parts]
    names = [field.name for field in fields(Reconstruction)]
    reconstruction = {n: parts[f"reconstruction.{n}"] for n in names if f"reconstruction.{n}" in parts}
    return Outputs(
        parts["frames"],
        parts["n_frames"],
        {"ctc": parts["ctc"]},
        Joint(*joint) if joint else None,
        parts.get("mode"),
        Flow(*flow) if flow else None,
        {int(name.removeprefix(_INTERMEDIATE)): part for name, part in parts.items() if name.startswith(_INTERMEDIATE)},
        reconstruction=Reconstruction(**reconstruction) if reconstruction else None,
    )


def split_views(outputs: Outputs, n_views: int) -> tuple[Outputs, ...]:
    """Outputs of each of the views that follow one another in a batch."""
    if n_views == 1:
        return (outputs,)
    n_trials = len(outputs.n_frames) // n_views

    def split(view: int) -> Outputs:
        rows = slice(view * n_trials, (view + 1) * n_trials)
        joint, flow, masked = outputs.joint, outputs.flow, outputs.reconstruction
        return Outputs(
            outputs.frames[rows],
            outputs.n_frames[rows],
            {head: log_probs[rows] for head, log_probs in outputs.log_probs.items()},
            None if joint is None else replace(joint, frames=joint.frames[rows], predicted=joint.predicted[rows]),
            None if outputs.mode is None else outputs.mode[rows],
            None if flow is None else Flow(flow.predicted[rows], flow.target[rows]),
            {layer: log_probs[rows] for layer, log_probs in outputs.intermediate.items()},
            None if outputs.lengths is None else outputs.lengths[rows],
            None
            if masked is None
            else Reconstruction(masked.predicted[rows], masked.target[rows], masked.masked[rows]),
            outputs.teacher,
        )

    return tuple(split(view) for view in range(n_views))


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
