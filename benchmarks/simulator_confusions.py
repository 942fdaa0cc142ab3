"""Errors of a decoder trained on simulated recordings against errors of real decoders. Nothing is fitted.

    python benchmarks/simulator_confusions.py RESULTS.jsonl [--markdown FILE]

RESULTS.jsonl: one line per trial with `session`, `reference` and `hypothesis` (lists of phoneme names), as
`arcuate evaluate` writes them. Real tables are read from `../shared/real`; without them only the simulated
side is printed.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rapidfuzz.distance import Levenshtein

SHARED = Path(__file__).resolve().parents[2] / "shared" / "real"
CONFUSIONS = SHARED / "real_phoneme_confusions.json"
BY_SESSION = SHARED / "T15_val_PER_by_session.json"
DELETED, INSERTED = "<del>", "<ins>"


@dataclass(frozen=True)
class Errors:
    """A confusion table: (reference, decoded) to count, with <del> and <ins> as partners."""

    name: str
    counts: Counter[tuple[str, str]]

    @property
    def n_phonemes(self) -> int:
        return sum(n for (expected, _), n in self.counts.items() if expected != INSERTED)

    def rate(self, kind: str) -> float:
        return sum(n for pair, n in self.counts.items() if kind_of(pair) == kind) / self.n_phonemes

    @property
    def per(self) -> float:
        return sum(self.rate(kind) for kind in ("S", "D", "I"))

    def confusions(self) -> Counter[tuple[str, str]]:
        """Substitutions, both directions of a pair together."""
        pairs: Counter[tuple[str, str]] = Counter()
        for (expected, decoded), n in self.counts.items():
            if kind_of((expected, decoded)) == "S":
                pairs[(min(expected, decoded), max(expected, decoded))] += n
        return pairs

    def per_phoneme(self) -> dict[str, float]:
        """Error rate of each phoneme: fraction of its tokens decoded as another or deleted."""
        expected: Counter[str] = Counter()
        right: Counter[str] = Counter()
        for (phoneme, decoded), n in self.counts.items():
            if phoneme != INSERTED:
                expected[phoneme] += n
                right[phoneme] += n * (phoneme == decoded)
        return {phoneme: 1 - right[phoneme] / n for phoneme, n in expected.items()}


def kind_of(pair: tuple[str, str]) -> str:
    expected, decoded = pair
    return "I" if expected == INSERTED else "D" if decoded == DELETED else "S" if expected != decoded else "="


def align(reference: Sequence[str], hypothesis: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Pairs (reference, decoded) of one best alignment."""
    for step in Levenshtein.opcodes(reference, hypothesis):
        if step.tag == "insert":
            yield from ((INSERTED, decoded) for decoded in hypothesis[step.dest_start : step.dest_end])
        elif step.tag == "delete":
            yield from ((expected, DELETED) for expected in reference[step.src_start : step.src_end])
        else:
            yield from zip(
                reference[step.src_start : step.src_end],
                hypothesis[step.dest_start : step.dest_end],
                strict=True,
            )


def read_results(path: Path) -> tuple[Errors, dict[str, float]]:
    """The confusion table of a run and its error rate in every session."""
    counts: Counter[tuple[str, str]] = Counter()
    edits: dict[str, int] = defaultdict(int)
    lengths: dict[str, int] = defaultdict(int)
    for line in path.read_text(encoding="utf-8").splitlines():
        trial = json.loads(line)
        pairs = list(align(trial["reference"], trial["hypothesis"]))
        counts.update(pairs)
        edits[trial["session"]] += sum(kind_of(pair) != "=" for pair in pairs)
        lengths[trial["session"]] += len(trial["reference"])
    return Errors("simulated", counts), {session: edits[session] / lengths[session] for session in edits}


def read_real() -> list[Errors]:
    """The real tables, except that of sentences seen in training, which has hardly any errors."""
    if not CONFUSIONS.is_file():
        return []
    real: list[Errors] = []
    for table in json.loads(CONFUSIONS.read_text(encoding="utf-8")):
        counts = Counter({pair(key): n for key, n in table["counts"].items()})
        name = table["name"].split(" (")[0]
        copies = sum(errors.name.startswith(name) for errors in real)
        errors = Errors(f"{name}, copy {copies + 1}" if copies else name, counts)
        if errors.per > 0.01:
            real.append(errors)
    return real


def pair(key: str) -> tuple[str, str]:
    """ "T>D", "<ins>>L" and "EH><del>" to (reference, decoded)."""
    if key.startswith(INSERTED):
        return INSERTED, key[len(INSERTED) + 1 :]
    expected, _, decoded = key.partition(">")
    return expected, decoded


def likeness(a: Errors, b: Errors) -> tuple[float, float]:
    """Rank correlation of the phonemes' error rates, and shared pairs among the 20 most confused."""
    ours, theirs = a.per_phoneme(), b.per_phoneme()
    common = sorted(set(ours) & set(theirs))
    ranks = [np.argsort(np.argsort([rates[phoneme] for phoneme in common])) for rates in (ours, theirs)]
    top = [{found for found, _ in errors.confusions().most_common(20)} for errors in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1]), len(top[0] & top[1]) / 20


def spread(rates: Iterable[float]) -> str:
    values = np.array(list(rates))
    return (
        f"{values.mean():.1%} mean, {values.min():.1%}–{values.max():.1%}, "
        f"SD over mean {values.std() / values.mean():.2f}, {len(values)} sessions"
    )


def report(run: Errors, by_session: dict[str, float], real: list[Errors]) -> str:
    lines = ["| decoder | PER | S | D | I | S : D : I |", "|---|---|---|---|---|---|"]
    for errors in (run, *real):
        parts = [errors.rate(kind) for kind in ("S", "D", "I")]
        shares = " : ".join(f"{part / errors.per:.2f}" for part in parts)
        rates = " | ".join(f"{part:.1%}" for part in parts)
        lines.append(f"| {errors.name} | {errors.per:.1%} | {rates} | {shares} |")
    lines += ["", "| decoder | most confused pairs |", "|---|---|"]
    for errors in (run, *real):
        pairs = ", ".join(f"{a}–{b}" for (a, b), _ in errors.confusions().most_common(12))
        lines.append(f"| {errors.name} | {pairs} |")
    if real:
        lines += ["", "| against | rank correlation of phoneme error rates | of the 20 worst pairs shared |"]
        lines += ["|---|---|---|"]
        for errors in real:
            correlation, shared = likeness(run, errors)
            lines.append(f"| {errors.name} | {correlation:.2f} | {shared:.0%} |")
        among = [likeness(a, b) for i, a in enumerate(real) for b in real[i + 1 :]]
        if among:
            correlation, shared = np.mean(among, axis=0)
            lines.append(f"| (real decoders among themselves, mean) | {correlation:.2f} | {shared:.0%} |")
    lines += ["", f"PER by session, simulated: {spread(by_session.values())}."]
    if BY_SESSION.is_file():
        rates = json.loads(BY_SESSION.read_text(encoding="utf-8"))
        lines.append(f"PER by session, real T15 validation: {spread(rates.values())}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a run's phoneme errors with those of real decoders.")
    parser.add_argument("results", type=Path, help="one line per trial: session, reference, hypothesis")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    arguments = parser.parse_args()
    text = report(*read_results(arguments.results), read_real())
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
