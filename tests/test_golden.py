"""Files written before the restructuring stay readable and give the same numbers.

Everything goes through the command line, so that renamed modules do not break this test. `golden/README.md` lists the
files and the commands that wrote them.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from support import command

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text("utf-8"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the golden files. Links between checkpoints are kept."""
    return shutil.copytree(GOLDEN, tmp_path / "golden", symlinks=True)


def arcuate(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a command in the folder with `--json` and return its output."""
    done = command.arcuate(*arguments, "--json", cwd=folder, environment={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def last_rows(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last train row and the last validation row of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    train, val = ([row for row in rows if row["split"] == split][-1] for split in ("train", "val"))
    return train, val


def sorted_weights(run: Path) -> np.ndarray:
    """All weights of the last checkpoint in ascending order.

    Independent of tensor names. If two models are close tensor by tensor, their sorted weights are at least as close.
    """
    tensors = load_file(run / "checkpoints" / "last" / "model.safetensors")
    return np.sort(np.concatenate([tensor.astype(np.float64).ravel() for tensor in tensors.values()]))


def check_resume(folder: Path, run: str, reference: Path) -> None:
    """Resume a run. Its end must match the reference run, which the old code trained to the end."""
    expected = EXPECTED["resume"][run]
    result = arcuate(folder, "train", f"{run}/recipe.yaml", "--data", "store", "--run", run, "--resume")
    assert result["steps"] == expected["steps"]
    assert result["best_step"] == expected["best_step"]
    assert result["best_per"] == pytest.approx(expected["best_per"], abs=1e-6)

    train, val = last_rows(folder / run)
    assert train["step"] == val["step"] == expected["steps"]
    assert train["loss"] == pytest.approx(expected["train_loss"], rel=1e-4)
    assert val["loss"] == pytest.approx(expected["val_loss"], rel=1e-4)
    np.testing.assert_allclose(sorted_weights(folder / run), sorted_weights(reference), rtol=0, atol=5e-5)


@pytest.mark.parametrize("run", EXPECTED["evaluate"])
def test_evaluate(folder, run):
    expected = EXPECTED["evaluate"][run]
    data = ["--data", "store"] if run == "model" else []  # a run knows its store, a model folder does not
    result = arcuate(folder, "evaluate", run, "--split", "val", *data)
    assert result["per"] == pytest.approx(expected["per"], abs=1e-6)
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert (result["n_scored"], result["n_tokens"]) == (expected["n_scored"], expected["n_tokens"])
    if run == "run-ssm":  # several stages: the loss of the checkpoint's own stage, as logged by its validation
        _, logged = last_rows(folder / run)
        assert result["loss"] == pytest.approx(logged["loss"], rel=1e-4)


def test_resume_after_sigterm(folder):
    check_resume(folder, "run-interrupted", GOLDEN / "run")


def test_resume_in_the_last_stage(folder):
    """Without its last checkpoint, the SSM run looks like one that was killed when the last stage began."""
    checkpoints = folder / "run-ssm" / "checkpoints"
    shutil.rmtree(checkpoints / "step-00000330")
    (checkpoints / "stage-denoise").unlink()
    for link in ("last", "best"):
        (checkpoints / link).unlink()
        (checkpoints / link).symlink_to("step-00000320")
    check_resume(folder, "run-ssm", GOLDEN / "run-ssm")


def test_report(folder):
    page = (folder / arcuate(folder, "report", "run-ssm")["report"]).read_text("utf-8")
    assert "</html>" in page and "run-ssm" in page


def test_doctor(folder):
    expected = EXPECTED["doctor"]["run-stopped"]
    result = arcuate(folder, "doctor", "run-stopped")
    assert result["primary"] == expected["primary"]
    assert (result["best_step"], result["last_step"]) == (expected["best_step"], expected["last_step"])
    assert result["best_per"] == pytest.approx(expected["best_per"], abs=1e-6)
    assert any("step 160" in line for line in result["evidence"])  # the stop in incidents.jsonl


def test_language_model(folder):
    info = arcuate(folder, "lm", "info", "words.alm")
    assert {key: info[key] for key in EXPECTED["lm_info"]} == EXPECTED["lm_info"]
    scored = arcuate(folder, "lm", "score", "words.alm", "heldout.txt")
    assert {key: scored[key] for key in EXPECTED["lm_score"]} == pytest.approx(EXPECTED["lm_score"], rel=1e-6)


def test_decode(folder):
    """Stored frame scores, model and tuned weights give the same words."""
    result = arcuate(
        folder, "decode", "scores.npz", "--lm", "words.alm", "--config", "weights.yaml",
        "--references", "run/results/val.jsonl", "--out", "words.jsonl",
    )  # fmt: skip
    expected = EXPECTED["decode"]
    assert result["wer"] == pytest.approx(expected["wer"], abs=1e-6)
    assert result["n_words"] == expected["n_words"]
    rows = [json.loads(line) for line in (folder / "words.jsonl").read_text("utf-8").splitlines()]
    assert {row["id"]: row["text"] for row in rows} == expected["texts"]


def test_exported_model() -> None:
    from arcuate.data.store import Store
    from arcuate.runtime import Decoder

    decoder, store = Decoder.load(GOLDEN / "model.arcx"), Store.open(GOLDEN / "store")
    trials = {info.id: info for info in store.trials}
    for expected in json.loads((GOLDEN / "export.json").read_text("utf-8")):
        info = trials[expected["id"]]
        decoder.reset(info.session, store.block_statistics(info))
        decoder.push(store.read_bins(info))
        frames, best = decoder.sentence_log_probs(), decoder.finish()
        assert (best.text or "", list(best.tokens)) == (expected["text"], expected["tokens"])
        assert best.total == pytest.approx(expected["total"], abs=0.02)
        assert float(frames.max(axis=1).mean()) == pytest.approx(expected["mean_log_prob"], abs=1e-4)
