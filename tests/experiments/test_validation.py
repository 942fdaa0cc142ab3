"""Validation during training: WER, epochs, selection by WER, and the predictions kept in the run folder."""

from pathlib import Path
from typing import Any

import pytest

from arcuate.data.store import Store
from arcuate.decoding.options import SearchOptions
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.train import train
from arcuate.files import append_jsonl, read_jsonl
from arcuate.run import Run
from arcuate.training.callbacks import Callback, Stop
from arcuate.training.checkpoint import Best
from support.training import make_state

GOLDEN = Path(__file__).parents[1] / "golden"
SMALL = [
    *("encoder.width=8", "encoder.depth=1", "data.batching.batch_size=4", "front_end.patch={bins: 8, stride: 8}"),
    *("train.steps=6", "train.log_every=2", "train.validate_every=2", "train.checkpoint_every=3"),
]
WORDS = [f"validate.lm={GOLDEN / 'words.alm'}"]


@pytest.fixture(scope="module")
def uninterrupted(cohort_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = tmp_path_factory.mktemp("validation") / "run"
    return train("tiny", cohort_store, run, overrides=[*SMALL, *WORDS, "train.select_by=wer"]).run


def validations(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.metrics() if row["split"] == "val"]


def test_validation_rows_have_the_wer_and_the_epoch(uninterrupted: Run, cohort_store: Path) -> None:
    rows = validations(uninterrupted)
    assert [row["step"] for row in rows] == [2, 4, 6]
    for row in rows:
        assert row["wer"] == pytest.approx(row["word_errors"] / row["n_words"])
    n_trials = sum(t.split == "train" and t.usable for t in Store.open(cohort_store).trials)
    per_epoch = -(-n_trials // 4)
    assert [row["epoch"] for row in rows] == [pytest.approx(step / per_epoch, abs=1e-4) for step in (2, 4, 6)]
    assert all("epoch" in row for row in uninterrupted.metrics())


def test_checkpoint_is_selected_by_wer(uninterrupted: Run) -> None:
    best = min(validations(uninterrupted), key=lambda row: (row["wer"], row["per"], row["step"]))
    assert (uninterrupted.checkpoints / "best").resolve().name == f"step-{best['step']:08d}"


def test_predictions_are_kept_and_bounded(uninterrupted: Run) -> None:
    rows = read_jsonl(uninterrupted.predictions_file)
    assert [row["step"] for row in rows] == [2] * 8 + [4] * 8 + [6] * 8
    assert [row["trial"] for row in rows[:8]] == [row["trial"] for row in rows[8:16]]
    assert {"trial", "text", "reference", "hypothesis", "decoded_text"} < rows[0].keys()
    assert rows[0]["text"] and len(rows[0]["reference"].split()) > 3


class _StopAt(Callback):
    def __init__(self, step: int, stop: Stop) -> None:
        self.step, self.stop = step, stop

    def on_step(self, step: int) -> None:
        if step == self.step:
            self.stop.request()


@pytest.mark.parametrize("step", [2, 3])  # training ends one step later
def test_resumed_run_has_the_same_rows(uninterrupted: Run, cohort_store: Path, tmp_path: Path, step: int) -> None:
    run, stop = tmp_path / "run", Stop()
    settings = [*SMALL, *WORDS, "train.select_by=wer"]
    assert train("tiny", cohort_store, run, overrides=settings, stop=stop, callbacks=[_StopAt(step, stop)]).interrupted
    # Rows after the checkpoint, as a killed process leaves them.
    append_jsonl(Run(run).predictions_file, {"step": 99, "trial": "of a killed process"})
    resumed = train("tiny", cohort_store, run, overrides=settings, resume=True)
    assert resumed.run.predictions_file.read_bytes() == uninterrupted.predictions_file.read_bytes()
    rows, expected = (
        [{key: value for key, value in row.items() if key != "cost"} for row in found.metrics()]
        for found in (resumed.run, uninterrupted)
    )
    assert rows == expected
    assert resumed.best_wer == min(row["wer"] for row in validations(uninterrupted))


@pytest.mark.parametrize(
    ("by", "new", "improves"),
    [
        ("per", Best(2, per=0.2, loss=9.0, wer=0.9), True),
        ("per", Best(2, per=0.3, loss=0.9, wer=0.9), True),  # a tie is decided by the loss
        ("per", Best(2, per=0.4, loss=0.1, wer=0.1), False),
        ("wer", Best(2, per=0.4, loss=9.0, wer=0.4), True),
        ("wer", Best(2, per=0.2, loss=0.1, wer=0.6), False),
        ("wer", Best(2, per=0.2, loss=9.0, wer=0.5), True),  # a tie is decided by PER
        ("wer", Best(2, per=0.3, loss=0.1, wer=0.5), False),
    ],
)
def test_best_validation(by: Any, new: Best, improves: bool) -> None:
    best = Best(1, per=0.3, loss=1.0, wer=0.5)
    assert best.update(new, by) is improves
    assert best == (new if improves else Best(1, per=0.3, loss=1.0, wer=0.5))


def test_selection_by_wer_needs_words() -> None:
    with pytest.raises(UserError, match=r"validate\.lm=default"):
        load_recipe("tiny", ["train.select_by=wer"])


def test_missing_language_model_is_reported_before_anything_is_written(cohort_store: Path, tmp_path: Path) -> None:
    overrides = [*SMALL, "validate.lm=nowhere.alm"]
    with pytest.raises(UserError, match=r"nowhere\.alm"):
        train("tiny", cohort_store, tmp_path / "run", overrides=overrides)
    assert not (tmp_path / "run").exists()


def test_plateaus_and_patience_follow_the_selecting_rate(cohort_store: Path, tmp_path: Path) -> None:
    stages = "stages=[{name: all, steps: 6, train: [encoder, ctc], losses: {ctc: 1.0}, patience: 2}]"
    overrides = [*WORDS, "schedule={kind: plateau, peak_lr: 0.1, factor: 0.5, patience: 0}", stages]
    scales, bad = {}, {}
    for by in ("per", "wer"):
        recipe = load_recipe("tiny", [*SMALL, *overrides, f"train.select_by={by}"])
        state = make_state(Store.open(cohort_store), recipe, tmp_path / by)
        for per, wer in ((0.5, 0.9), (0.6, 0.8), (0.7, 0.7)):  # PER rises while WER falls
            assert state.record_validation(per, wer) is not None
        scales[by], bad[by] = state.progress.plateau.scale, state.progress.curriculum.n_bad
    assert scales == {"per": 0.25, "wer": 1.0}
    assert bad == {"per": 2, "wer": 0}


BOTH = ["transducer.enabled=true", "transducer.width=8"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("overrides", "heads"),
    [
        ([], ["ctc"] * 3),
        (BOTH, ["both"] * 3),
        (
            [
                *BOTH,
                "stages=[{name: a, steps: 2, train: [encoder, ctc], losses: {ctc: 1.0}},"
                " {name: b, steps: 2, train: [encoder, ctc, transducer], losses: {ctc: 1.0, rnnt: 1.0}},"
                " {name: c, steps: 2, train: [encoder, ctc], losses: {ctc: 1.0}}]",
            ],
            ["ctc", "both", "both"],
        ),
    ],
)
def test_words_are_decoded_by_both_heads_once_the_transducer_is_trained(
    overrides: list[str], heads: list[str], cohort_store: Path, tmp_path: Path
) -> None:
    run = train("tiny", cohort_store, tmp_path / "run", overrides=[*SMALL, *WORDS, *overrides]).run
    assert [row["wer_head"] for row in validations(run)] == heads


def test_validation_by_both_heads_agrees_with_decode(cohort_store: Path, tmp_path: Path) -> None:
    from arcuate.evaluation.decode import decode

    run = train("tiny", cohort_store, tmp_path / "run", overrides=[*SMALL, *WORDS, *BOTH, "train.steps=2"]).run
    decoded = decode(f"{run.path}@last", SearchOptions(lm=GOLDEN / "words.alm"))
    assert decoded.search.head == "both"
    texts = {sentence.id: sentence.text for sentence in decoded}
    for row in read_jsonl(run.predictions_file):
        assert row["decoded_text"] == texts[row["trial"]]
