"""FALCON H2: simulated files, the reader, and the official evaluator around the streaming decoder."""

from pathlib import Path

import numpy as np
import pytest

from arcuate.data.alphabet import CHARACTERS, token_names
from arcuate.data.prepare import prepare
from arcuate.data.simulation import simulate
from arcuate.errors import UserError
from arcuate.evaluation.evaluate import evaluate
from arcuate.experiments.train import train
from arcuate.live.falcon import choose_session, evaluate_falcon, falcon_text, make_falcon_decoder

pytest.importorskip("pynwb", reason="pynwb is not installed")


@pytest.fixture(scope="module")
def falcon_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All sessions of FALCON H2 with four trials each, and a model trained on them for a few steps."""
    folder = tmp_path_factory.mktemp("falcon")
    simulate(folder / "h2", layout="falcon-h2", n_sessions=26, n_trials=3, n_electrodes=4, difficulty="easy")
    prepare(folder / "h2", folder / "store", layout="falcon-h2")
    overrides = ["train.steps=3", "encoder.width=8", "encoder.depth=1", "train.validate_every=3"]
    train("tiny", folder / "store", folder / "run", overrides=overrides)
    return folder / "run"


def test_the_store_holds_characters(falcon_run: Path) -> None:
    from arcuate.data.store import Store

    store = Store.open(falcon_run.parent / "store")
    assert store.classes == CHARACTERS and store.layout == "falcon-h2" and len(store.sessions) == 26
    for trial in store.trials:
        assert trial.tokens is not None and trial.text is not None
        spelled = "".join(token_names(trial.tokens, CHARACTERS))
        assert spelled.replace(">", " ").replace("~", ".") == trial.text and ">" not in trial.text
    assert {t.split for t in store.trials} == {"train", "val", "test"}


def test_bins_are_those_of_the_evaluator(falcon_run: Path) -> None:
    """The official loader and the reader agree on bins and trial ends."""
    loaders = pytest.importorskip("falcon_challenge.dataloaders", reason="falcon_challenge is not installed")
    from falcon_challenge.config import FalconTask

    from arcuate.data.store import Store

    store = Store.open(falcon_run.parent / "store")
    file = next((falcon_run.parent / "h2").glob("*/sub-T5-held-in-calib/*20220518.nwb"))
    spikes, targets, ends, mask = loaders.load_nwb(file, FalconTask.h2)
    own = [t for t in store.trials if t.session == "t5.2022.05.18" and t.split == "train"]
    np.testing.assert_array_equal(np.concatenate([store.read_bins(t) for t in own]), spikes)
    assert np.cumsum([t.n_bins for t in own]).tolist() == (np.flatnonzero(ends) + 1).tolist() and mask.all()
    assert ["".join(map(chr, target)) for target in targets] == [
        t.text.replace(" ", ">").replace(".", "~") for t in own if t.text
    ]


def test_the_official_evaluator_accepts_the_decoder(falcon_run: Path) -> None:
    pytest.importorskip("falcon_challenge", reason="falcon_challenge is not installed")
    result = evaluate_falcon(falcon_run, falcon_run.parent / "h2")
    assert result.n_files == 21 and result.cer >= 0 and result.normalised_latency > 0
    # The same files by our own evaluation; block normalisation differs from the running one of a stream.
    assert evaluate(falcon_run, split="val").per == pytest.approx(result.cer, abs=0.2)


def test_the_decoder_returns_one_text_per_trial(falcon_run: Path) -> None:
    pytest.importorskip("falcon_challenge", reason="falcon_challenge is not installed")
    decoder = make_falcon_decoder(falcon_run)
    decoder.reset(["sub-T5-held-in-minival_ses-20220523.nwb"])
    assert decoder.decoder.session == "t5.2022.05.23"
    for _ in range(30):
        assert decoder.predict(np.ones((1, 4))).shape == (1, 28)
    first = decoder.on_done(np.array([True]))
    assert isinstance(first, str) and set(first) <= set(CHARACTERS[1:])


def test_sessions_by_file_name() -> None:
    known = ("t5.2022.05.18", "t5.2022.06.01")
    assert choose_session("T5_2022.06.01_held_in_eval", known) == known[1]
    assert choose_session("sub-T5-held-out-calib_ses-20220520", known) == known[0]
    assert choose_session("unknown", known) == known[1]


def test_texts_as_the_evaluator_compares_them() -> None:
    from arcuate.decoding.hypothesis import Hypothesis

    tokens = tuple(CHARACTERS.index(c) for c in "hi>you~")
    assert falcon_text(Hypothesis(tokens), CHARACTERS) == "hi>you~"
    assert falcon_text(Hypothesis((), words=("hi", "you")), CHARACTERS) == "hi>you"


def test_incomplete_downloads_are_reported(falcon_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="0 held-in minival files"):
        evaluate_falcon(falcon_run, tmp_path)
    with pytest.raises(UserError, match=r"no folder .*none"):
        evaluate_falcon(falcon_run, tmp_path / "none")
    with pytest.raises(UserError, match="minival or test"):
        evaluate_falcon(falcon_run, tmp_path, phase="final")
