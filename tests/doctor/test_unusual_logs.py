"""Valid files with unusual contents: impossible error rates, old pickles, other number formats."""

import json
from pathlib import Path

import numpy as np
import pytest

from arcuate.doctor import Diagnosis, diagnose
from arcuate.errors import UserError
from support.doctor_logs import falling

PER, LOSS = falling(n=60), falling(6.5, 0.8, n=60)


def judged(path: Path, **columns: object) -> Diagnosis:
    """The verdict on columns, written as JSON lines with a step every hundred batches."""
    rows = zip(*columns.values(), strict=True)  # type: ignore[arg-type]
    lines = [
        json.dumps({"step": 100 * i} | dict(zip(columns, map(float, row), strict=True))) for i, row in enumerate(rows)
    ]
    path.write_text("\n".join(lines), "utf-8")
    return diagnose(path)


def test_failed_run_is_not_also_healthy(tmp_path: Path) -> None:
    train = np.append(LOSS[:30], np.full(30, np.nan))
    diagnosis = judged(tmp_path / "log", val_per=PER, train_loss=train)
    assert (diagnosis.primary, diagnosis.secondary) == ("exploded", ())
    norms = np.where(np.arange(60) == 20, np.inf, 2.0)
    diagnosis = judged(tmp_path / "log", val_per=PER, val_loss=LOSS, grad_norm=norms)
    assert (diagnosis.primary, diagnosis.secondary) == ("healthy", ())
    assert any("gradient norm is not finite" in sentence for sentence in diagnosis.evidence)


def test_last_error_rate_is_none_if_not_finite(tmp_path: Path) -> None:
    per = np.append(PER[:40], np.full(20, np.nan))
    diagnosis = judged(tmp_path / "log", val_per=per, val_loss=LOSS)
    assert (diagnosis.primary, diagnosis.last_per, diagnosis.best_step) == ("exploded", None, 3900)
    assert "unfinished" not in diagnosis.secondary


def test_impossible_error_rates_are_ignored_with_a_note(tmp_path: Path) -> None:
    per = PER.copy()
    per[[5, 30]] = -5, 1e305
    diagnosis = judged(tmp_path / "log", val_per=per, val_loss=LOSS)
    assert (diagnosis.primary, diagnosis.best_per) == ("healthy", PER.min())
    assert any("impossible values of the error rate" in note for note in diagnosis.notes)


def test_column_of_impossible_rates_is_ignored(tmp_path: Path) -> None:
    diagnosis = judged(tmp_path / "log", val_per=np.full(60, -5.0), val_loss=LOSS)
    assert diagnosis.best_per is None
    assert any("cannot be error rates" in note for note in diagnosis.notes)
    with pytest.raises(UserError, match="cannot be error rates"):
        judged(tmp_path / "log", val_per=np.full(60, 1e305))


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("val_per", 100 * PER), ("val_per", np.linspace(9.9, 9.4, 60)), ("val PER (%)", np.linspace(9.9, 9.4, 60)),
        ("val_per_pct", np.array([3.0, 2.0, 1.2])), ("val_per", PER), ("val_per", np.append(4.9, PER)),
    ],
)  # fmt: skip
def test_per_cent_and_fractions_are_distinguished(tmp_path: Path, name: str, rates: np.ndarray) -> None:
    diagnosis = judged(tmp_path / "log", **{name: rates})
    fraction = rates.min() < 1
    assert diagnosis.best_per == pytest.approx(rates.min() if fraction else rates.min() / 100)


def test_thousands_separators_are_not_decimal_commas(tmp_path: Path) -> None:
    rows = [f"{100 * i:,};{p:.3f}" for i, p in enumerate(PER)]
    (tmp_path / "log.csv").write_text("\n".join(["step;val_per", *rows]))
    assert diagnose(tmp_path / "log.csv").last_step == 5900


def test_steps_may_be_written_as_fractions(tmp_path: Path) -> None:
    texts = {
        "log.csv": "\n".join(["step,val_per", *(f"{100 * i}.0,{p}" for i, p in enumerate(PER))]),
        "log.jsonl": "\n".join(f'{{"step": "{100 * i}.0", "val_per": {p}}}' for i, p in enumerate(PER)),
        "log.json": json.dumps({f"{100 * i}.0": {"val_per": p} for i, p in enumerate(PER)}),
        "log.txt": "\n".join(f"step {100 * i}.0 val_per {p:.6f}" for i, p in enumerate(PER)),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        diagnosis = diagnose(tmp_path / name)
        assert (diagnosis.last_step, diagnosis.primary) == (5900, "healthy"), name


def test_evaluation_with_only_an_epoch_belongs_to_the_previous_batch(tmp_path: Path) -> None:
    lines = [
        f"Epoch 1, batch {100 * i}, loss={v:.4f}, lr: 1.0e-03\nEpoch 1, validation: loss={v:.4f}, per={p:.4f}"
        for i, (p, v) in enumerate(zip(PER, LOSS, strict=True))
    ]
    (tmp_path / "log").write_text("\n".join(lines))
    diagnosis = diagnose(tmp_path / "log")
    assert (diagnosis.primary, diagnosis.last_step, diagnosis.unit) == ("healthy", 5900, "batches")


def test_bracketed_position_is_a_counter(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(f"[{100 * i}/6000] PER {100 * p:.2f}%" for i, p in enumerate(PER)))
    assert diagnose(tmp_path / "log").last_step == 5900


def test_short_run_without_progress_is_reported(tmp_path: Path) -> None:
    rows = [json.dumps({"step": 10 * i, "train_loss": 3.4 - 0.001 * i}) for i in range(40)]
    rows += [json.dumps({"step": 100 * i, "val_per": 1.0}) for i in range(4)]
    (tmp_path / "log").write_text("\n".join(rows))
    diagnosis = diagnose(tmp_path / "log")
    assert (diagnosis.primary, diagnosis.secondary) == ("too_short", ("collapsed",))
    assert any("nothing has changed so far" in sentence for sentence in diagnosis.evidence)
    assert "rate" in diagnosis.causes[0].cause


def test_invalid_counter_is_not_carried_over(tmp_path: Path) -> None:
    lines = [
        f"Epoch 1, batch {i}, loss={v:.4f}\nEpoch 1, validation: per={p:.4f}"
        for i, (p, v) in enumerate(zip(PER, LOSS, strict=True))
    ]
    lines.insert(9, "Epoch 1.2.3, batch 7, loss=2.1")
    (tmp_path / "log").write_text("\n".join(lines))
    assert diagnose(tmp_path / "log").last_step == 59
