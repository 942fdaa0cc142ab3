"""A small folder with every input that a command needs, and what each writing command does in it."""

import atexit
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.data.store import Store
from arcuate.decoding.config import read_decoding_config
from support.cases import many
from support.fabricate_runs import stuck_run
from support.faults import Done, Fault, run, run_together
from support.live_parts import ENTRIES
from support.official_checkpoints import write_nejm

SMALL = [
    *("encoder.width=8", "encoder.depth=1", "data.batching.batch_size=4", "front_end.patch={bins: 14, stride: 8}"),
    *("train.log_every=2", "train.validate_every=2", "train.checkpoint_every=2", "runtime.threads=1"),
]
SHORT = [*SMALL, "train.steps=4", "train.keep_checkpoints=3"]
WORDS = ["--lm", "a.alm", "--lexicon", "lexicon.txt", "--beam", "50"]


@dataclass(frozen=True)
class Command:
    """A command, the files and folders that it writes, and how to continue it after a fault."""

    arguments: Sequence[str]
    outputs: Sequence[str]
    again: Sequence[str] = ()  # further arguments after a kill
    slow: bool = False  # starts trainings of its own
    partial: bool = False  # a folder that is filled step by step; only a completed command is compared
    grows: bool = False  # repeated, it adds to what is there; `verify` checks the content
    keep: Sequence[str] = field(default=())  # inputs that must not change
    timed: Sequence[str] = ()  # outputs that state how long the command took, so that their contents differ
    codes: Sequence[int] = (0, 2)  # possible exit codes
    verify: Callable[[Path], None] | None = None  # of the folder, after the command has succeeded


def verify_recording(folder: Path) -> None:
    """Every sentence is in the journal and in the store, with bins that match its hash."""
    journal = [json.loads(line) for line in (folder / "new" / "journal.jsonl").read_text().splitlines()]
    finals = [row["trial"] for row in journal if row["type"] == "final"]
    stored = [json.loads(line) for line in (folder / "new" / "store" / "live.jsonl").read_text().splitlines()]
    assert finals[-3:] == ["rig/0", "rig/1", "rig/2"] and [row["source_trial"] for row in stored] == finals
    store = Store.open(folder / "new" / "store")
    assert len(store.trials) == len(finals) and not store.find_changed()


def verify_tuned(folder: Path) -> None:
    """The file is complete: the record of the tuning comes last."""
    _, tuned = read_decoding_config(folder / "new.yaml")
    assert "wer_on_tuned_trials" in tuned


def verify_sweep(folder: Path) -> None:
    """A run is complete; the other may belong to a killed worker, which counts as alive for a minute."""
    runs = [path.parent for path in (folder / "new").rglob("recipe.yaml")]
    complete = [run for run in runs if (run / "checkpoints" / "step-00000004").is_dir()]
    assert complete, runs


# a source of bins that is replaced by nothing: three sentences, then the signal that ends a server
RIG = """
import os, signal, threading
import numpy as np
from arcuate.live.input import Chunk, End, Mark, Source

class Rig(Source):
    def __init__(self, n_channels, put):
        super().__init__("the rig")
        self.n_channels, self.put = n_channels, put

    def _run(self):
        rng = np.random.default_rng(0)
        for n in range(3):
            done = threading.Event()
            bins = rng.normal(size=(60, self.n_channels)).astype(np.float32)
            for item in (Mark(f"rig/{n}", None, "aa b"), Chunk(bins[:25]), Chunk(bins[25:]), End(done.set)):
                self.put(item)
            done.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)
"""


COMMANDS = {
    "simulate": Command(
        ["simulate", "new", "--sessions", "2", "--trials", "4", "--electrodes", "4", "--seed", "1"],
        ["new"],
    ),
    "prepare": Command(["prepare", "source", "new"], ["new"], keep=["source"]),
    "prepare --force": Command(["prepare", "other", "store", "--force"], ["store"], keep=["other"]),
    "train": Command(
        ["train", "tiny", *SHORT, "--data", "store", "--run", "new"],
        ["new"],
        ["--resume"],
        partial=True,
        keep=["store"],
    ),
    "evaluate": Command(
        ["evaluate", "run", "--data", "store", "--scores", "new.npz"], ["run/results", "new.npz"], keep=["store"]
    ),
    "decode": Command(["decode", "scores.npz", "--out", "new.jsonl", *WORDS], ["new.jsonl"], keep=["scores.npz"]),
    "decode (run)": Command(["decode", "run", "--data", "store", *WORDS], ["run/results"], keep=["store"]),
    "tune": Command(
        ["tune", "scores.npz", "--references", "references.jsonl", "--out", "new.yaml", "--budget", "1", *WORDS],
        ["new.yaml"],
        keep=["scores.npz"],
        timed=["new.yaml"],
        verify=verify_tuned,
    ),
    "combine": Command(
        ["combine", "one.jsonl", "two.jsonl", "--out", "new.jsonl"], ["new.jsonl"], keep=["one.jsonl", "two.jsonl"]
    ),
    "combine (frames)": Command(
        ["combine", "scores.npz", "again.npz", "--method", "geometric", "--out", "new.npz"],
        ["new.npz"],
        keep=["scores.npz", "again.npz"],
    ),
    "calibrate": Command(
        [
            *("calibrate", "run", "--data", "store", "--session", "LAST", "--sentences", "3", "--out", "new"),
            *("--curve", "none"),
        ],
        ["new"],
        slow=True,
        partial=True,
        keep=["run", "store"],
    ),
    "lm build": Command(["lm", "build", "text.txt", "new.alm", "--order", "2"], ["new.alm"], keep=["text.txt"]),
    "lm mix": Command(
        ["lm", "mix", "a.alm", "b.alm", "new.alm", "--weights", "0.5,0.5"],
        ["new.alm"],
        keep=["a.alm", "b.alm"],
    ),
    "lm import": Command(["lm", "import", "words.arpa", "new.alm"], ["new.alm"], keep=["words.arpa"]),
    "lm export": Command(["lm", "export", "a.alm", "new.arpa"], ["new.arpa"], keep=["a.alm"]),
    "import": Command(["import", "official", "new", "--kind", "nejm"], ["new"], keep=["official"]),
    "export": Command(["export", "run", "new.arcx", *WORDS[:4]], ["new.arcx"], keep=["run", "a.alm"]),
    "export store": Command(["export", "store", "new"], ["new"], keep=["store"]),
    "decode submit": Command(
        ["decode", "submit", "test.jsonl", "--data", "store", "--out", "new.csv"], ["new.csv"], keep=["test.jsonl"]
    ),
    "report": Command(["report", "run"], ["run/report.html"], keep=["run/results"]),
    "runs ledger": Command(["runs", "ledger", ".", "--out", "new.md"], ["new.md"], keep=["run"]),
    "report store": Command(["report", "store"], ["store.report.html"], keep=["store"]),
    "compare": Command(["compare", "run", "second", "--html", "new.html"], ["new.html"], keep=["run", "second"]),
    "doctor": Command(["doctor", "run", "--html", "new.html"], ["new.html"], keep=["run", "store"]),
    "doctor --fix": Command(["doctor", "bad", "--fix", "new.yaml"], ["new.yaml"], keep=["bad"]),
    "new encoder": Command(["new", "encoder", "my_encoder", "--folder", "new"], ["new"]),
    "live": Command(
        ["live", "run", "--source", "rig:Rig", "--lm", "none", "--port", "0", "--record", "new"],
        ["new"],
        partial=True,
        grows=True,
        keep=["run", "store"],
        verify=verify_recording,
    ),
    "sweep": Command(
        ["sweep", "tiny", "space.yaml", *SHORT, "--data", "store", "--out", "new", "--trials", "2"],
        ["new"],
        slow=True,
        partial=True,
        grows=True,
        keep=["store"],
        codes=(0, 1, 2),  # 1: every training failed
        verify=verify_sweep,
    ),
    "ablate": Command(
        ["ablate", "tiny", "fast:schedule.peak_lr=0.01", *SHORT, "--data", "store", "--out", "new", "--seeds", "1"],
        ["new"],
        slow=True,
        partial=True,
        keep=["store"],
        codes=(0, 1, 2),  # 1: the other cells are still being trained by another worker
    ),
}  # fmt: skip


def make_workspace(folder: Path) -> Path:
    """The inputs of all commands, made by the commands themselves."""
    folder.mkdir(parents=True)
    made = lambda *arguments: _succeed(run(arguments, folder))
    made("simulate", "source", "--sessions", "2", "--trials", "16", "--electrodes", "4", "--difficulty", "easy")
    made("simulate", "other", "--sessions", "2", "--trials", "8", "--electrodes", "4", "--seed", "3")
    made("prepare", "source", "store")
    made("train", "tiny", *SHORT, "data.max_sessions=1", "--data", "store", "--run", "run")
    made("evaluate", "run@step-00000002", "--data", "store", "--scores", "scores.npz")
    shutil.copy(folder / "scores.npz", folder / "again.npz")
    (folder / "text.txt").write_text("aa b\nb aa k\nk k aa\n" * 5)
    (folder / "other.txt").write_text("k aa b\nb k\n" * 5)
    (folder / "lexicon.txt").write_text("".join(f"{word}\t{' '.join(phones)}\n" for word, phones in ENTRIES[:60]))
    made("lm", "build", "text.txt", "a.alm", "--order", "2")
    made("lm", "build", "other.txt", "b.alm", "--order", "2")
    made("lm", "export", "b.alm", "words.arpa")
    write_nejm(folder / "official")
    trials = json.loads((folder / "store" / "manifest.json").read_text())["trials"]
    rows = [{"id": t["id"]} for t in trials if t["split"] == "test"]
    for name, text in (("test", "aa b"), ("one", "aa b k"), ("two", "aa k")):
        lines = [{**row, "text": text, "nbest": [{"text": text, "score": -1.0}]} for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    scored = [t for t in trials if t["split"] == "val"]
    (folder / "references.jsonl").write_text(
        "".join(json.dumps({"id": t["id"], "text": "aa b"}) + "\n" for t in scored)
    )
    (folder / "rig.py").write_text(RIG)
    stuck_run(folder / "bad", ["optimizer.eps=0.1"], np.linspace(3.3, 3.2, 24), 1.0, 0.0015, 150_000)
    shutil.copytree(folder / "run", folder / "second", symlinks=True)
    (folder / "space.yaml").write_text("schedule.peak_lr: {low: 1.0e-4, high: 1.0e-2, log: true}\n")
    return folder


def _succeed(done: Done) -> Done:
    assert done.code == 0, done.stderr
    return done


_WITH_TIMES = ("state.json", "environment.json", "metrics.jsonl", ".words.json", ".words.jsonl", ".log")


checks: Counter[str] = Counter()  # faults that were tried, by command and kind


@atexit.register
def _print_checks() -> None:
    if many() and checks:
        print("\n".join(f"faults {name}: {n}" for name, n in sorted(checks.items())))
        print(f"faults: {checks.total()} checks")


class Bench:
    """Runs one command in copies of the workspace, and compares what it leaves with an undisturbed one."""

    def __init__(self, workspace: Path, name: str, scratch: Path) -> None:
        self.workspace, self.name, self.scratch = workspace, name, scratch
        self.command = COMMANDS[name]
        last = max(p.name for p in (workspace / "store" / "sessions").glob("*.npy")).removesuffix(".npy")
        self.arguments = [last if a == "LAST" else a for a in self.command.arguments]
        self.n_copies = 0
        scratch.mkdir(parents=True, exist_ok=True)
        self.before = self._outputs(workspace)
        first, second = self.copy(), self.copy()
        self.n_operations = _succeed(run(self.arguments, first)).n_operations
        _succeed(run(self.arguments, second))
        self.after = self._outputs(first)
        again = self._outputs(second)
        assert (self.after.keys() == again.keys() or self.command.grows) and self.after != self.before
        self.volatile = {path for path in self.after if self.after[path] != again.get(path)}  # with times
        self.volatile |= {path for path in self.after if path.endswith(_WITH_TIMES) or path in self.command.timed}
        self.largest = max(len(self.after[path]) for path in self.after if self.after[path] != self.before.get(path))

    def copy(self) -> Path:
        self.n_copies += 1
        return Path(shutil.copytree(self.workspace, self.scratch / f"{self.name}-{self.n_copies}", symlinks=True))

    def check(self, fault: Fault) -> Done:
        """Run the command under a fault, check what it leaves, and run it again without one."""
        folder = self.copy()
        if fault.kind == "readonly":
            _set_modes(folder, 0o555, 0o444)
        try:
            done = run(self.arguments, folder, fault)
        finally:
            if fault.kind == "readonly":
                _set_modes(folder, 0o755, 0o644)
        where = f"{self.name} with {fault}: "
        if done.code == -9 and fault.kind == "kill":
            more = self.command.again
        else:
            more = self.command.again if done.code and (folder / self.command.outputs[0]).exists() else ()
            assert done.code in self.command.codes, where + f"exit code {done.code}\n{done.stderr[-1500:]}"
            assert_one_sentence(done, where)
            left = temporary_files(folder)
            if fault.kind == "files":  # a folder cannot be removed without a handle; the next command removes it
                left = [name for name in left if not (folder / name).is_dir() and ".part" not in str(Path(name).parent)]
            assert not left, where + f"{left} left"
            assert_limit_is_named(done, fault, where)
        self._check_outputs(folder, where, complete=done.code == 0)
        for name in self.command.keep:
            assert _contents(folder / name) == _contents(self.workspace / name), where + f"{name} has changed"
        if done.code:
            finished = self._outputs(folder).keys() == self.after.keys()
            repeated = run([*self.arguments, *more], folder)
            known = any(words in repeated.stderr for words in ("exists", "already contains recordings"))
            refused = finished and repeated.code == 2 and known  # it was complete already
            assert repeated.code == 0 or refused, where + f"then again: {repeated.stderr[-1500:]}"
            self._check_outputs(folder, where + "then again: ", complete=True)
        shutil.rmtree(folder)
        checks[f"{self.name}, {fault.kind}"] += 1
        return done

    def check_together(self, n: int) -> list[Done]:
        """Run the command several times at once: one works, others work or are refused; nothing is lost."""
        folder = self.copy()
        ended = run_together([self.arguments] * n, folder)
        where = f"{self.name}, {n} at once: "
        for done in ended:
            assert done.code in self.command.codes, where + f"exit code {done.code}\n{done.stderr[-1500:]}"
            assert_one_sentence(done, where)
        assert any(done.code == 0 for done in ended), where + ended[0].stderr
        assert not temporary_files(folder), where + f"{temporary_files(folder)} left"
        self._check_outputs(folder, where, complete=True)
        for name in self.command.keep:
            assert _contents(folder / name) == _contents(self.workspace / name), where + f"{name} has changed"
        shutil.rmtree(folder)
        checks[f"{self.name}, at once"] += 1
        return ended

    def _outputs(self, folder: Path) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for name in self.command.outputs:
            found |= {f"{name}{path}": content for path, content in _contents(folder / name).items()}
        return found

    def _check_outputs(self, folder: Path, where: str, complete: bool) -> None:
        found = self._outputs(folder)
        if complete and self.command.verify is not None:
            self.command.verify(folder)
        if complete and self.command.grows:
            return
        if complete:
            assert found.keys() == self.after.keys(), where + f"{found.keys() ^ self.after.keys()}"
        elif not self.command.partial:
            one_of = (self.before.keys(), self.after.keys())
            assert found.keys() in one_of or _is_group(found, *one_of), where + f"{found.keys() ^ self.after.keys()}"
        for path, content in found.items():
            if path in self.volatile or (self.command.partial and not complete):
                continue
            expected = (self.after[path],) if complete else (self.before.get(path), self.after.get(path))
            assert content in expected, where + f"{path} has neither its old nor its new content"


def _is_group(found: Any, before: Any, after: Any) -> bool:
    """Whether only a summary is missing, which is removed before the files that it describes are replaced."""
    return set(found) <= set(after) and set(before) - set(found) <= {p for p in before if p.endswith(".json")}


def assert_one_sentence(done: Done, where: str) -> None:
    assert "Traceback" not in done.stderr, where + done.stderr[-2500:]
    if done.code == 2:
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, where + done.stderr[-1500:]


def assert_limit_is_named(done: Done, fault: Fault, where: str) -> None:
    """A file that could not be opened for lack of handles or memory is not called damaged."""
    named = {"files": "raise the limit on open files", "memory": "not enough memory"}.get(fault.kind, "")
    if done.code == 2:
        assert named in done.stderr and "panicked" not in done.stderr, where + done.stderr[-1500:]


def temporary_files(folder: Path) -> list[str]:
    endings = (".part", ".partial", ".new", ".old", ".tmp")
    return [str(p.relative_to(folder)) for p in folder.rglob(".*") if p.name.endswith(endings)]


def _contents(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {
        f"/{p.relative_to(path)}": p.read_bytes()
        for p in sorted(path.rglob("*"))
        if p.is_file() and not any(part.startswith(".") for part in p.relative_to(path).parts)
    }


def _set_modes(folder: Path, of_folders: int, of_files: int) -> None:
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            os.chmod(path, of_folders if path.is_dir() else of_files)
