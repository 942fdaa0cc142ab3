"""CR-CTC, distillation, alignment loss, speed and channel dropout: their laws, and training with them."""

import shutil
from pathlib import Path

import pytest
import torch

from arcuate.data.alphabet import CLASSES
from arcuate.data.augmentation import augment, change_speed
from arcuate.data.config import AugmentationConfig, TimeMasks
from arcuate.errors import UserError
from arcuate.experiments.train import train
from arcuate.losses.combined import compute_losses, compute_view_losses, consistency_loss
from arcuate.losses.config import ConsistencySettings, CTCSettings, LossSettings
from arcuate.models.config import GRUSettings, ModelConfig, ModelSettings, TransducerSettings
from arcuate.models.interfaces import ModelInputs
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
        ("front_end.normalise=none", "has other front_end.normalise than this recipe"),
        ("front_end.patch.bins=10", "has other front_end.patch than this recipe"),
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
