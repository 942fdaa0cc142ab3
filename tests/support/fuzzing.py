"""Fuzzing of file readers: damaged files are read in a watched child process, and the outcome of each is recorded.

A reader may accept a damaged file whose content it can still use, or raise `UserError`. Anything else is a defect:
another exception, a signal, more than 20 s of CPU time or more than 2 GB of memory.
"""

import copy
import json
import multiprocessing
import os
import random
import resource
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from arcuate.errors import UserError
from support.cases import cases, many

MAX_SECONDS = 20
MAX_BYTES = 2 * 2**30
_EXCERPT = 1200


@dataclass
class Outcomes:
    """Outcomes of the inputs of one format."""

    counts: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)

    def check(self, minimum_refused: float = 0.0) -> None:
        """Fail with the first defects; also if hardly any input was refused, because then nothing was tested."""
        assert not self.defects, f"{len(self.defects)} of {self.total} inputs: " + "\n\n".join(self.defects[:3])
        assert self.counts["refused"] >= minimum_refused * self.total, self.counts

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def mutate(content: bytes, rng: random.Random) -> bytes:
    """One to eight random changes: flipped bits, replaced, deleted, repeated or inserted bytes, truncation."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        if not data:
            break
        at = rng.randrange(len(data))
        kind = rng.randrange(8)
        if kind <= 2:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 3:
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 4:
            del data[at : at + rng.choice((1, 2, 4, 8, 64, 512))]
        elif kind == 5:
            data[at:at] = data[at : at + rng.choice((1, 4, 8, 64))]
        elif kind == 6:
            data[at : at + 8] = rng.choice(_INTERESTING)
        elif rng.random() < 0.3:
            del data[at:]
    return bytes(data)


_INTERESTING = (
    b"\xff" * 8, b"\x00" * 8, b"\x00\x00\x00\x80", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x00\x00\x00\x00\x80",
    b"nan", b"-1", b"1e999", b"99999999999999999999", b"\n", b'"', b"{", b"[", b"\xed\xa0\x80", b"null", b"\x1b[2J",
)  # fmt: skip


def fuzz(read: Callable[[bytes, Path], object], inputs: Iterable[bytes], folder: Path) -> Outcomes:
    """Call `read(content, folder)` for every input, in child processes that are replaced when one dies.

    `read` writes the content to a file of its choice in `folder` and reads it with the function under test.
    """
    outcomes = Outcomes()
    contents = list(inputs)
    folder.mkdir(parents=True, exist_ok=True)
    position = 0
    while position < len(contents):
        position = _run_child(read, contents, position, folder, outcomes)
    if many():
        print(f"\nfuzz {folder.name}: {outcomes.total} inputs, {dict(outcomes.counts)}")
    return outcomes


def _run_child(
    read: Callable[[bytes, Path], object], contents: Sequence[bytes], start: int, folder: Path, outcomes: Outcomes
) -> int:
    """Read inputs from `start` on until the child ends; returns the position after the last one that was tried."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_read_all, args=(read, contents, start, folder, sender))
    child.start()
    sender.close()
    position = start
    try:
        while True:
            kind, detail = receiver.recv()
            outcomes.counts[kind] += 1
            if kind == "defect":
                outcomes.defects.append(f"{contents[position][:60]!r} ({len(contents[position])} bytes)\n{detail}")
            position += 1
    except EOFError:
        pass
    child.join()
    if position < len(contents):
        reason = f"more than {MAX_SECONDS} s" if child.exitcode == -signal.SIGPROF else f"exit code {child.exitcode}"
        keep = os.environ.get("ARCUATE_FUZZ_KEEP")
        if keep:
            Path(keep, f"input-{position}-{folder.name}").write_bytes(contents[position])
        outcomes.counts["defect"] += 1
        outcomes.defects.append(f"{contents[position][:60]!r} ({len(contents[position])} bytes): {reason}")
        position += 1
    return position


def _read_all(read: Callable, contents: Sequence[bytes], start: int, folder: Path, sender: object) -> None:
    # writable memory; the address space that a JavaScript engine reserves for charts is never used
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + MAX_BYTES, used + MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for content in contents[start:]:
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # its default action ends the process, also inside C code
        sender.send(_outcome(read, content, folder))  # type: ignore[attr-defined]


def _outcome(read: Callable, content: bytes, folder: Path) -> tuple[str, str]:
    try:
        read(content, folder)
    except UserError as error:
        sentence = str(error)
        plain = all(c.isprintable() for c in sentence)  # as `UserError` ensures, and without line breaks
        return ("refused", sentence) if plain and sentence else ("defect", f"not one printable line: {sentence!r}")
    except BaseException:  # noqa: BLE001 - every other exception is a defect to report
        return "defect", traceback.format_exc()[-_EXCERPT:]
    return "read", ""


def damaged(seeds: Sequence[bytes], share: float = 1.0, seed: int = 0) -> Iterable[bytes]:
    """Mutated copies of the given files: a share of `--cases` in all."""
    rng = random.Random(seed)
    for i in range(cases(share)):
        yield mutate(seeds[i % len(seeds)], rng)


# --- inputs made by hypothesis -------------------------------------------------------------------------------------


def generated(strategy: st.SearchStrategy[bytes], share: float = 1.0) -> list[bytes]:
    """Examples of a strategy, the same ones in every run."""
    found: list[bytes] = []

    @settings(
        max_examples=cases(share),
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    @given(strategy)
    def collect(content: bytes) -> None:
        found.append(content)

    collect()
    return found


@st.composite
def edited_bytes(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """A file with a few pieces overwritten, inserted, moved or cut out."""
    data = bytearray(draw(st.sampled_from(list(seeds))))
    for _ in range(draw(st.integers(1, 4))):
        at, length = draw(st.integers(0, len(data))), draw(st.sampled_from((1, 2, 4, 8, 16, 256)))
        match draw(st.sampled_from(("overwrite", "insert", "cut", "move"))):
            case "overwrite":
                piece = draw(st.binary(max_size=16) | st.sampled_from(_INTERESTING))
                data[at : at + len(piece)] = piece
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=16) | st.sampled_from(_INTERESTING))
            case "cut":
                del data[at : at + length]
            case "move":
                start = draw(st.integers(0, len(data)))
                data[at : at + length] = data[start : start + length]
    return bytes(data)


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["", "nan", "-1", "../../x", "\x1b[2J", "é" * 300, "9" * 400])
)
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)
)


@st.composite
def edited_tree(draw: st.DrawFn, tree: Any) -> Any:
    """A document of mappings and lists with one to three entries replaced, removed, repeated or renamed."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        owner, key = tree, None
        while isinstance(owner, (dict, list)) and owner:
            key = draw(st.sampled_from(list(owner) if isinstance(owner, dict) else range(len(owner))))
            if not isinstance(owner[key], (dict, list)) or not owner[key] or draw(st.integers(0, 3)) == 0:
                break
            owner = owner[key]
        if key is None or not owner:
            return draw(_VALUES)
        match draw(st.sampled_from(("replace", "replace", "remove", "repeat", "rename"))):
            case "replace":
                owner[key] = draw(_VALUES)
            case "remove":
                del owner[key]
            case "repeat" if isinstance(owner, list):
                owner.insert(key, owner[key])
            case _ if isinstance(owner, dict):
                name = draw(st.text(max_size=5) | st.sampled_from([*map(str, owner)]))
                owner[name] = owner.pop(key)
    return tree


def edited_json(content: bytes) -> st.SearchStrategy[bytes]:
    """A JSON document whose values have other types, ranges and names."""
    return edited_tree(json.loads(content)).map(lambda tree: json.dumps(tree).encode())


def edited_jsonl(content: bytes) -> st.SearchStrategy[bytes]:
    """JSON lines whose values have other types, ranges and names."""
    rows = [json.loads(line) for line in content.splitlines()]
    return edited_tree(rows).map(
        lambda tree: "".join(json.dumps(row) + "\n" for row in (tree if isinstance(tree, list) else [tree])).encode()
    )


def edited_yaml(content: bytes) -> st.SearchStrategy[bytes]:
    """A YAML document whose values have other types, ranges and names."""
    return edited_tree(yaml.safe_load(content)).map(
        lambda tree: yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "replace")
    )
