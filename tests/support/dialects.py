"""Writers of one training log in other formats: exports of trackers and printed output of trainers."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from arcuate.doctor.log_table import TrainingLog

Row = dict[str, float]


def rows(log: TrainingLog) -> list[Row]:
    """One row per step with all quantities logged at it."""
    moments: dict[float, Row] = {}
    for name in ("per", "val_loss", "train_loss", "grad_norm", "lr"):
        series = getattr(log, name)
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            moments.setdefault(step, {"step": step})[name] = value
    return [moments[step] for step in sorted(moments)]


def held(log: TrainingLog) -> list[Row]:
    return [row for row in rows(log) if "per" in row or "val_loss" in row]


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def table_csv(log: TrainingLog, path: Path) -> None:
    names = {"step": "step", "train_loss": "train_loss", "val_loss": "valid_loss", "per": "val_PER"}
    lines = [",".join(names.values())]
    lines += [",".join(number(row.get(key)) for key in names) for row in rows(log)]
    path.write_text("\r\n".join(lines) + "\r\n", "utf-8")


def newest_first_tsv(log: TrainingLog, path: Path) -> None:
    lines = ["iteration\tval_loss\tval_cer"]
    lines += [f"{int(r['step'])}\t{number(r.get('val_loss'))}\t{number(r.get('per'))}" for r in reversed(held(log))]
    path.write_text("\n".join(lines), "utf-8")


def wandb_csv(log: TrainingLog, path: Path) -> None:
    run = "warm-sun-12"
    lines = [f'"Step","{run} - val/per","{run} - val/per__MIN","{run} - val/per__MAX","{run} - val/loss"']
    for r in held(log):
        per = number(r.get("per"))
        lines.append(f'"{int(r["step"])}","{per}","{per}","{per}","{number(r.get("val_loss"))}"')
    path.write_text("\n".join(lines), "utf-8")


def wandb_history(log: TrainingLog, path: Path) -> None:
    lines = []
    for i, r in enumerate(rows(log)):
        if "train_loss" in r:
            lines.append({"_step": 2 * i, "_runtime": i * 1.5, "global_step": r["step"], "train/loss": r["train_loss"]})
        found = {f"eval/{k}": r[n] for k, n in (("phoneme_error_rate", "per"), ("loss", "val_loss")) if n in r}
        if found:
            lines.append({"_step": 2 * i + 1, "_runtime": i * 1.5, **found, "global_step": r["step"]})
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")


def trainer_state(log: TrainingLog, path: Path) -> None:
    history = []
    for r in rows(log):
        step = {"step": r["step"], "epoch": r["step"] / 137}
        if "train_loss" in r:
            history.append({"loss": r["train_loss"], "learning_rate": r.get("lr"), **step})
        if "per" in r or "val_loss" in r:
            history.append({"eval_per": r.get("per"), "eval_loss": r.get("val_loss"), "eval_runtime": 3.1, **step})
    path.write_text(json.dumps({"best_metric": None, "log_history": history}, indent=2), "utf-8")


def json_columns(log: TrainingLog, path: Path) -> None:
    tree: dict[str, object] = {"model": "gru"}
    for split, names in (("val", {"per": "per", "loss": "val_loss"}), ("train", {"loss": "train_loss"})):
        series = {key: getattr(log, name) for key, name in names.items() if len(getattr(log, name))}
        for key, values in series.items():
            tree[f"{split}_{key}"] = {"step": values.steps.tolist(), f"{split}_{key}": values.values.tolist()}
    path.write_text(json.dumps(tree), "utf-8")


def utf16_jsonl(log: TrainingLog, path: Path) -> None:
    lines = []
    for r in rows(log):
        rest = {name: value for name, value in r.items() if name not in ("step", "per")}
        lines.append(json.dumps({"iter": r["step"], "val": {"per": r["per"]} if "per" in r else {}, **rest}))
    path.write_bytes(("\r\n".join(lines) + "\r\n").encode("utf-16"))


def percent_jsonl(log: TrainingLog, path: Path) -> None:
    lines = []
    for r in held(log):
        per = 100 * r["per"] if "per" in r else None
        row = {"batch": r["step"], "eval_PER": per, "eval_loss": r.get("val_loss"), "time_per_batch": 0.3}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines), "utf-8")


def long_csv(log: TrainingLog, path: Path) -> None:
    lines = ["run_id,key,value,step,timestamp"]
    for key, name in (("train_loss", "train_loss"), ("val_loss", "val_loss"), ("val_per", "per")):
        series = getattr(log, name)
        lines += [
            f"ab12,{key},{v!r},{int(s)},17{int(s):011d}"
            for s, v in zip(series.steps, series.values.tolist(), strict=True)
        ]
    path.write_text("\n".join(lines), "utf-8")


def printed_dashes(log: TrainingLog, path: Path) -> None:
    lines = ["Using device: cuda:0", "Some weights were not initialised"]
    for r in rows(log):
        parts = [
            f"{name}: {r[key]:.4f}"
            for name, key in (("loss", "train_loss"), ("val_loss", "val_loss"), ("val_per", "per"))
            if key in r
        ]
        lines.append(f"step {int(r['step'])} - 3s - " + " - ".join(parts))
    path.write_text("\n".join(lines), "utf-8")


def printed_percent(log: TrainingLog, path: Path) -> None:
    lines = ["2025-01-01 10:00:00 | starting"]
    for r in rows(log):
        step, when = int(r["step"]), f"2025-01-01 10:00:{int(r['step']) % 60:02d}"
        if "train_loss" in r:
            lines.append(f"{when} | [train] iter {step}: loss={r['train_loss']:.5g}, lr=1e-3")
        if "per" in r:
            loss = r.get("val_loss", 0)
            lines.append(f"{when} | [valid] iter {step}: loss={loss:.5g}, PER={100 * r['per']:.2f}%")
            lines.append(f"{when} | best PER so far: 3.00%")
    path.write_text("\r\n".join(lines), "utf-8")


def printed_below(log: TrainingLog, path: Path) -> None:
    lines = []
    for r in held(log):
        lines += [
            f"======== Step {int(r['step'])} ========",
            f"  Validation loss: {r.get('val_loss', 0):.5g}",
        ]
        if "per" in r:
            lines.append(f"  Validation PER: {r['per']:.4f}")
        lines += ["  session 3: PER 0.0100", "  saved checkpoint"]
    path.write_text("\n".join(lines), "utf-8")


def printed_dicts(log: TrainingLog, path: Path) -> None:
    lines = []
    for r in rows(log):
        if "train_loss" in r:
            lines.append(str({"loss": r["train_loss"], "step": r["step"]}))
        if "per" in r:
            lines.append(str({"eval_loss": r.get("val_loss"), "eval_per": r["per"], "step": r["step"]}))
    path.write_text("\n".join(["***** Running training *****", *lines]), "utf-8")


def events(log: TrainingLog, path: Path) -> None:
    def varint(value: int) -> Iterator[int]:
        while value > 0x7F:
            yield value & 0x7F | 0x80
            value >>= 7
        yield value

    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2]) + bytes(varint(len(data))) + data

    def record(data: bytes) -> bytes:  # without the checksums, which the doctor does not verify
        return struct.pack("<Q", len(data)) + bytes(4) + data + bytes(4)

    made = [record(b"\x09" + struct.pack("<d", 1.7e9) + field(3, b"brain.Event:2"))]
    for tag, name in (("train/loss", "train_loss"), ("val/loss", "val_loss"), ("val/PER", "per")):
        series = getattr(log, name)
        for step, value in zip(series.steps, series.values, strict=True):
            summary = field(1, field(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
            made.append(
                record(b"\x09" + struct.pack("<d", 1.7e9) + b"\x10" + bytes(varint(int(step))) + field(5, summary))
            )
    path.write_bytes(b"".join(made))


DIALECTS: dict[str, Callable[[TrainingLog, Path], None]] = {
    f.__name__: f
    for f in (
        *(table_csv, newest_first_tsv, wandb_csv, wandb_history, trainer_state, json_columns, utf16_jsonl),
        *(percent_jsonl, long_csv, printed_dashes, printed_percent, printed_below, printed_dicts, events),
    )
}
