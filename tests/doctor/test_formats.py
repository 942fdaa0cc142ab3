"""One log in many formats: verdict and values do not depend on the format."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from arcuate.doctor import Diagnosis, diagnose
from arcuate.doctor.columns import parse_name
from arcuate.doctor.formats import read_logs
from arcuate.errors import UserError
from support.dialects import DIALECTS
from support.doctor_logs import falling, log, write_jsonl

RUN = log(falling(), falling(6.5, 0.8), falling(7.0, 0.4))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_all_formats_give_the_same_curve(dialect: str, tmp_path: Path) -> None:
    path = tmp_path / "some file"
    DIALECTS[dialect](RUN, path)
    (found,) = read_logs(path).logs
    np.testing.assert_allclose(found.per.values, RUN.per.values, atol=1e-4)
    np.testing.assert_array_equal(found.per.steps, RUN.per.steps)
    assert diagnose(path).primary == "healthy"


@pytest.mark.parametrize(
    ("name", "role", "split"),
    [
        ("per", "per", ""), ("val/PER", "per", "val"), ("valPer", "per", "val"),
        ("eval_phoneme_error_rate", "per", "val"), ("gradients/w.values", "", ""),
        ("testCER", "per", "val"), ("PER_g", "per", ""), ("per_0", "per", ""), ("train_per", "per", "train"),
        ("time_per_batch", "", ""), ("samples_per_second", "", ""), ("per_ma", "", ""), ("best_per", "", ""),
        ("sample_per", "", ""), ("ctc_loss", "loss", ""), ("train_ctc_Loss", "loss", "train"), ("batch_size", "", ""),
        ("grad_norm_avg", "grad", ""), ("lr_session", "", ""), ("learning_rate", "lr", ""), ("epoch", "epoch", ""),
        ("trainer/global_step", "step", ""), ("_step", "step", ""), ("seed", "group", ""),
    ],
)  # fmt: skip
def test_column_names_are_parsed(name: str, role: str, split: str) -> None:
    assert parse_name(name)[:2] == (role, split)


OFFICIAL_25 = """2025-12-08 06:41:29,349: Using device: cuda:0
{}2025-12-08 11:33:20,796: Best avg val PER achieved: 0.01
2025-12-08 11:33:20,796: Total training time: 291.68 minutes
"""


def official_25(n: int = 11) -> str:
    per, loss = falling(1.2, 0.101, 6, n), falling(700, 17, 6, n)
    lines = []
    for i in range(n):
        step = min(2000 * i, 2000 * (n - 1) - 1)
        when = "2025-12-08 07:00:00,001: "
        lines += [
            f"{when}Train batch {step}: loss: {loss[i]:.2f} grad norm: {90 / (i + 1):.2f} time: 0.08\n",
            f"{when}Running test after training batch: {step}\n",
            f"{when}Val batch {step}: PER (avg): {per[i]:.4f} CTC Loss (avg): {loss[i]:.4f} time: 4.1\n",
            *(f"{when}t15.2023.08.{day:02d} val PER: 0.0010\n" for day in range(1, 31)),
        ]
    return OFFICIAL_25.format("".join(lines))


def test_output_of_the_b2t25_trainer(tmp_path: Path) -> None:
    (tmp_path / "training_log").write_text(official_25())
    diagnosis = diagnose(tmp_path / "training_log")
    assert (diagnosis.primary, diagnosis.dataset, diagnosis.planned_steps) == ("healthy", "b2t25", 20_000)
    assert (diagnosis.best_per, diagnosis.best_step) == (
        0.101,
        19_999,
    )  # not the lines of single sessions, nor `best so far`


def test_output_of_the_b2t24_trainer_in_its_folder(tmp_path: Path) -> None:
    lines = [f"batch {100 * i}, ctc loss: {6 * v:f}, cer: {v:f}, time/batch:   0.06" for i, v in enumerate(falling())]
    (tmp_path / "log.txt").write_text("warnings.warn(\n" + "\n".join(lines) + "\nbatch 99")
    diagnosis = diagnose(tmp_path)
    assert (diagnosis.primary, diagnosis.dataset, diagnosis.last_step) == ("healthy", "b2t24", 9900)


def test_running_means_in_brackets_are_ignored(tmp_path: Path) -> None:
    lines = [
        f"2025-12-03 20:25:59,157 [INFO] batch {100 * i:5d} | loss: {6 * v:7.4f} (train: {7 * v:7.4f}) | per: {v:7.4f}"
        f" (ma:  0.9081) | grad_norm: 2.1988 (max: 9.1988) | lr: 0.000002 | skipped: 0"
        for i, v in enumerate(falling())
    ]
    (tmp_path / "train.log").write_text("\n".join(lines))
    (found,) = read_logs(tmp_path / "train.log").logs
    np.testing.assert_allclose(found.per.values, np.round(falling(), 4), atol=1e-9)
    np.testing.assert_allclose(found.train_loss.values, np.round(7 * falling(), 4), atol=1e-9)
    assert set(found.grad_norm.values) == {2.1988}


def test_names_without_a_colon_keep_their_split(tmp_path: Path) -> None:
    lines = [
        f"| epoch {i:3d} | {100 * i:5d}/50000 batches | ms/batch 31.2 | loss {5 * v:5.3f} | valid loss {4 * v:5.3f}"
        f" | valid per {v:.4f}"
        for i, v in enumerate(falling(n=50))
    ]
    (tmp_path / "out").write_text("\n".join(lines))
    (found,) = read_logs(tmp_path / "out").logs
    np.testing.assert_allclose(found.per.values, falling(n=50), atol=1e-4)
    np.testing.assert_allclose(found.val_loss.values, 4 * falling(n=50), atol=1e-3)
    np.testing.assert_allclose(found.train_loss.values, 5 * falling(n=50), atol=1e-3)


def test_counter_restarting_every_epoch_is_one_run(tmp_path: Path) -> None:
    lines = []
    for epoch, v in enumerate(falling(n=20), start=1):
        lines += [f"[epoch {epoch:02d}] batch {b:06d} | B=8 | loss_ctc {5 * v:.4f} | T_max=1104" for b in (0, 50, 100)]
        lines += [
            "trial=3 | PER=0.000",
            f"[Epoch {epoch:02d} | EVAL] train_loss={4 * v:.4f}  PER_g={v:.3f}  lr=0.0001",
        ]
    (tmp_path / "out").write_text("\n".join(lines))
    (found,) = read_logs(tmp_path / "out").logs
    assert (len(found.per), found.per.unit) == (20, "epochs")
    assert found.train_loss.steps[-1] > 1900


def test_restarted_counter_is_a_second_run(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "metrics.jsonl", RUN)
    path.write_text(path.read_text() * 2)
    diagnosis = diagnose(path)
    assert (diagnosis.primary, [run.primary for run in diagnosis.runs]) == (
        "restarted",
        ["healthy", "healthy"],
    )
    assert "run 2 is identical to run 1" in " ".join(diagnosis.evidence)
    assert diagnosis.best_per == diagnosis.runs[0].best_per


def test_three_runs_with_only_their_first_step(tmp_path: Path) -> None:
    (tmp_path / "training_log").write_text("Train batch 0: loss: 755.1 grad norm: 292.7 time: 60.2\nTraceback\n" * 3)
    diagnosis = diagnose(tmp_path / "training_log")
    assert (diagnosis.primary, len(diagnosis.runs), diagnosis.secondary) == ("restarted", 3, ("too_short",))


def test_resumed_run_is_one_run(tmp_path: Path) -> None:
    rows = [{"step": int(s), "val_per": v} for s, v in zip(RUN.per.steps, RUN.per.values.tolist(), strict=True)]
    again = [*rows[:60], *rows[50:]]
    (tmp_path / "log").write_text("\n".join(map(json.dumps, again)))
    (found,) = read_logs(tmp_path / "log").logs
    np.testing.assert_array_equal(found.per.steps, RUN.per.steps)


def test_blocks_of_different_quantities_are_not_restarts(tmp_path: Path) -> None:
    rows = [
        json.dumps({"step": int(s), "split": split, "tag": tag, key: float(v)})
        for split, tag, key, values in (
            ("train", "train/loss", "loss", RUN.train_loss), ("train", "train/ctc_loss", "loss", RUN.train_loss),
            ("val", "eval/loss", "loss", RUN.val_loss), ("val", "eval/cer", "per", RUN.per),
        )
        for s, v in zip(values.steps, values.values, strict=True)
    ]  # fmt: skip
    (tmp_path / "log").write_text("\n".join(rows))
    assert diagnose(tmp_path / "log").primary == "healthy"
    untagged = [{k: v for k, v in json.loads(row).items() if k != "tag"} for row in rows]
    (tmp_path / "log").write_text("\n".join(map(json.dumps, untagged)))
    assert diagnose(tmp_path / "log").primary == "healthy"


def test_seeds_in_one_table_are_runs_and_empty_ones_are_omitted(tmp_path: Path) -> None:
    lines = ["seed,epoch,train_loss,val_loss,val_per", *(f"0,{e},,," for e in range(30))]
    for seed in (1, 2):
        lines += [f"{seed},{e},,{3 * v},{v}" for e, v in enumerate(falling(0.7, 0.205, n=70))]
    (tmp_path / "seeds.csv").write_text("\n".join(lines))
    diagnosis = diagnose(tmp_path / "seeds.csv")
    assert [run.primary for run in diagnosis.runs] == ["healthy", "healthy"]
    assert diagnosis.unit == "epochs"


def test_separate_training_and_validation_tables(tmp_path: Path) -> None:
    (tmp_path / "training_metrics.csv").write_text(
        "batch,train_loss\n" + "\n".join(f"{100 * i},{v}" for i, v in enumerate(RUN.train_loss.values))
    )
    (tmp_path / "validation_metrics.csv").write_text(
        "batch,val_loss,val_per\n" + "\n".join(f"{100 * i},{4 * v},{v}" for i, v in enumerate(RUN.per.values))
    )
    for path in (tmp_path, tmp_path / "training_metrics.csv", tmp_path / "validation_metrics.csv"):
        (found,) = read_logs(path).logs
        assert len(found.per) == len(found.train_loss) == 100


def test_closing_evaluation_of_the_best_checkpoint_is_not_the_end_of_training(tmp_path: Path) -> None:
    """As in a callback that validates the best checkpoint again after the last step."""
    rates, losses = np.r_[0.93, np.ones(19)], falling(9.5, 2.2, n=20)
    rows = [
        {"step": 30 * i + 29, "val_cer": r, "val_loss": v} for i, (r, v) in enumerate(zip(rates, losses, strict=True))
    ]
    closing = {"step": 600, "val_cer": rates[0], "val_loss": losses[0]}
    (tmp_path / "log").write_text("\n".join(map(json.dumps, [*rows, closing])))
    diagnosis = diagnose(tmp_path / "log")
    assert (diagnosis.primary, diagnosis.last_step, diagnosis.last_per) == ("collapsed", 599, 1.0)
    assert any("repeats an earlier one" in note for note in diagnosis.notes)


def test_placeholder_zeros_are_not_evaluations(tmp_path: Path) -> None:
    per = [float(v) if i % 10 == 0 else 0 for i, v in enumerate(falling(n=1000))]
    tree = {
        "metrics": {
            "batch": list(range(1000)),
            "val_per": per,
            "train_loss": falling(7, 0.4, n=1000).tolist(),
        }
    }
    (tmp_path / "all.json").write_text(json.dumps(tree, indent=1))
    (found,) = read_logs(tmp_path / "all.json").logs
    assert len(found.per) == 100


def test_pickles_are_read_but_not_executed(tmp_path: Path) -> None:
    stats = tmp_path / "trainingStats"
    stats.write_bytes(pickle.dumps({"testLoss": 5 * falling(), "testCER": falling()}))
    for path in (stats, tmp_path):
        diagnosis = diagnose(path)
        assert (diagnosis.primary, diagnosis.last_step, diagnosis.unit) == ("healthy", 9900, "batches")
    hostile = b"cos\nsystem\n(S'touch " + bytes(tmp_path / "ran") + b"'\ntR."
    for content in (b"\x80\x04" + hostile, hostile):
        stats.write_bytes(content)
        with pytest.raises(UserError):
            diagnose(stats)
    assert not (tmp_path / "ran").exists()


def test_wrong_guess_of_a_format_falls_back_to_the_next(tmp_path: Path) -> None:
    """A first line that looks like the header of a table, above printed lines with as many commas."""
    lines = [f"batch {100 * i}, ctc loss: {6 * v:f}, cer: {v:f}, time/batch:   0.06" for i, v in enumerate(falling())]
    (tmp_path / "log").write_text("\n".join(["batchnum,loss,cer,time", *lines]))
    diagnosis = diagnose(tmp_path / "log")
    assert (diagnosis.primary, diagnosis.last_step, diagnosis.best_per) == ("healthy", 9900, 0.21)


def test_damaged_event_file_is_read_up_to_the_damage(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1.host"
    DIALECTS["events"](RUN, path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content[:-7])
    reading = read_logs(path)
    assert len(reading.logs[0].train_loss) == 100
    assert any("event file" in note for note in reading.notes)


def test_event_file_written_by_tensorboard(tmp_path: Path) -> None:
    writer_module = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    writer = writer_module.EventFileWriter(str(tmp_path))
    for step, value in zip(RUN.per.steps, RUN.per.values, strict=True):
        writer.add_event(
            Event(step=int(step), summary=Summary(value=[Summary.Value(tag="eval/cer", simple_value=value)]))
        )
    writer.close()
    (found,) = read_logs(tmp_path).logs
    np.testing.assert_allclose(found.per.values, RUN.per.values, atol=1e-6)


def test_dataset_and_planned_steps_affect_the_verdict(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "log", log(falling(end=0.2, speed=30)))
    assert diagnose(path, dataset="b2t24").primary == "healthy"
    assert diagnose(path, dataset="b2t25").primary == "plateaued"
    steep = write_jsonl(tmp_path / "steep", log(falling(end=0.215, speed=4)))
    assert diagnose(steep, planned_steps=10_000).primary == "healthy"
    assert diagnose(steep, planned_steps=50_000).primary == "unfinished"
    with pytest.raises(UserError, match="b2t24 or b2t25"):
        diagnose(path, dataset="t15")


def test_inferences_are_reported(tmp_path: Path) -> None:
    diagnosis: Diagnosis = diagnose(write_jsonl(tmp_path / "log", RUN))
    assert diagnosis.dataset is None
    assert any(s.startswith("data set unknown") and "compared with b2t24" in s for s in diagnosis.inferences)
    assert any(s.startswith("planned steps 10,000") for s in diagnosis.inferences)
    stated = diagnose(tmp_path / "log", dataset="b2t24")
    assert any("the official b2t24 model" in s for s in stated.evidence)
