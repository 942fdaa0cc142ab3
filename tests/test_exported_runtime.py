"""Laws of exported models: the same text as `StreamingDecoder`, for any chunking, and after a saved state."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arcuate.data.statistics import Statistics
from arcuate.errors import UserError
from arcuate.exported.file import open_archive
from arcuate.models.config import TransducerSettings
from arcuate.runtime import Decoder, SearchOptions
from support.cases import cases
from support.encoders import make_batch, models
from support.exports import ABSENT, export_model, repack, without
from support.live_parts import bins, decoder_of, small_model, small_search

NEAR_TIE = 1e-3  # nats
SEARCH = small_search()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@given(
    model=models(bidirectional=st.just(False)),
    n=st.integers(1, 90),
    cuts=st.lists(st.integers(0, 90), max_size=6),
    knows_statistics=st.booleans(),
    one_session=st.booleans(),
)
def test_an_export_decodes_as_the_run_does(folder, model, n, cuts, knows_statistics, one_session) -> None:
    trial, _, session, past = make_batch([n], seed=n)
    name, data = model.config.sessions[int(session)], trial[0].numpy()
    known = Statistics(past.mean[0].numpy(), past.sd[0].numpy(), int(past.n_bins[0])) if knows_statistics else None
    path = export_model(folder / "law.arcx", model, session=name if one_session else None)
    exported = Decoder.load(path, session=name, statistics=known, warm=False)
    original = decoder_of(model, SEARCH, name, known)
    assert exported.delay == original.delay

    edges = [0, *sorted(min(c, n) for c in cuts), n]
    whole = exported.stream(statistics=known)
    whole.push(data)
    for first, last in pairwise(edges):
        partial, expected = exported.push(data[first:last]), original.push(data[first:last])
        assert partial.n_frames == expected.n_frames
        exported.load_state(exported.save_state())  # an interruption changes nothing, below
    assert np.array_equal(exported.sentence_log_probs(), whole.sentence_log_probs())
    np.testing.assert_allclose(exported.sentence_log_probs(), original.sentence_log_probs(), rtol=0, atol=1e-4)
    final, uninterrupted, expected = exported.finish_nbest(3), whole.finish_nbest(3), original.finish_nbest(3)
    assert [(h.words, h.total, h.times) for h in final] == [(h.words, h.total, h.times) for h in uninterrupted]
    if final[0].words != expected[0].words:
        assert expected[0].total - expected[1].total < NEAR_TIE
    assert final[0].total == pytest.approx(expected[0].total, abs=1e-2)
    assert final[0].confidences == uninterrupted[0].confidences
    if final[0].words == expected[0].words:
        assert final[0].confidences == pytest.approx(expected[0].confidences, abs=1e-2)
        assert final[0].probability == pytest.approx(expected[0].probability, abs=1e-2)


@pytest.mark.parametrize("normalise", ["none", "block", "rolling"])
def test_running_statistics_of_several_sentences(tmp_path: Path, normalise: str) -> None:
    model = small_model(normalise=normalise)
    exported = Decoder.load(export_model(tmp_path / "m.arcx", model), warm=False)
    original = decoder_of(model, SEARCH)
    for seed in range(4):
        if seed == 2:  # another stream continues this one
            state, exported = exported.save_state(), exported.stream()
            exported.load_state(state)
        for decoder in (exported, original):
            decoder.push(bins(60, seed=seed))
        found, expected = exported.finish(), original.finish()
        assert found.words == expected.words and found.total == pytest.approx(expected.total, abs=1e-3)


@pytest.mark.parametrize("words", [True, False], ids=["words", "phonemes"])
@pytest.mark.parametrize("predictor", ["stateless", "lstm"])
def test_both_heads(tmp_path: Path, predictor: str, words: bool) -> None:
    model = small_model(transducer=TransducerSettings(enabled=True, predictor=predictor, width=10, depth=2))
    path = export_model(tmp_path / "m.arcx", model, words=words, head="both")
    exported = Decoder.load(path, warm=False)
    original = decoder_of(model, SEARCH if words else None, head="both")
    whole = exported.stream()
    for seed in range(cases(0.1)):
        data = bins(70, seed=seed)
        for k in range(0, 70, 11):
            partial, expected = exported.push(data[k : k + 11]), original.push(data[k : k + 11])
            assert partial.words == expected.words
            exported.load_state(exported.save_state())
        whole.push(data)
        finals = [decoder.finish_nbest(3) for decoder in (exported, whole, original)]
        assert finals[0] == finals[1]
        if finals[0][0].words != finals[2][0].words or finals[0][0].tokens != finals[2][0].tokens:
            assert finals[2][0].total - finals[2][1].total < NEAR_TIE
        assert finals[0][0].total == pytest.approx(finals[2][0].total, abs=1e-2)
        assert finals[0][0].scores == pytest.approx(finals[2][0].scores, abs=1e-2)
    ctc = Decoder.load(path, SearchOptions(head="ctc"), warm=False)
    assert ctc.push(data).n_frames == original.push(data).n_frames


def test_confidences_use_the_calibration_of_the_file(tmp_path: Path) -> None:
    path = export_model(tmp_path / "m.arcx", small_model())
    metadata = json.loads(open_archive(path).bytes("metadata.json"))
    calibration = metadata["decoding"]["confidence"]
    sure = calibration | {"word": {"intercept": 50.0, "weights": [0.0] * 10}}
    confidences = {}
    for name, stored in {"default": calibration, "sure": sure}.items():
        changed = metadata | {"decoding": metadata["decoding"] | {"confidence": stored}}
        forged = repack(path, tmp_path / f"{name}.arcx", {"metadata.json": json.dumps(changed).encode()})
        decoder = Decoder.load(forged, warm=False)
        decoder.push(bins(80))
        confidences[name] = decoder.finish().confidences
    assert min(confidences["sure"]) > 0.999 > max(confidences["default"])


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    decoder = Decoder.load(export_model(tmp_path / "m.arcx", small_model()), warm=False)
    with pytest.raises(UserError, match=r"shape \(t, 6\)"):
        decoder.push(np.zeros((3, 5)))
    with pytest.raises(UserError, match=r"'day9' is unknown .*day1, day2"):
        decoder.reset("day9")
    with pytest.raises(UserError, match="no exported model"):
        Decoder.load(tmp_path / "none.arcx")
    other = Decoder.load(export_model(tmp_path / "o.arcx", small_model(seed=1)), warm=False)
    with pytest.raises(UserError, match="another model"):
        other.load_state(decoder.save_state())
    with pytest.raises(UserError, match="damaged"):
        decoder.load_state(decoder.save_state()[:-1])


def test_the_runtime_needs_no_training_packages(tmp_path: Path) -> None:
    """`examples/embed.py` decodes, and another process continues the sentence of a saved state."""
    example = Path(__file__).parents[1] / "examples" / "embed.py"
    path, data = export_model(tmp_path / "m.arcx", small_model()), bins(80)
    np.save(tmp_path / "recording.npy", data)
    decoder = Decoder.load(path)
    decoder.push(data[:37])
    (tmp_path / "state").write_bytes(decoder.save_state())
    code = without(*ABSENT, "onnx") + (
        "import numpy as np, runpy\n"
        "from arcuate.runtime import Decoder\n"
        f"sys.argv = ['embed.py', {str(path)!r}, {str(tmp_path / 'recording.npy')!r}]\n"
        f"runpy.run_path({str(example)!r}, run_name='__main__')\n"
        f"decoder = Decoder.load({str(path)!r})\n"
        f"decoder.load_state(open({str(tmp_path / 'state')!r}, 'rb').read())\n"
        "decoder.push(np.load(sys.argv[2])[37:])\n"
        "print(decoder.finish().text)\n"
        "assert sys.modules['torch'] is None\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    decoder.push(data[37:])
    assert done.stdout.splitlines()[-2:] == [decoder.finish().text] * 2


def test_commands_in_an_installation_of_the_runtime_alone_are_one_sentence() -> None:
    code = (
        without(*ABSENT)
        + "import runpy\nsys.argv = ['arcuate', 'doctor']\nrunpy.run_module('arcuate', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "pip install arcuate" in done.stderr
