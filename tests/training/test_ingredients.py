"""CR-CTC, distillation, alignment, pretraining, speed, channel dropout: their laws, and training with them."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from arcuate.data.alphabet import CLASSES
from arcuate.data.augmentation import augment, change_speed
from arcuate.data.config import AugmentationConfig, DataConfig, TimeMasks
from arcuate.data.readers.source import NO_LABEL
from arcuate.data.selection import select
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.train import train
from arcuate.losses.combined import compute_losses, compute_view_losses, consistency_loss, reconstruction_loss
from arcuate.losses.config import ConsistencySettings, CTCSettings, LossSettings
from arcuate.models.config import (
    FrontEndSettings,
    GRUSettings,
    ModelConfig,
    ModelSettings,
    Patch,
    ReconstructionSettings,
    TransducerSettings,
)
from arcuate.models.front_end import smooth
from arcuate.models.interfaces import ModelInputs, Reconstruction
from arcuate.models.io import load_model
from arcuate.models.model import Model
from arcuate.run import Run
from arcuate.training.callbacks import Callback, Stop
from arcuate.training.step import split_views

SETTINGS = LossSettings(consistency=ConsistencySettings(weight=0.5))
MASKED = AugmentationConfig(white_noise_sd=0.5, random_cut=3, time_masks=TimeMasks(n_masks=2, max_bins=5))
SMALL = ["encoder.width=16", "train.steps=4", "train.log_every=1", "data.batching.batch_size=4"]
ALL = [
    "loss.consistency.weight=0.2",
    "loss.intermediate.layers=[1]",
    "augment.speed_change=0.1",
    "augment.channel_dropout=0.1",
    "augment.time_masks={n_masks: 3, max_fraction: 0.1}",
    "ema.decay=0.9",
]


def posteriors(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


def test_consistency_is_the_symmetric_divergence_summed_over_frames() -> None:
    first, second = posteriors(0, 2, 6, 5), posteriors(1, 2, 6, 5)
    n_frames, n_tokens = torch.tensor([6, 4]), torch.tensor([3, 2])
    losses = consistency_loss(first, second, n_frames, n_tokens, CTCSettings(reduction="sum_per_trial"))
    jeffreys = ((first.exp() - second.exp()) * (first - second)).sum(-1) / 2
    torch.testing.assert_close(losses, torch.stack([jeffreys[0].sum(), jeffreys[1, :4].sum()]))
    per_token = consistency_loss(first, second, n_frames, n_tokens, CTCSettings(reduction="mean_per_token"))
    torch.testing.assert_close(per_token, losses / n_tokens)
    same = consistency_loss(first, first, n_frames, n_tokens, CTCSettings())
    torch.testing.assert_close(same, torch.zeros(2), atol=1e-6, rtol=0)


def test_consistency_ignores_padding_and_batch_order() -> None:
    first, second = posteriors(0, 2, 6, 5), posteriors(1, 2, 6, 5)
    n_frames, n_tokens = torch.tensor([6, 4]), torch.tensor([3, 2])
    losses = consistency_loss(first, second, n_frames, n_tokens, CTCSettings())
    swapped = consistency_loss(first.flip(0), second.flip(0), n_frames.flip(0), n_tokens.flip(0), CTCSettings())
    alone = consistency_loss(first[1:, :4], second[1:, :4], n_frames[1:], n_tokens[1:], CTCSettings())
    torch.testing.assert_close(swapped.flip(0), losses, rtol=0, atol=0)
    torch.testing.assert_close(alone[0], losses[1])
    padded = first.clone()
    padded[1, 4:] = float("nan")  # frames beyond the trial have arbitrary values
    torch.testing.assert_close(consistency_loss(padded, second, n_frames, n_tokens, CTCSettings()), losses)


def test_each_view_learns_from_a_constant_other() -> None:
    """The gradient of a view is that of the divergence from the other one, p - q per frame."""
    logits = [torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in (0, 1)]
    first, second = (x.log_softmax(-1) for x in logits)
    losses = consistency_loss(first, second, torch.tensor([3]), torch.tensor([1]), CTCSettings())
    losses.sum().backward()
    difference = 0.5 * (first.exp() - second.exp()).detach()
    torch.testing.assert_close(logits[0].grad, difference)
    torch.testing.assert_close(logits[1].grad, -difference)


def test_losses_of_two_views_are_means_and_a_consistency() -> None:
    torch.manual_seed(0)
    settings = ModelSettings(
        encoder=GRUSettings(width=8, depth=2), transducer=TransducerSettings(enabled=True, width=8)
    )
    model = Model(ModelConfig(settings=settings, n_channels=4, sessions=("a",), classes=CLASSES)).eval()
    tokens, n_tokens = torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([3, 2])
    bins, n_bins, session = torch.randn(4, 90, 4), torch.tensor([90, 61] * 2), torch.zeros(4, dtype=torch.int64)
    outputs = model.encode(ModelInputs(bins, n_bins, session, tokens.repeat(2, 1), lengths=(90, 61, 90, 61)))
    views = split_views(outputs, 2)
    assert [view.lengths for view in views] == [outputs.lengths[:2]] * 2
    losses = compute_view_losses(views, tokens, n_tokens, SETTINGS)
    separate = [
        compute_losses(
            model.encode(ModelInputs(bins[rows], n_bins[rows], session[rows], tokens)), tokens, n_tokens, SETTINGS
        )
        for rows in (slice(0, 2), slice(2, 4))
    ]
    for name in ("ctc", "rnnt"):
        torch.testing.assert_close(losses[name], (separate[0][name] + separate[1][name]) / 2)
    assert losses.keys() == {"ctc", "rnnt", "consistency"}
    assert compute_view_losses(views[:1], tokens, n_tokens, SETTINGS).keys() == {"ctc", "rnnt"}


def test_views_differ_in_all_draws_but_the_cut() -> None:
    x, n_bins = torch.randn(2, 40, 3), torch.tensor([40, 25])
    cuts = set()
    for position in range(6):
        views = [augment(x, n_bins, ["a", "b"], MASKED, 1, position, view) for view in (0, 1)]
        assert views[0][0].shape == views[1][0].shape
        assert torch.equal(views[0][1], views[1][1])
        assert not torch.equal(views[0][0], views[1][0])
        cuts.add(views[0][0].shape[1])
    assert len(cuts) > 1


def test_channel_dropout_covers_complete_channels() -> None:
    x, n_bins = torch.ones(200, 9, 20), torch.full((200,), 9)
    out, _ = augment(x, n_bins, [str(i) for i in range(200)], AugmentationConfig(channel_dropout=0.2), 0, 0)
    dropped = (out == 0).all(1)
    assert torch.equal(out == 0, dropped[:, None].expand_as(out))
    assert abs(float(dropped.float().mean()) - 0.2) < 0.02


def test_speed_does_not_depend_on_the_batch_and_keeps_short_trials_alignable() -> None:
    settings = AugmentationConfig(speed_change=0.3)
    x, n_bins = torch.randn(3, 50, 4), torch.tensor([50, 31, 20])
    ids, least = ["a", "b", "c"], [10, 10, 20]
    both, lengths = change_speed(x, n_bins, ids, settings, 1, 3, least)
    swapped, swapped_lengths = change_speed(x.flip(0), n_bins.flip(0), ids[::-1], settings, 1, 3, least[::-1])
    assert torch.equal(lengths, swapped_lengths.flip(0))
    for i, n in enumerate(lengths.tolist()):
        alone, own = change_speed(x[i : i + 1, : n_bins[i]], n_bins[i : i + 1], [ids[i]], settings, 1, 3, [least[i]])
        assert own.tolist() == [n]
        torch.testing.assert_close(alone[0], both[i, :n], rtol=0, atol=0)
        torch.testing.assert_close(swapped[2 - i, :n], both[i, :n], rtol=0, atol=0)
        assert (both[i, n:] == 0).all()
    drawn = [change_speed(x, n_bins, ids, settings, 1, p, least)[1].tolist() for p in range(40)]
    assert min(n[2] for n in drawn) == 20  # never below what its labels need
    assert min(n[0] for n in drawn) < 42 and max(n[0] for n in drawn) > 60
    assert all(50 / 1.3 - 1 <= n[0] <= 50 / 0.7 + 1 for n in drawn)


def test_speed_interpolates_a_ramp_exactly() -> None:
    x = torch.arange(40.0)[None, :, None].repeat(1, 1, 2)
    out, (n,) = change_speed(x, torch.tensor([40]), ["a"], AugmentationConfig(speed_change=0.3), 0, 1, [1])
    expected = ((torch.arange(int(n)) + 0.5) * (40 / int(n)) - 0.5).clamp(0, 39)
    torch.testing.assert_close(out[0, :, 0], expected, rtol=0, atol=1e-5)
    unchanged, n_bins = change_speed(x, torch.tensor([40]), ["a"], AugmentationConfig(), 0, 1, [1])
    assert unchanged is x and n_bins.tolist() == [40]


@pytest.mark.parametrize("recipe", ["tiny", "mode-ssm-small", "tiny-transformer"])
def test_every_kind_of_model_trains_with_all_of_them(recipe: str, cohort_store: Path, tmp_path: Path) -> None:
    overrides = [*SMALL, *ALL, *(["encoder.n_heads=2"] if recipe != "tiny" else [])]
    train(recipe, cohort_store, tmp_path / "run", overrides=overrides)
    rows = Run(tmp_path / "run").metrics()
    trained, validated = ([r for r in rows if (r["split"] == "train") == own] for own in (True, False))
    assert all({"ctc", "intermediate", "consistency"} <= r["losses"].keys() for r in trained)
    assert all(r["losses"]["consistency"] > 0 for r in trained)
    assert all("consistency" not in r["losses"] for r in validated)


class StopAt(Callback):
    def __init__(self, step: int | None, stop: Stop) -> None:
        self.step, self.stop = step, stop

    def on_step(self, step: int) -> None:
        if step == self.step:
            self.stop.request()


def train_in_parts(store: Path, run: Path, overrides: list[str], stops: tuple[int, ...]) -> list[bytes]:
    """The weights and optimizer state at the end of a training that is stopped after these steps, and resumed."""
    for step in (*stops, None):
        stop = Stop()
        resume = run.exists()
        train("tiny", store, run, overrides=overrides, resume=resume, stop=stop, callbacks=[StopAt(step, stop)])
    return sorted(p.read_bytes() for p in (run / "checkpoints/last").glob("*.safetensors"))


def assert_resumable(store: Path, folder: Path, overrides: list[str], stops: tuple[int, ...]) -> None:
    whole = train_in_parts(store, folder / "a", overrides, ())
    assert train_in_parts(store, folder / "b", overrides, stops) == whole


def test_stopped_and_resumed_equals_uninterrupted(cohort_store: Path, tmp_path: Path) -> None:
    assert_resumable(cohort_store, tmp_path, [*SMALL, *ALL], (1, 3))


@pytest.fixture(scope="module")
def teacher(cohort_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("teacher") / "run"
    train("tiny", cohort_store, run, overrides=[*SMALL, "train.steps=2", "encoder.bidirectional=true"])
    return run


def test_a_causal_student_learns_from_a_bidirectional_teacher(
    teacher: Path, cohort_store: Path, tmp_path: Path
) -> None:
    """Also with two views, a change of speed, and an interruption; streaming is that of any causal model."""
    changes = [*SMALL, *ALL, f"loss.distillation.teacher={teacher}@last", "loss.distillation.delay=1"]
    assert_resumable(cohort_store, tmp_path, changes, (2,))
    run = Run(tmp_path / "a")
    assert all(r["losses"]["distillation"] > 0 for r in run.metrics() if r["split"] == "train")
    assert run.environment()["teacher"]["path"] == f"{teacher}@last"


def test_a_run_is_resumed_with_the_same_teacher_only(teacher: Path, cohort_store: Path, tmp_path: Path) -> None:
    own, stop = tmp_path / "teacher", Stop()
    shutil.copytree(teacher, own, symlinks=True)
    changes = [*SMALL, f"loss.distillation.teacher={own}"]
    train("tiny", cohort_store, tmp_path / "run", overrides=changes, stop=stop, callbacks=[StopAt(1, stop)])
    shutil.rmtree(own)
    train("tiny", cohort_store, own, overrides=[*SMALL, "train.steps=2", "train.seed=5"])
    with pytest.raises(UserError, match="was trained with another teacher"):
        train("tiny", cohort_store, tmp_path / "run", overrides=changes, resume=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("front_end.normalise=none", "and this recipe differ in front_end.normalise"),
        ("front_end.patch.bins=10", "and this recipe differ in front_end.patch"),
        ("loss.distillation.teacher=nowhere", "nowhere"),
    ],
)
def test_teachers_with_other_frames_are_refused(
    change: str, words: str, teacher: Path, cohort_store: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        train("tiny", cohort_store, tmp_path / "x", overrides=[*SMALL, f"loss.distillation.teacher={teacher}", change])
    assert not (tmp_path / "x" / "recipe.yaml").exists()


def test_fine_tuning_on_the_alignment_is_a_stage(cohort_store: Path, tmp_path: Path) -> None:
    stages = "stages=[{name: ctc, steps: 2, losses: {ctc: 1}}, {name: align, steps: 2, losses: {alignment: 1}}]"
    changes = [c for c in SMALL if not c.startswith("train.steps")]
    assert_resumable(cohort_store, tmp_path, [*changes, stages], (3,))
    rows = [r for r in Run(tmp_path / "a").metrics() if r["split"] == "train"]
    assert [set(r["losses"]) for r in rows] == [{"ctc"}, {"ctc"}, {"alignment"}, {"alignment"}]


PRETRAIN = [
    "reconstruction.enabled=true",
    "loss.ctc.weight=0",
    "augment.time_masks={n_masks: 4, max_bins: 30}",
]


def test_reconstruction_counts_masked_frames_only() -> None:
    predicted, target = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    masked = torch.tensor([[0.0, 1.0, 0.5, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0, 1.0]])
    n_frames = torch.tensor([5, 3])
    losses = reconstruction_loss(Reconstruction(predicted, target, masked), n_frames)
    for i, n in enumerate(n_frames):
        squares = [(part[i, :n].square().mean(-1) * masked[i, :n]).sum() for part in (predicted - target, target)]
        torch.testing.assert_close(losses[i], squares[0] / squares[1])
    zero = reconstruction_loss(Reconstruction(torch.zeros_like(target), target, masked), n_frames)
    torch.testing.assert_close(zero, torch.ones(2))
    unmasked = reconstruction_loss(Reconstruction(predicted, target, torch.zeros(2, 5)), n_frames)
    assert unmasked.tolist() == [0.0, 0.0]


def test_targets_are_the_smoothed_bins_of_each_patch_and_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    settings = ModelSettings(
        front_end=FrontEndSettings(patch=Patch(bins=6, stride=2)),
        encoder=GRUSettings(width=8, depth=1),
        reconstruction=ReconstructionSettings(enabled=True),
    )
    model = Model(ModelConfig(settings=settings, n_channels=3, sessions=("a",), classes=CLASSES)).eval()
    clean, n_bins, session = torch.randn(2, 40, 3), torch.tensor([40, 23]), torch.tensor([0, 0])
    bins = clean.clone()
    bins[:, 10:18] = 0.0

    def reconstruct(rows: slice, n: int) -> Reconstruction:
        inputs = ModelInputs(bins[rows, :n], n_bins[rows], session[rows], clean=clean[rows, :n])
        found = model.reconstruct(model.encode_frames(inputs), inputs)
        assert found is not None
        return found

    both, alone = reconstruct(slice(0, 2), 40), reconstruct(slice(1, 2), 23)
    n_frames = settings.front_end.patch.count_frames(23)
    for name in ("predicted", "target", "masked"):
        torch.testing.assert_close(getattr(both, name)[1, :n_frames], getattr(alone, name)[0])
    assert both.masked[0].tolist()[:8] == pytest.approx([0, 0, 0, 2 / 6, 4 / 6, 1, 1, 4 / 6])
    smoothed = smooth(torch.nn.functional.pad(clean[:1], (0, 0, 4, 4)), model.front_end.kernel)
    torch.testing.assert_close(both.target[0, 3], smoothed[0, 6:12].mean(0))


def test_pretraining_without_labels_starts_a_run(cohort_store: Path, tmp_path: Path) -> None:
    """Also interrupted; the run that starts from it has no reconstruction head and all other weights."""
    assert_resumable(cohort_store, tmp_path, [*SMALL, *PRETRAIN, "data.unlabelled=true"], (2,))
    rows = [r for r in Run(tmp_path / "a").metrics() if r["split"] == "train"]
    assert all(set(r["losses"]) == {"reconstruction"} for r in rows)
    constant = [*SMALL, "train.steps=1", "schedule={kind: constant, lr: 0.0}"]
    train("tiny", cohort_store, tmp_path / "c", overrides=constant, parent=f"{tmp_path / 'a'}@last")
    pretrained, tuned = (load_model(tmp_path / run / "checkpoints" / "last").state_dict() for run in ("a", "c"))
    assert pretrained.keys() - tuned.keys() == {"reconstruction.weight", "reconstruction.bias"}
    assert all(torch.equal(tensor, pretrained[name]) for name, tensor in tuned.items())


def test_unlabelled_trials_are_added_on_request(cohort_store: Path) -> None:
    """Also those of train and val, which are flagged for their missing label; not those with other flags."""
    store = Store.open(cohort_store)
    test, flagged, damaged = (replace(t, tokens=None, text=None) for t in store.trials[:3])
    flagged = replace(flagged, usable=False, flags=(NO_LABEL,))
    damaged = replace(damaged, usable=False, flags=(NO_LABEL, "not finite"))
    store.trials = (test, flagged, damaged, *store.trials[3:])
    without, added = (
        {t.id for t in select(store, DataConfig(unlabelled=unlabelled), Patch().count_frames).train}
        for unlabelled in (False, True)
    )
    hidden = {t.id for t in store.trials if t.tokens is None}
    assert not hidden & without
    assert added == without | hidden - {damaged.id}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["data.unlabelled=true"], "the ctc loss needs labels"),
        (["loss.ctc.weight=0", "reconstruction.enabled=true"], "there are no masks"),
    ],
)
def test_impossible_pretraining_is_refused(changes: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_recipe("tiny", changes)
