"""Transducer head: stepwise against parallel prediction, its loss beside CTC, and training with both."""

from pathlib import Path

import pytest
import torch

from arcuate.data.alphabet import CLASSES
from arcuate.decoding.decoder import Decoder
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.joint import JointSearch, joint_search
from arcuate.decoding.options import SearchOptions
from arcuate.errors import UserError
from arcuate.evaluation.decode import decode
from arcuate.evaluation.evaluate import evaluate
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.train import train
from arcuate.files import read_jsonl
from arcuate.losses import rnnt_loss
from arcuate.losses.combined import compute_losses, weighted_loss
from arcuate.losses.config import CTCSettings, LossSettings, RNNTSettings
from arcuate.models.acoustic import TorchModel
from arcuate.models.config import (
    FrontEndSettings,
    GRUSettings,
    ModelConfig,
    ModelSettings,
    Patch,
    TransducerSettings,
)
from arcuate.models.io import load_model, save_model
from arcuate.models.model import Model, parameter_groups
from arcuate.models.transducer import ArrayHead, LSTMPredictor, Transducer
from arcuate.run import Run, find_checkpoint, open_run

EMPTY_HYPOTHESIS = Hypothesis(())
KINDS = [
    TransducerSettings(enabled=True, width=6),
    TransducerSettings(enabled=True, width=6, predictor="lstm", depth=2),
]
kinds = pytest.mark.parametrize("settings", KINDS, ids=["two tokens", "lstm"])


def make_model(settings: TransducerSettings) -> Model:
    torch.manual_seed(0)
    front_end = FrontEndSettings(patch=Patch(bins=2, stride=2))
    model = ModelSettings(front_end=front_end, encoder=GRUSettings(width=5, depth=1, dropout=0.0), transducer=settings)
    return Model(ModelConfig(settings=model, n_channels=3, sessions=("a",), classes=CLASSES)).eval()


def make_batch() -> tuple:
    torch.manual_seed(1)
    tokens = torch.tensor([[5, 7, 7, 1], [40, 2, 0, 0]])
    return torch.randn(2, 12, 3), torch.tensor([12, 7]), torch.tensor([0, 0]), tokens, torch.tensor([4, 2])


@kinds
def test_stepwise_equals_parallel_prediction(settings):
    model, (*_, tokens, _) = make_model(settings), make_batch()
    head = model.transducer
    predicted, state = head.start(2)
    steps = [predicted]
    for column in tokens.T:
        predicted, state = head.step(state, column)
        steps.append(predicted)
    parallel = head.predictor_proj(head.predictor(tokens))
    torch.testing.assert_close(torch.stack(steps, 1), parallel, atol=1e-6, rtol=0)


@kinds
def test_losses_by_reduction(settings):
    model, (bins, n_bins, session, tokens, n_tokens) = make_model(settings), make_batch()
    outputs = model(bins, n_bins, session, None, tokens)
    joint = outputs.joint
    expected = rnnt_loss(joint.logits(joint.frames, joint.predicted), tokens, outputs.n_frames, n_tokens)
    got = {
        reduction: compute_losses(outputs, tokens, n_tokens, LossSettings(rnnt=RNNTSettings(reduction=reduction)))[
            "rnnt"
        ]
        for reduction in ("sum_per_trial", "mean_per_token", "half_mean_frames")
    }
    torch.testing.assert_close(got["sum_per_trial"], expected)
    torch.testing.assert_close(got["mean_per_token"], expected / n_tokens)
    torch.testing.assert_close(got["half_mean_frames"], expected / (outputs.n_frames.float().mean() / 2))
    loss = LossSettings(ctc=CTCSettings(weight=0.3), rnnt=RNNTSettings(weight=2.0))
    by_head = compute_losses(outputs, tokens, n_tokens, loss)
    torch.testing.assert_close(weighted_loss(by_head, loss), 0.3 * by_head["ctc"] + 2.0 * by_head["rnnt"])


@kinds
def test_saved_and_loaded(settings, tmp_path):
    model, (bins, n_bins, session, tokens, _) = make_model(settings), make_batch()
    save_model(tmp_path, model)
    loaded = load_model(tmp_path)
    assert torch.equal(
        model(bins, n_bins, session, None, tokens).joint.predicted,
        loaded(bins, n_bins, session, None, tokens).joint.predicted,
    )
    assert sum(len(g) for g in parameter_groups(loaded).values()) == len(list(loaded.parameters()))


def test_documented_search_of_one_trial() -> None:
    """Outputs of one trial are valid inputs of a search: no padding, no gradients."""
    model = make_model(KINDS[1])
    decoder = Decoder(TorchModel(model))
    frames = decoder.frames(torch.randn(30, model.config.n_channels).numpy(), decoder.sessions[0])
    best = JointSearch(decoder.model.transducer).search(frames)[0]
    assert best.scores.keys() == {"transducer", "ctc"}


def test_training_with_both_heads(cohort_store: Path, tmp_path: Path, monkeypatch):
    changes = [
        "encoder.width=16",
        "transducer={enabled: true, width: 16, predictor: lstm}",
        "loss.ctc.weight=0.3",
        "train.steps=6",
        "train.log_every=2",
        "train.validate_every=6",
    ]
    assert train("tiny", cohort_store, tmp_path / "run", overrides=changes).steps == 6
    rows = read_jsonl(Run(tmp_path / "run").metrics_file)
    for row in rows:
        assert row["loss"] == pytest.approx(0.3 * row["losses"]["ctc"] + row["losses"]["rnnt"], rel=1e-4)
    losses = [r["losses"]["rnnt"] for r in rows if r["split"] == "train"]
    assert losses[-1] < losses[0]
    moved: list[Transducer] = []

    def search_with(head: ArrayHead, transducer: Transducer) -> None:
        """Every step of a search would wait for a GPU several times."""
        assert transducer in moved
        head.transducer = transducer

    monkeypatch.setattr(Transducer, "cpu", lambda transducer: moved.append(transducer) or transducer)
    monkeypatch.setattr(ArrayHead, "__init__", search_with)
    for head in ("ctc", "transducer", "both"):
        summary = evaluate(tmp_path / "run", label=head, head=head).to_dict()
        assert summary["head"] == head and summary["n_scored"] == summary["n_trials"] > 0
    model = load_model(find_checkpoint(tmp_path / "run", "best"))
    assert joint_search(TorchModel(model).transducer, "both").start() is not None
    assert len(moved) == 3


def test_requested_search_and_beam_are_used(cohort_store: Path, tmp_path: Path, monkeypatch):
    few = ["encoder.width=8", "transducer={enabled: true, width: 8}", "train.steps=1", "train.log_every=1"]
    train("tiny", cohort_store, tmp_path / "run", overrides=few)
    run, used = open_run(tmp_path / "run"), set()

    def note(*made):
        used.add(made)
        return [EMPTY_HYPOTHESIS]

    monkeypatch.setattr(JointSearch, "search", lambda s, trial: note(s.width, s.weights.ctc))
    for options, made, expected in (
        ({"head": "transducer"}, (8, 0.0), {"search": "beam", "beam": 8}),
        ({"head": "transducer", "beam": 3}, (3, 0.0), {"search": "beam", "beam": 3}),
        ({"head": "transducer", "beam": 1}, (1, 0.0), {"search": "greedy"}),
        (
            {"head": "both", "beam": 5},
            (5, 0.3),
            {"search": "beam", "beam": 5},
        ),
    ):
        used.clear()
        summary = evaluate(run, **options).to_dict()
        assert used == {made} and expected.items() <= summary.items()
        assert "per_greedy" not in summary and ("beam" in summary) == ("beam" in expected)


def test_missing_transducer_head(cohort_store: Path, tmp_path: Path):
    few = ["encoder.width=8", "train.steps=1", "train.log_every=1"]
    train("tiny", cohort_store, tmp_path / "run", overrides=few)
    run = open_run(tmp_path / "run")
    for head, words in (("transducer", "has no transducer"), ("rnnt", "choose ctc, transducer, both")):
        with pytest.raises(UserError, match=words):
            evaluate(run, head=head)
    with pytest.raises(UserError, match="has no transducer"):  # reported before the store is opened
        decode(run, SearchOptions(head="both"), data=tmp_path / "none")


def test_at_least_one_loss_needs_weight():
    with pytest.raises(UserError, match="nothing would be learnt"):
        load_recipe("tiny", ["loss.ctc.weight=0"])
    with pytest.raises(UserError, match="nothing would be learnt"):
        load_recipe("tiny", ["loss.ctc.weight=0", "transducer.enabled=true", "loss.rnnt.weight=0"])
    assert load_recipe("tiny", ["loss.ctc.weight=0", "transducer.enabled=true"]).loss.rnnt.weight == 1


def test_dropout_of_the_lstm_on_a_gpu_is_drawn_by_torch() -> None:
    """cuDNN's own dropout has a state that `torch.manual_seed` does not reset: a resumed run would differ."""
    settings = TransducerSettings(enabled=True, predictor="lstm", width=6, depth=3, dropout=0.5)
    predictor, x = LSTMPredictor(settings, 7), torch.randn(2, 5, 6)
    predictor.eval()
    torch.testing.assert_close(predictor._forward_by_layer(x), predictor.lstm(x)[0])
    predictor.train()
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(predictor._forward_by_layer(x))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_lstm_on_a_gpu_is_called_for_training_if_gradients_are_needed(monkeypatch) -> None:
    """cuDNN: "RNN backward can only be called in training mode", the mode of the call to the kernel."""
    settings = TransducerSettings(enabled=True, predictor="lstm", width=6, depth=2, dropout=0.5)
    predictor, is_train, kernel = LSTMPredictor(settings, 7), [], torch.lstm

    def record(*args):
        is_train.append(args[6])
        return kernel(*args)

    monkeypatch.setattr(torch, "lstm", record)
    predictor._forward_by_layer(torch.randn(2, 5, 6)).sum().backward()
    assert is_train == [True, True]
