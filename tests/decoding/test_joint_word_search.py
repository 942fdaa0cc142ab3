"""Joint word search: exact scores of both heads, and candidates from phoneme hypotheses."""

from pathlib import Path

import numpy as np
import pytest
import torch

from arcuate.decoding.config import DecodingConfig, read_decoding_config
from arcuate.decoding.joint import JointWordSearch, synthetic_frames
from arcuate.decoding.load import choose_head
from arcuate.decoding.options import SearchOptions
from arcuate.decoding.transducer import HeadWeights, rescore
from arcuate.decoding.word_search.search import build_word_search
from arcuate.errors import UserError
from arcuate.evaluation.decode import decode
from arcuate.evaluation.tune import tune
from arcuate.experiments.train import train
from arcuate.files import write_json
from arcuate.models.config import TransducerSettings
from arcuate.models.layout import Frames
from arcuate.models.transducer import Transducer
from support.word_search import BOUNDARY, frames

WEIGHTS = HeadWeights(ctc=0.5, transducer=1.5)


@pytest.fixture
def joint_search(lexicon, model) -> JointWordSearch:
    torch.manual_seed(1)
    head = Transducer(TransducerSettings(width=4), 5, 4).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter *= 2.0
    search = build_word_search(lexicon, model, DecodingConfig(beam=50, threshold=20.0))
    return JointWordSearch(search, head.for_search(), WEIGHTS)


def head_outputs(seed: int, n_frames: int = 10) -> Frames:
    torch.manual_seed(seed)
    return Frames(frames(seed, n_frames), torch.randn(n_frames, 5).numpy())


def test_pronunciations_have_a_silence_after_each_word(joint_search: JointWordSearch) -> None:
    assert joint_search.pronunciations(("one", "two")) == [(1, 3, 1, 2, 3), (1, 3, 2, 3)]
    assert joint_search.pronunciations(()) == [()]


@pytest.mark.parametrize("seed", range(4))
def test_every_candidate_has_the_scores_of_both_heads(joint_search: JointWordSearch, seed: int) -> None:
    trial = head_outputs(seed)
    joint_search = joint_search.with_settings(DecodingConfig(beam=50, threshold=20.0, ilm_weight=0.0))
    found = joint_search.search(trial, 8)
    totals = [h.total for h in found]
    assert found and totals == sorted(totals, reverse=True)
    assert len({h.words for h in found}) == len(found)
    settings = joint_search.word_search.settings
    for h in found:
        scored = rescore(joint_search.transducer, trial, joint_search.pronunciations(h.words), WEIGHTS)
        assert h.tokens == scored[0].tokens
        acoustic = (1.5 * scored[0].scores["transducer"] + 0.5 * scored[0].scores["ctc"]) / 2.0
        acoustic += settings.silence_bonus * len(h.words)
        assert h.scores["acoustic"] == pytest.approx(acoustic, abs=1e-4)
        assert h.total == pytest.approx(acoustic + settings.lm_weight * h.scores["lm"] + h.scores["bonus"], abs=1e-4)


@pytest.mark.parametrize("n_frames", [1, 2, 3])
def test_candidates_that_do_not_fit_the_frames_are_left_out(joint_search: JointWordSearch, n_frames: int) -> None:
    """They would have probability zero, and confidences would be NaN."""
    found = joint_search.search(head_outputs(0, n_frames), 8)
    assert found and all(np.isfinite(h.total or 0.0) for h in found)


def test_internal_language_model_is_subtracted(joint_search: JointWordSearch) -> None:
    """The estimate is the chain rule over tokens without acoustic input; its weight is relative to the transducer."""
    trial, head = head_outputs(2), joint_search.transducer.transducer
    weighted = joint_search.with_settings(DecodingConfig(beam=50, threshold=20.0, ilm_weight=0.4))
    for h in weighted.search(trial, 4):
        expected = 0.0
        for i, token in enumerate(h.tokens):
            predicted = head.predictor_proj(head.predictor(torch.tensor([h.tokens[:i]]).long().reshape(1, -1)))[0, -1]
            logits = head.output(torch.tanh(head.encoder_proj.bias + predicted))
            expected += logits[1:].log_softmax(-1)[token - 1].item()
        assert h.scores["ilm"] == pytest.approx(expected, abs=1e-4)
        heads = 1.5 * (h.scores["transducer"] - 0.4 * expected) + 0.5 * h.scores["ctc"]
        silences = weighted.settings.silence_bonus * len(h.words)
        assert h.scores["acoustic"] == pytest.approx(heads / 2.0 + silences, abs=1e-3)


def test_head_weights_decide_between_ctc_and_transducer(joint_search: JointWordSearch) -> None:
    """CTC favours one word, the transducer another; the larger weight decides."""
    trial = Frames(synthetic_frames((1, BOUNDARY), 4), torch.randn(4, 5).numpy())
    head = joint_search.transducer.transducer
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.predictor.embedding.weight[:, :] = torch.eye(4)
        head.predictor.linear.weight[:, :] = torch.cat([torch.zeros(4, 4), torch.eye(4)], dim=1)
        head.predictor_proj.weight[:, :] = 4 * torch.eye(4)
        head.output.weight[2, 0] = 9.0  # after nothing: b
        head.output.weight[3, 2] = 9.0  # after b: silence
        head.output.weight[0, 3] = 9.0  # after a silence: blanks
    plain = DecodingConfig(beam=50, lm_weight=0.0, ilm_weight=0.0)
    for ctc, expected in ((10.0, {"one", "won"}), (0.01, {"two"})):
        search = JointWordSearch(
            joint_search.word_search.with_settings(plain),
            joint_search.transducer,
            HeadWeights(ctc=ctc, transducer=1.0),
        )
        assert set(search.search(trial, 5)[0].words) <= expected


@pytest.fixture(scope="module")
def run(cohort_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("words") / "run"
    small = ["encoder.width=16", "transducer.enabled=true", "transducer.width=8", "train.steps=3"]
    train("tiny", cohort_store, path, overrides=[*small, "data.batching.batch_size=4"])
    return path


@pytest.mark.thorough
def test_weights_of_both_heads_are_tuned(run: Path, tmp_path: Path) -> None:
    """Ranking by other weights equals a search with them, as far as the candidates are the same."""
    weights = tmp_path / "weights.yaml"
    tuned = tune(run, weights, SearchOptions(head="both", beam=20), budget=1.0)
    assert tuned.record.n_evaluations and read_decoding_config(weights)[0] == tuned.settings
    words = decode(run, SearchOptions(head="both", config=weights))
    assert words.wer == tuned.wer and words.tuned_on_these


def test_candidates_can_be_ranked_by_other_weights(joint_search: JointWordSearch) -> None:
    trial, settings = head_outputs(3), joint_search.settings
    other = settings.model_copy(update={"word_bonus": 2.0, "ilm_weight": 0.3, "lm_weight": 0.1})
    scored = joint_search.scored_candidates(trial)
    assert joint_search.rank(scored)[:3] == joint_search.search(trial, 3)
    ranked = {h.words: h for h in joint_search.with_ranking(other).rank(scored)}
    same = [h for h in joint_search.with_settings(other).search(trial, 50) if h.words in ranked]
    assert len(same) > 2
    for h in same:
        assert ranked[h.words].total == pytest.approx(h.total, abs=1e-4)
        assert ranked[h.words].scores == pytest.approx(h.scores, abs=1e-4)


def test_the_default_head_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """Both heads if the transducer loss had a weight up to this checkpoint."""
    assert choose_head(tmp_path, True, None) == "ctc"  # an imported model has no training state
    for trained in ("ctc", "both"):
        write_json(tmp_path / "state.json", {"head": trained})
        assert choose_head(tmp_path, True, None) == trained
    assert choose_head(tmp_path, True, "ctc") == choose_head(tmp_path, False, None) == "ctc"
    with pytest.raises(UserError, match="has no transducer"):
        choose_head(tmp_path, False, "both")


def test_joint_search_needs_a_transducer(run: Path, tmp_path: Path) -> None:
    scores = tmp_path / "scores.npz"
    scores.write_bytes(b"")
    with pytest.raises(UserError, match="--head both cannot be applied"):
        decode(scores, SearchOptions(head="both"))
