"""The denoiser: initial identity, exact straight flows, the scale of its loss, and its use in training."""

from pathlib import Path

import pytest
import torch

from arcuate.data.alphabet import CLASSES
from arcuate.data.batching import evaluation_batches, group_by_length
from arcuate.data.store import Store
from arcuate.experiments.train import train
from arcuate.losses.combined import flow_loss
from arcuate.models.config import (
    DenoiserSettings,
    FrontEndSettings,
    GRUSettings,
    ModelConfig,
    ModelSettings,
    Patch,
)
from arcuate.models.denoiser import Denoiser
from arcuate.models.interfaces import Flow, ModelInputs
from arcuate.models.io import load_model
from arcuate.models.model import Model
from arcuate.run import Run
from arcuate.training.step import encode_for_training

causality = pytest.mark.parametrize("causal", [True, False])


@causality
def test_untrained_denoiser_is_the_identity(causal: bool) -> None:
    frames = torch.randn(2, 7, 5)
    denoiser = Denoiser(DenoiserSettings(enabled=True), 5, causal)
    assert torch.equal(denoiser(frames, torch.tensor([7, 4])), frames)


def test_loss_is_1_for_no_flow_and_0_for_the_target_flow() -> None:
    target, n = torch.randn(2, 6, 3), torch.tensor([6, 2])
    torch.testing.assert_close(flow_loss(Flow(torch.zeros(2, 6, 3), target), n), torch.ones(2))
    torch.testing.assert_close(flow_loss(Flow(target.clone(), target), n), torch.zeros(2))
    beyond = target.clone()
    beyond[1, 2:] += 100.0  # padding
    torch.testing.assert_close(flow_loss(Flow(beyond, target), n), torch.zeros(2))
    assert torch.isfinite(flow_loss(Flow(target, torch.zeros_like(target)), n)).all()


@causality
def test_learns_to_remove_noise(causal: bool) -> None:
    """Slowly varying clean frames plus white noise: denoised unseen frames are closer to the clean ones."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    denoiser = Denoiser(DenoiserSettings(enabled=True, width=32), 4, causal)
    optimizer = torch.optim.Adam(denoiser.parameters(), lr=0.01)
    n = torch.full((16,), 40)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        clean = torch.randn(16, 8, 4, generator=generator).repeat_interleave(5, dim=1)
        return clean + torch.randn(clean.shape, generator=generator), clean

    for _ in range(150):
        noisy, clean = draw()
        times = torch.rand(16, generator=generator)
        loss = flow_loss(denoiser.match(noisy, clean, n, times), n).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    noisy, clean = draw()
    with torch.no_grad():
        denoised = denoiser(noisy, n)
    assert (denoised - clean).square().mean() < 0.75 * (noisy - clean).square().mean()


def test_flow_loss_trains_only_the_denoiser() -> None:
    settings = ModelSettings(
        front_end=FrontEndSettings(patch=Patch(bins=4, stride=4)), encoder=GRUSettings(width=6, depth=1),
        denoiser=DenoiserSettings(enabled=True, width=4),
    )  # fmt: skip
    model = Model(ModelConfig(settings=settings, n_channels=3, sessions=("s",), classes=CLASSES))
    clean = torch.randn(2, 24, 3)
    n_bins, session = torch.tensor([24, 13]), torch.tensor([0, 0])
    outputs = encode_for_training(
        model, ModelInputs(clean + torch.randn(2, 24, 3), n_bins, session, clean=clean), match_flow=True
    )
    flow_loss(outputs.flow, outputs.n_frames).sum().backward()
    learning = {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None}
    assert learning == {"denoiser"}
    assert model.training  # encoding the clean bins restores the training mode
    assert encode_for_training(model, ModelInputs(clean, n_bins, session, clean=clean)).flow is None


def test_training_stage_of_the_denoiser(cohort_store: Path, tmp_path: Path) -> None:
    """Its loss falls, other weights stay, and frames of held-out noisy bins move closer to the clean ones."""
    small = ["encoder.width=16", "denoiser.enabled=true", "denoiser.width=32", "data.batching.batch_size=8"]
    noise = ["augment.white_noise_sd=3.0", "augment.offset_sd=0.0"]  # noise for the denoiser to remove
    stages = (
        "stages=[{name: ctc, steps: 10, losses: {ctc: 1.0}, train: [front_end, encoder, ctc]},"
        "{name: denoise, steps: 60, lr_factor: 5.0, losses: {denoise: 1.0}, train: [denoiser]}]"
    )
    more = ["train.log_every=10", "train.validate_every=35", "train.keep_checkpoints=9", stages]
    train("tiny", cohort_store, tmp_path / "run", overrides=[*small, *noise, *more])
    rows = [r for r in Run(tmp_path / "run").metrics() if r["split"] == "train"]
    losses = [r["losses"]["denoise"] for r in rows if r["stage"] == "denoise"]
    assert losses[0] < 1.01  # the initial identity has a loss of 1
    assert losses[-1] < 0.97 * losses[0]
    folders = [tmp_path / "run/checkpoints" / name for name in ("stage-ctc", "last")]
    before, after = (load_model(folder).eval() for folder in folders)
    first, last = before.state_dict(), after.state_dict()
    changed = {name.split(".")[0] for name in first if not torch.equal(first[name], last[name])}
    assert changed == {"denoiser"}
    assert relative_error(before, after, Store.open(cohort_store)) < 0.95


def relative_error(before: Model, after: Model, store: Store) -> float:
    """Squared distance of denoised validation frames from clean ones, relative to frames without denoising."""
    trials = [t for t in store.trials if t.split == "val"]
    statistics_spec, generator, errors = (
        before.config.settings.front_end.statistics_spec,
        torch.Generator().manual_seed(0),
        [],
    )
    for _, batch in evaluation_batches(
        store, trials, before.config.sessions, statistics_spec, group_by_length(trials, 8)
    ):
        clean = before.normalise(batch.bins, batch.statistics)
        noisy = clean + 3.0 * torch.randn(clean.shape, generator=generator)
        with torch.no_grad():
            alone, moved = (m.encode(ModelInputs(noisy, batch.n_bins, batch.session)).frames for m in (before, after))
            there = before.encode(ModelInputs(clean, batch.n_bins, batch.session))
        true = torch.arange(alone.shape[1]) < there.n_frames[:, None]
        errors.append([(frames - there.frames)[true].square().sum() for frames in (moved, alone)])
    moved, alone = torch.tensor(errors).sum(0)
    return float(moved / alone)
