"""`read_logs`: open a run folder, a folder with a log, or a log file; the format is detected from the content."""

import gc
import json
import pickletools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.config import to_tree
from arcuate.data.alphabet import error_rate_name, recorded_classes
from arcuate.doctor.columns import SESSION, Collector, Metadata, detect_dataset, flatten, scan_config
from arcuate.doctor.read_formats import (
    find_delimiter,
    is_event_file,
    is_keyed_by_step,
    is_mlflow,
    parse_json,
    read_csv,
    read_events,
    read_json_document,
    read_jsonl,
    read_mlflow,
    read_tree,
)
from arcuate.doctor.read_text import detect_encoding, is_document, line_blocks, read_head, read_text
from arcuate.doctor.training_log import Series, TrainingLog, assemble_logs
from arcuate.errors import UserError
from arcuate.experiments.recipe import Recipe, load_recipe, official_ancestor, recipe_names, run_recipe
from arcuate.files import read_json
from arcuate.hub import local_path
from arcuate.run import Run, open_run
from arcuate.training.schedule import learning_rate
from arcuate.training.step_size import coupling_warnings

_OTHER_FORMATS = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"PK\x03\x04": "a zip archive or a PyTorch file",
    b"\x1f\x8b": "a compressed file; decompress it first",
    b"BZh": "a compressed file; decompress it first",
    b"\xfd7zXZ": "a compressed file; decompress it first",
    b"%PDF": "a PDF file",
    b"\x89HDF": "an HDF5 file",
    b":W&B": "a binary Weights & Biases log; export its history as CSV or JSON lines",
}
_PICKLE = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_OLD_PICKLE = (b"(", b"}", b"]", b"c")  # first opcodes of protocols 0 and 1
_MAX_OLD_PICKLE = 1 << 22  # bytes; an old pickle has to be parsed completely to be recognised
_PICKLE_HINT = "--allow-pickle reads it with a loader restricted to numbers, arrays and plain containers"
_DOCUMENT_STARTS = ('{"', '{ "', "[{", "[ {", "[[", '["')
_LOG_NAMES = ("metrics", "history", "events.out", "validation", "training", "log", "stats", "trainer_state")
_FILE_PAIRS = (("training", "validation"), ("train", "val"), ("train", "valid"), ("train", "test"), ("train", "eval"))
_MAX_FILES = 200  # files of a folder that are considered


@dataclass(frozen=True)
class LogFile:
    """The runs found at a path, and how they were read."""

    name: str
    source: str
    logs: tuple[TrainingLog, ...]
    notes: tuple[str, ...] = ()


def read_logs(path: Path, allow_pickle: bool = False) -> LogFile:
    path = local_path(path)
    if path.is_dir():
        return _read_folder(path, allow_pickle)
    if not path.exists():
        raise UserError(f"no such file or folder: {path}")
    if not path.is_file():
        raise UserError(f"{path} is neither a file nor a folder")
    return _read_files([path, *_partner_files(path)], allow_pickle)


def _read_folder(path: Path, allow_pickle: bool) -> LogFile:
    if (path / "recipe.yaml").is_file():
        run = open_run(path)
        with _gc_disabled():
            return LogFile(run.name, "an arcuate run folder", tuple(_read_run(run)))
    pickles = []
    for group in _candidate_files(path):
        if not allow_pickle and _is_pickle(group[0], read_head(group[0])):
            pickles.append(group[0].name)
            continue
        try:
            return _read_files(group, allow_pickle)
        except UserError:
            continue  # not a log: try the next candidate
    if pickles:
        raise UserError(f"{path} contains no training log except the pickle {pickles[0]}; {_PICKLE_HINT}")
    raise UserError(f"{path} is neither an arcuate run folder nor a folder with a training log")


def _candidate_files(path: Path) -> list[list[Path]]:
    """Groups of files that belong together, the most likely log first."""
    try:
        files = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))[:_MAX_FILES]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    events = [p for p in files if "tfevents" in p.name]
    groups = [[p, *_partner_files(p)] for p in files if p not in events]
    if events:
        groups.append(events)
    unique = {frozenset(group): group for group in reversed(groups)}

    def rank(group: list[Path]) -> tuple[int, str]:
        name = group[0].name
        return next((i for i, word in enumerate(_LOG_NAMES) if word in name.lower()), len(_LOG_NAMES)), name

    return sorted(unique.values(), key=rank)


def _partner_files(path: Path) -> list[Path]:
    """The other file of a pair such as training_metrics.csv and validation_metrics.csv."""
    for one, other in _FILE_PAIRS:
        for a, b in ((one, other), (other, one)):
            if a in path.name:
                partner = path.with_name(path.name.replace(a, b))
                if partner.is_file() and partner != path and partner.suffix == path.suffix == ".csv":
                    return [partner]
    return []


def _read_files(paths: Sequence[Path], allow_pickle: bool) -> LogFile:
    """Read one log from one file or from several files that belong together."""
    collector = Collector()
    notes: list[str] = []
    sources: list[str] = []
    with _gc_disabled():
        for path in paths:
            source, file_notes = _read_file(path, collector, allow_pickle)
            sources.append(source)
            notes += file_notes
    first = paths[0]
    if len(paths) > 1:
        notes.append(f"read together with {', '.join(p.name for p in paths[1:])}")
    _scan_config_files(first, collector.metadata)
    detect_dataset(f"{first.parent.name} {first.name}", collector.metadata, "the file name")
    logs = assemble_logs(collector, first.stem)
    if not logs:
        reason = next(iter(collector.metadata.implausible), "it contains no loss or error rate over steps")
        raise UserError(f"{first} is not a training log: {reason}")
    if collector.n_bad:
        notes.append(f"{collector.n_bad:,} unreadable lines were skipped")
    if collector.n_skipped:
        notes.append(f"the trainer reports {collector.n_skipped:,.0f} skipped updates")
    logs = _apply_metadata(logs, collector.metadata)
    return LogFile(first.name, sources[0], tuple(logs), tuple(dict.fromkeys(notes)))


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Rows create no reference cycles; searching for them would take a third of the time of a long log."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read_file(path: Path, collector: Collector, allow_pickle: bool) -> tuple[str, Sequence[str]]:
    """Read one file into the collector; return its format and notes about it."""
    head = read_head(path)
    if not head.strip():
        raise UserError(f"{path} is empty")
    if is_event_file(head):
        return "a TensorBoard event file", read_events(path, collector)
    if _is_pickle(path, head):
        if not allow_pickle:
            raise UserError(f"{path} is a pickle, which can execute code when it is opened; {_PICKLE_HINT}")
        from arcuate.data.unpickle import load_pickle

        read_tree(load_pickle(path), collector)
        return "a pickle", ()
    for magic, description in _OTHER_FORMATS.items():
        if head.startswith(magic):
            raise UserError(f"{path} is not a training log but {description}")
    encoding = detect_encoding(head)
    if encoding is None:
        raise UserError(f"{path} is not a training log: it is neither text nor a TensorBoard event file")
    return _read_text_file(path, head, encoding, collector), ()


def _is_pickle(path: Path, head: bytes) -> bool:
    """Recognise a pickle by its header, or by its opcodes for protocols 0 and 1, which have no header.

    Listing the opcodes does not execute them.
    """
    if head.startswith(_PICKLE):
        return True
    if not head.startswith(_OLD_PICKLE) or path.stat().st_size > _MAX_OLD_PICKLE:
        return False
    data = path.read_bytes()
    if not data.endswith(b"."):
        return False
    try:
        last = deque(pickletools.genops(data), maxlen=1)
    except (ValueError, KeyError, OverflowError):
        return False
    return bool(last) and last[0][2] == len(data) - 1


def _read_text_file(path: Path, head: bytes, encoding: str, collector: Collector) -> str:
    text = head.decode(encoding, errors="replace")
    collector.metadata.sessions.update(SESSION.findall(text))
    lines = text.splitlines()
    filled = [line.strip() for line in lines if line.strip()]
    blocks = line_blocks(path, encoding)
    if _is_json_document(filled) and read_json_document(path, encoding, collector):
        return "a JSON document"
    if _fraction_of_objects(filled) >= 0.5:
        read_jsonl(blocks, collector)
        return "JSON lines"
    if delimiter := find_delimiter(lines):
        read_csv(blocks, delimiter, collector, path.stem)
        return "a table"
    if is_mlflow(lines[:-1] or lines):
        read_mlflow(blocks, collector, path.stem)
        return "an MLflow metric file"
    if is_document(lines):
        raise UserError(
            f"{path} is not a training log but a document: it consists of headings, lists and sentences, whose numbers"
            " are not a series over steps; give the file that the trainer wrote"
        )
    read_text(blocks, collector)
    return "printed output of a trainer"


def _fraction_of_objects(filled: Sequence[str]) -> float:
    """The fraction of JSON objects among the first lines, without the last one, which may be incomplete."""
    lines = filled[:50] if len(filled) > 50 else filled[:-1] or filled
    return sum(isinstance(parse_json(line), dict) for line in lines) / len(lines) if lines else 0.0


def _is_json_document(filled: Sequence[str]) -> bool:
    """Whether a file that starts like JSON is one document, not one object per line."""
    if not filled or not (filled[0] in ("{", "[") or filled[0].startswith(_DOCUMENT_STARTS)):
        return False
    if len(filled) == 1:
        tree = parse_json(filled[0])
        return not isinstance(tree, dict) or _contains_list(tree) or is_keyed_by_step(tree)
    first_objects = any(isinstance(parse_json(line), dict) for line in filled[:3])
    return _fraction_of_objects(filled) < 0.3 and not first_objects


def _contains_list(tree: Any, depth: int = 4) -> bool:
    if isinstance(tree, dict) and depth:
        return any(_contains_list(v, depth - 1) for v in tree.values())
    return isinstance(tree, list)


def _scan_config_files(path: Path, metadata: Metadata) -> None:
    """A configuration file in the same folder may state the planned length."""
    for name in ("config.json", "args.json", "hparams.json"):
        file = path.with_name(name)
        if file != path and file.is_file() and file.stat().st_size < 1 << 20:
            try:
                scan_config(json.loads(file.read_text("utf-8")), metadata, f"{name} in the same folder")
            except (OSError, ValueError, RecursionError):
                continue  # the configuration is optional


def _apply_metadata(logs: Sequence[TrainingLog], metadata: Metadata) -> list[TrainingLog]:
    """Add what the file states about its runs."""
    planned, planned_because = metadata.planned or (None, "")
    dataset, dataset_because = metadata.dataset or (None, "")
    return [
        replace(
            log,
            name=metadata.run_names[i] if len(metadata.run_names) == len(logs) else log.name,
            planned=planned if log.judged.unit != "epochs" else None,
            planned_because=planned_because,
            dataset=dataset,
            dataset_because=dataset_because,
            n_named_sessions=len(metadata.sessions),
            reported_finished=metadata.n_finished >= len(logs),
        )
        for i, log in enumerate(logs)
    ]


# Arcuate run folders: metrics, recipe and the incidents of the guard.

_BLANK_FRACTION, _FEW_CLASSES = 0.98, 3  # output with almost only blanks, or with at most this many phonemes
_MAX_INCIDENTS = 5
_ACTIONS = {
    "skip": "skipped the step",
    "rewind": "rewound to a checkpoint",
    "reduce_lr": "reduced the learning rate",
    "cool": "reduced the learning rate",  # name used by earlier versions
    "stop": "stopped the run",
}


def _read_run(run: Run) -> list[TrainingLog]:
    """The log of a run folder; several if another run was appended to its file."""
    if not run.metrics_file.is_file():
        raise UserError(f"{run.path} has no metrics.jsonl: training has not started")
    collector, output = Collector(), _OutputMonitor()
    read_jsonl(line_blocks(run.metrics_file, "utf-8"), collector, output.add_rows)
    logs = assemble_logs(collector, run.name) or [TrainingLog(name=run.name)]
    recipe, problems = None, []
    try:
        recipe = run_recipe(run)
    except UserError as error:  # damaged or from a different version; the curves can be judged without it
        problems.append(f"judged without its recipe: {error}")
    logs = [_with_recipe(replace(log, notes=(*log.notes, *problems)), run, recipe) for log in logs]
    return [_with_incidents(logs[0], _read_incidents(run), output)] if len(logs) == 1 else logs


class _OutputMonitor:
    """Scans the training rows for blank output and for null losses."""

    def __init__(self) -> None:
        self.blank: list[tuple[int, bool]] = []  # step, whether the output was almost only blanks
        self.non_finite: list[int] = []  # steps whose row has a null loss, as arcuate writes a non-finite one
        self.update_ratios: list[tuple[int, float]] = []
        self.grad_norm_max: list[tuple[int, float]] = []
        self.n_trials = 0

    def add_rows(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            try:
                if row.get("loss", 0) is None:
                    self.non_finite.append(int(row["step"]))
                for name, values in (("update_ratio", self.update_ratios), ("grad_norm_max", self.grad_norm_max)):
                    if isinstance(value := row.get(name), float):
                        values.append((int(row["step"]), value))
                self.n_trials += row["n_trials"] if row.get("split") == "train" and "n_trials" in row else 0
                if "blank_share" in row:
                    blank = row["blank_share"] >= _BLANK_FRACTION or row["n_distinct"] <= _FEW_CLASSES
                    self.blank.append((int(row["step"]), bool(blank)))
            except (ValueError, TypeError, KeyError, OverflowError):
                continue  # a row without output statistics

    @staticmethod
    def to_series(points: Sequence[tuple[int, float]], unit: str) -> Series:
        steps, values = zip(*points, strict=True) if points else ((), ())
        return Series(np.array(steps, dtype=float), np.array(values, dtype=float), unit)

    def blank_since(self) -> int | None:
        """The step since which every output was blank, if that covers at least the last third."""
        blank = [is_blank for _, is_blank in self.blank]
        if len(blank) < 6 or not all(blank[-(len(blank) // 3) :]):
            return None
        others = [i for i, is_blank in enumerate(blank) if not is_blank]
        return self.blank[others[-1] + 1 if others else 0][0]


def _read_incidents(run: Run) -> list[dict[str, Any]]:
    """The incidents of the guard; unreadable lines are skipped."""
    if not run.incidents_file.is_file():
        return []
    rows = [parse_json(line) for lines in line_blocks(run.incidents_file, "utf-8") for line in lines]
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]


def _with_recipe(log: TrainingLog, run: Run, recipe: Recipe | None) -> TrainingLog:
    planned = recipe.train.steps if recipe else None
    dataset, because = _published_dataset(run)
    parent = packaged_parent(recipe) if recipe else None
    environment = _read_environment(run)
    stated = environment.get("data")
    data: dict[str, Any] = stated if isinstance(stated, dict) else {}
    sessions = data.get("sessions")
    return replace(
        log,
        is_arcuate=True,
        error_name=error_rate_name(recorded_classes(environment)) if log.error_name == "PER" else log.error_name,
        settings=_flat_settings(recipe) if recipe else {},
        scheduled_lr=_scheduled_lr(recipe, log.lr) if recipe else Series(),
        parent=parent,
        parent_settings=_flat_settings(load_recipe(parent)) if parent else {},
        run_path=run.path,
        store=data.get("path") if isinstance(data.get("path"), str) else None,
        n_parameters=_count(environment.get("n_parameters")),
        n_channels=_count(data.get("n_channels")),
        n_sessions=len(sessions) if isinstance(sessions, list) else None,
        coupling_warnings=tuple(_coupling_warnings(recipe)) if recipe else (),
        planned=planned,
        planned_because="recipe.yaml" if planned else "",
        dataset=dataset,
        dataset_because=because,
    )


def _flat_settings(recipe: Recipe) -> dict[str, Any]:
    """Settings by dotted path, with the lists that the checks of the recipe use."""
    tree = to_tree(recipe)
    flat = {name.replace("/", "."): value for name, value in flatten(tree).items()}
    return flat | {"optimizer.betas": list(recipe.optimizer.betas), "stages": tree["stages"]}


def _scheduled_lr(recipe: Recipe, logged: Series) -> Series:
    """The learning rates of the schedule at the logged steps; none if it depends on validations or stages."""
    if recipe.stages or recipe.schedule.kind == "plateau":
        return Series()
    steps = recipe.train.steps
    values = [learning_rate(recipe.schedule, max(0, int(step) - 1), steps) for step in logged.steps.tolist()]
    return Series(logged.steps, np.array(values), logged.unit)


def packaged_parent(recipe: Recipe) -> str | None:
    """The packaged recipe that a recipe is, or is derived from."""
    return next((name for name in (recipe.name, recipe.extends) if name in recipe_names()), None)


def _read_environment(run: Run) -> dict[str, Any]:
    """environment.json; empty if it is missing or damaged."""
    try:
        return read_json(run.environment_file)
    except UserError:
        return {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _with_incidents(log: TrainingLog, incidents: Sequence[dict[str, Any]], output: _OutputMonitor) -> TrainingLog:
    shown = [row for row in incidents if row.get("kind") != "search"]  # trials belong to the rewind before them
    sentences = [_describe_incident(row) for row in shown[:_MAX_INCIDENTS]]
    if len(shown) > _MAX_INCIDENTS:
        sentences.append(f"and {len(shown) - _MAX_INCIDENTS:,} more incidents")
    non_finite = [row for row in incidents if row.get("kind") == "non_finite"]
    given_up = [row["step"] for row in non_finite if row.get("action") != "skip"]
    return replace(
        log,
        incidents=tuple(sentences),
        non_finite_steps=tuple(sorted({*given_up, *output.non_finite})),
        skipped_steps=tuple(row["step"] for row in non_finite if row.get("action") == "skip"),
        blank_since=output.blank_since(),
        update_ratio=output.to_series(output.update_ratios, log.train_loss.unit),
        grad_norm_max=output.to_series(output.grad_norm_max, log.train_loss.unit),
        n_trials_seen=output.n_trials or None,
        lr_scale=_last_scale(incidents),
        guard_eps=_last_eps(incidents),
        n_rewinds=sum(row.get("action") == "rewind" for row in shown),
    )


def _last_scale(incidents: Sequence[dict[str, Any]]) -> float:
    """The factor on the learning rate after the last incident that states one."""
    scales = [row["lr_scale"] for row in incidents if isinstance(row.get("lr_scale"), float)]
    return scales[-1] if scales and scales[-1] > 0 else 1.0


def _last_eps(incidents: Sequence[dict[str, Any]]) -> float | None:
    """The eps that the guard set last."""
    values = [row["eps"] for row in incidents if isinstance(row.get("eps"), float)]
    return values[-1] if values and 0 < values[-1] < 1 else None


def _coupling_warnings(recipe: Recipe) -> list[str]:
    """Warnings for a recipe derived from an official one that changes learning rate, eps or reduction alone."""
    known = packaged_parent(recipe)
    official = official_ancestor(known) if known else None
    return coupling_warnings(recipe, load_recipe(official), official) if official else []


def _describe_incident(row: dict[str, Any]) -> str:
    action = _ACTIONS.get(str(row.get("action")), str(row.get("action") or "recorded an incident"))
    reason = row.get("reason") or row.get("kind") or "no reason recorded"
    return f"the guard {action} at step {row['step']:,}: {reason}"


def _published_dataset(run: Run) -> tuple[str | None, str]:
    """The published data set if the run's data have its layout and size; simulated data have no reference."""
    data = _read_environment(run).get("data")
    if not isinstance(data, dict):
        return None, ""
    sessions = data.get("sessions")
    n_sessions = len(sessions) if isinstance(sessions, list) else 0
    for dataset, n_channels, min_sessions in (("b2t25", 512, 40), ("b2t24", 256, 24)):
        layout = data.get("layout") == dataset and data.get("n_channels") == n_channels
        if layout and n_sessions >= min_sessions:
            return dataset, f"environment.json lists {n_sessions} sessions of {n_channels} channels"
    return None, ""
