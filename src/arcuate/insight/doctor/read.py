"""Which reader for which file: judged by what is inside, never by its ending."""

import gc
import json
import pickletools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arcuate.errors import UserError
from arcuate.insight.doctor.assemble import assemble
from arcuate.insight.doctor.columns import (
    Collector,
    encoding_of,
    line_blocks,
    look_at_config,
    name_dataset,
    read_head,
)
from arcuate.insight.doctor.curve import Log
from arcuate.insight.doctor.read_events import is_events, read_events
from arcuate.insight.doctor.read_run import read_run
from arcuate.insight.doctor.read_tables import (
    by_step,
    delimiter_of,
    is_mlflow,
    read_csv,
    read_json,
    read_jsonl,
    read_mlflow,
    read_tree,
)
from arcuate.insight.doctor.read_text import read_text
from arcuate.run import open_run

PICTURES = {b"\x89PNG": "a PNG picture", b"\xff\xd8\xff": "a JPEG picture", b"GIF8": "a GIF picture"}
OTHERS = {
    b"PK\x03\x04": "a zip archive or a PyTorch file",
    b"\x1f\x8b": "compressed; unpack it first",
    b"%PDF": "a PDF",
    b"\x89HDF": "an HDF5 file",
    b"BZh": "compressed; unpack it first",
    b"\xfd7zXZ": "compressed; unpack it first",
    b":W&B": "the binary log of Weights & Biases; export its history as CSV or JSON lines",
}
PICKLE = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
OLD_PICKLE = (b"(", b"}", b"]", b"c")  # a mark, a dictionary, a list, a name: how protocols 0 and 1 begin
LARGEST_OLD = 1 << 22  # bytes of a pickle that must be read whole to be known as one
DOCUMENTS = ('{"', '{ "', "[{", "[ {", "[[", '["')  # what one JSON document may begin with
LOG_NAMES = ("metrics", "history", "events.out", "validation", "training", "log", "stats", "trainer_state")
MOST_FILES = 200  # of a folder that are looked at


@dataclass(frozen=True)
class Reading:
    """The runs that a path holds, and how they were read."""

    name: str
    source: str
    logs: tuple[Log, ...]
    notes: tuple[str, ...] = ()


def read(path: Path, allow_pickle: bool = False) -> Reading:
    """The log at a path: a run folder, a folder with a log in it, or a file."""
    if path.is_dir():
        return read_folder(path, allow_pickle)
    if not path.exists():
        raise UserError(f"there is no file or folder {path}")
    if not path.is_file():
        raise UserError(f"{path} is neither a file nor a folder")
    return read_files([path, *partners(path)], allow_pickle)


def read_folder(path: Path, allow_pickle: bool) -> Reading:
    if (path / "recipe.yaml").is_file():
        run = open_run(path)
        with without_collecting():
            return Reading(run.name, "a run folder of arcuate", tuple(read_run(run)))
    pickles = []
    for group in candidates(path):
        if not allow_pickle and is_pickle(group[0], read_head(group[0])):
            pickles.append(group[0].name)
            continue
        try:
            return read_files(group, allow_pickle)
        except UserError:
            continue  # not a log after all: the next candidate
    if pickles:
        raise UserError(
            f"{path} holds no training log but {'pickles' if len(pickles) > 1 else 'a pickle'}, {pickles[0]}; "
            "--allow-pickle reads it with a loader that admits nothing but numbers, arrays and plain containers"
        )
    raise UserError(
        f"{path} holds no training log: neither a run folder of arcuate nor a file with a log in it"
    )


def candidates(path: Path) -> list[list[Path]]:
    """Groups of files that belong together, the likeliest log first."""
    try:
        files = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))[:MOST_FILES]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    events = [p for p in files if "tfevents" in p.name]
    groups = [[p, *partners(p)] for p in files if p not in events]
    if events:
        groups.append(events)
    seen: set[frozenset[Path]] = set()
    kept = [g for g in groups if (key := frozenset(g)) not in seen and not seen.add(key)]  # type: ignore[func-returns-value]
    return sorted(kept, key=lambda g: _likely(g[0].name))


def _likely(name: str) -> tuple[int, str]:
    place = next((i for i, word in enumerate(LOG_NAMES) if word in name.lower()), len(LOG_NAMES))
    return place, name


def partners(path: Path) -> list[Path]:
    """The other half of a pair such as training_metrics.csv and validation_metrics.csv."""
    pairs = (
        ("training", "validation"),
        ("train", "val"),
        ("train", "valid"),
        ("train", "test"),
        ("train", "eval"),
    )
    for one, other in pairs:
        for a, b in ((one, other), (other, one)):
            if a in path.name:
                partner = path.with_name(path.name.replace(a, b))
                if partner.is_file() and partner != path and partner.suffix == path.suffix == ".csv":
                    return [partner]
    return []


def read_files(paths: Sequence[Path], allow_pickle: bool) -> Reading:
    """One log from one file, or from files that belong together."""
    collector = Collector()
    notes: list[str] = []
    sources: list[str] = []
    with without_collecting():
        for path in paths:
            source, told = read_file(path, collector, allow_pickle)
            sources.append(source)
            notes += told
    first = paths[0]
    if len(paths) > 1:
        notes.append(f"read together with {', '.join(p.name for p in paths[1:])}")
    _beside(first, collector)
    name_dataset(f"{first.parent.name} {first.name}", collector, "the file's name says so")
    logs = assemble(collector, first.stem)
    if not logs:
        wrong = next(iter(collector.facts.get("impossible", ())), "")
        raise UserError(f"{first} is no training log: {wrong or 'it holds no loss or error rate over steps'}")
    if collector.n_bad:
        notes.append(f"{collector.n_bad:,} lines could not be read and were left out")
    if collector.n_skipped:
        notes.append(f"the trainer says it skipped {collector.n_skipped:,.0f} updates")
    return Reading(first.name, sources[0], tuple(told_by_file(logs, collector)), tuple(dict.fromkeys(notes)))


@contextmanager
def without_collecting() -> Iterator[None]:
    """Rows come and go without cycles; looking for some takes a third of the time of a long log."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def read_file(path: Path, collector: Collector, allow_pickle: bool) -> tuple[str, Sequence[str]]:
    """Read one file into the collector; what it was, and what there is to say about it."""
    head = read_head(path)
    if not head.strip():
        raise UserError(f"{path} is empty: there is nothing to judge")
    if is_events(head):
        return "a TensorBoard event file", read_events(path, collector)
    if is_pickle(path, head):
        return _read_pickle(path, collector, allow_pickle), ()
    for start, what in (*PICTURES.items(), *OTHERS.items()):
        if head.startswith(start):
            raise UserError(f"{path} is no training log but {what}")
    encoding = encoding_of(head)
    if encoding is None:
        raise UserError(
            f"{path} is no training log: its content is neither text nor a TensorBoard event file"
        )
    return _read_text_file(path, head, encoding, collector), ()


def is_pickle(path: Path, head: bytes) -> bool:
    """By the mark of newer protocols; the oldest have none, but are one sequence of operations with a stop at the end.

    Naming the operations runs none of them.
    """
    if head.startswith(PICKLE):
        return True
    if not head.startswith(OLD_PICKLE) or path.stat().st_size > LARGEST_OLD:
        return False
    data = path.read_bytes()
    if not data.endswith(b"."):
        return False
    try:
        operations = deque(pickletools.genops(data), maxlen=1)
    except (ValueError, KeyError, OverflowError):
        return False
    return bool(operations) and operations[0][2] == len(data) - 1


def _read_pickle(path: Path, collector: Collector, allow_pickle: bool) -> str:
    if not allow_pickle:
        raise UserError(
            f"{path} is a pickle, which can run code when it is opened; --allow-pickle reads it with a loader that"
            " admits nothing but numbers, arrays and plain containers"
        )
    from arcuate.data.unpickle import load_pickle

    read_tree(load_pickle(path), collector)
    return "a pickle"


def _read_text_file(path: Path, head: bytes, encoding: str, collector: Collector) -> str:
    start = head.decode(encoding, errors="replace")
    lines = start.splitlines()
    blocks = line_blocks(path, encoding)
    filled = [line.strip() for line in lines if line.strip()]
    if _one_document(filled) and read_json(path, encoding, collector):
        return "a JSON document"
    if _share_of_objects(filled) >= 0.5:
        read_jsonl(blocks, collector)
        return "JSON lines"
    if mark := delimiter_of(lines):
        read_csv(blocks, mark, collector, path.stem)
        return "a table"
    if is_mlflow(lines[:-1] or lines):
        read_mlflow(blocks, collector, path.stem)
        return "a metric file of MLflow"
    read_text(blocks, collector)
    return "the text that a trainer printed"


def _share_of_objects(filled: Sequence[str]) -> float:
    """How many of the first lines are JSON objects, the last one aside, which may be cut off."""
    looked = filled[:50] if len(filled) > 50 else filled[:-1] or filled
    return sum(isinstance(_parsed(line), dict) for line in looked) / len(looked) if looked else 0.0


def _one_document(filled: Sequence[str]) -> bool:
    """Whether a text that begins like JSON is one document rather than one object per line."""
    if not filled or not (filled[0] in ("{", "[") or filled[0].startswith(DOCUMENTS)):
        return False
    if len(filled) == 1:
        tree = _parsed(filled[0])
        return not isinstance(tree, dict) or _has_list(tree) or by_step(tree)
    return _share_of_objects(filled) < 0.3 and not any(isinstance(_parsed(line), dict) for line in filled[:3])


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _has_list(tree: Any, depth: int = 4) -> bool:
    if isinstance(tree, dict) and depth:
        return any(_has_list(v, depth - 1) for v in tree.values())
    return isinstance(tree, list)


def _beside(path: Path, collector: Collector) -> None:
    """A configuration that lies beside the log may tell how long the run was meant to be."""
    for name in ("config.json", "args.json", "hparams.json"):
        file = path.with_name(name)
        if file != path and file.is_file() and file.stat().st_size < 1 << 20:
            try:
                look_at_config(json.loads(file.read_text("utf-8")), collector, f"{name} beside the log")
            except (OSError, ValueError, RecursionError):
                continue  # beside the point: the log itself is what is judged


def told_by_file(logs: Sequence[Log], collector: Collector) -> list[Log]:
    """Each run with what the file said of it."""
    facts = collector.facts
    planned, planned_because = facts.get("planned", (None, ""))
    dataset, dataset_because = facts.get("dataset", (None, ""))
    n_finished = len(facts.get("finished", ()))
    names = [name for _, name in facts.get("names", ())]
    told = []
    for i, log in enumerate(logs):
        told.append(
            replace(
                log,
                name=names[i] if len(names) == len(logs) else log.name,
                planned=planned if log.judged.unit != "epochs" else None,
                planned_because=planned_because,
                dataset=dataset,
                dataset_because=dataset_because,
                said_finished=n_finished >= len(logs),
            )
        )
    return told
