"""Delayed fusion of a causal language model against n-best rescoring, on frame scores with references.

    python benchmarks/delayed_fusion.py SCORES.npz REFS.jsonl --lexicon FILE --lm FILE --llm MODEL [--out FILE.jsonl]

Every trial is searched without the causal model, with it at the end (rescoring of the n best), and with it every few
words. The share of the causal model, alpha, is chosen for each half of the trials on the other half; the search itself
uses `--alpha`. Also printed: CPU time per sentence, and the tokens that pass through the causal model. Trials are
searched in random order, so that the first ones are a sample of all; with --out each is one line of that file and is
not searched again.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.word_search.fusion import FusedWordSearch
from arcuate.evaluation.causal import CausalPrefixScorer, load_causal
from arcuate.evaluation.decode import SearchSource, TrialSource, open_task
from arcuate.evaluation.metrics import Score, score_text
from arcuate.evaluation.significance import score_difference
from arcuate.files import DECODINGS, append_jsonl, read_jsonl

ALPHAS = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


@dataclass
class Counted:
    """Tokens that pass through the model."""

    model: torch.nn.Module
    n: int = 0

    def __call__(self, *, input_ids: torch.Tensor, **options: object) -> object:
        self.n += input_ids.numel()
        return self.model(input_ids=input_ids, **options)

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)


def best_text(n_best: list[Hypothesis], alpha: float, lm_weight: float) -> str:
    def total(h: Hypothesis) -> float:
        language = (1 - alpha) * h.scores["lm"] + alpha * h.scores["llm"]
        return h.scores["acoustic"] + h.scores["bonus"] + lm_weight * language

    return max(n_best, key=total).text or "" if n_best else ""


def cross_fitted(lists: list[list[Hypothesis]], texts: list[str], lm_weight: float) -> tuple[list[Score], list[float]]:
    """Word errors of every trial, with the alpha that has the fewest errors on the other half."""
    by_alpha = [
        [score_text(text, best_text(n_best, alpha, lm_weight)).words for n_best, text in zip(lists, texts, strict=True)]
        for alpha in ALPHAS
    ]
    halves = [np.arange(len(texts)) % 2 == k for k in (0, 1)]
    errors = np.array([[s.errors for s in scores] for scores in by_alpha])
    chosen = [int(errors[:, halves[1 - k]].sum(axis=1).argmin()) for k in (0, 1)]
    return [by_alpha[chosen[i % 2]][i] for i in range(len(texts))], [ALPHAS[c] for c in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scores", type=Path)
    parser.add_argument("references", type=Path)
    parser.add_argument("--lexicon", required=True)
    parser.add_argument("--lm", required=True)
    parser.add_argument("--llm", type=Path, required=True)
    parser.add_argument("--trials", type=int, help="number of trials; default all")
    parser.add_argument("--out", type=Path, help="file of finished trials, continued if it exists")
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--every", type=int, nargs="+", default=[2])
    parser.add_argument("--n-best", type=int, default=10)
    parser.add_argument("--beam", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = SearchSource(args.lexicon, args.lm, None, args.beam, None)
    task = open_task(TrialSource(args.scores, args.references, "val", None, "ctc"), models, None, DECODINGS, None)
    lm = load_causal(args.llm)
    counted = Counted(lm.model)
    object.__setattr__(lm, "model", counted)
    scorer = CausalPrefixScorer(lm)
    plain = FusedWordSearch(task.search, scorer, args.alpha, every=1_000_000, n_final=args.n_best)
    searches = {f"rescoring, {args.n_best} best": plain}
    for every in args.every:
        searches[f"every {every} words"] = FusedWordSearch(
            task.search, scorer, args.alpha, every=every, n_final=args.n_best
        )
    chosen = np.random.default_rng(0).permutation(len(task.trials))[: args.trials].tolist()
    finished = {row["trial"]: row for row in read_jsonl(args.out)} if args.out and args.out.exists() else {}
    texts: list[str] = []
    found: dict[str, list[list[Hypothesis]]] = {name: [] for name in searches}
    cost: dict[str, list[float]] = {name: [0.0, 0.0] for name in searches}
    for done, i in enumerate(chosen, start=1):  # all searches of a trial together, so that a stopped run is usable
        row = finished.get(i)
        if row is None:
            row = {"trial": i, "searches": {}}
            for name, search in searches.items():
                started, before = time.process_time(), counted.n
                n_best = search.search(task.trials[i], args.n_best)
                row["searches"][name] = {
                    "n_best": [{"words": list(h.words), "scores": dict(h.scores)} for h in n_best],
                    "cost": [time.process_time() - started, counted.n - before],
                }
            if args.out:
                append_jsonl(args.out, row)
        texts.append(task.references[i].text or "")
        for name in searches:
            saved = row["searches"][name]
            found[name].append([Hypothesis((), words=tuple(h["words"]), scores=h["scores"]) for h in saved["n_best"]])
            cost[name] = [a + b for a, b in zip(cost[name], saved["cost"], strict=True)]
        if done == len(chosen) or (i not in finished and done % 20 == 0):
            report(found, texts, cost, task.search.settings.lm_weight)


def report(
    found: dict[str, list[list[Hypothesis]]], texts: list[str], cost: dict[str, list[float]], lm_weight: float
) -> None:
    n = len(texts)
    first = next(iter(found.values()))
    before = [score_text(t, best_text(lists, 0.0, lm_weight)).words for t, lists in zip(texts, first, strict=True)]
    rate = lambda scores: 100 * sum(s.errors for s in scores) / sum(s.length for s in scores)
    print(f"--- {n} trials, {sum(s.length for s in before)} words; n-gram alone {rate(before):.2f} %", flush=True)
    rescored = None
    for name, lists in found.items():
        scores, alphas = cross_fitted(lists, texts, lm_weight)
        oracle = sum(
            min((score_text(t, h.text or "").words.errors for h in n_best), default=len(t.split()))
            for t, n_best in zip(texts, lists, strict=True)
        )
        best = 100 * oracle / sum(s.length for s in before)
        line = f"{name:24} {rate(scores):6.2f} %  alpha {alphas}  oracle {best:.2f} %"
        line += f"  {cost[name][0] / n:.2f} s, {cost[name][1] / n:.0f} tokens per sentence"
        difference = score_difference(scores, before if rescored is None else rescored)
        if difference is not None:
            line += (
                f"  {'against the n-gram' if rescored is None else 'against rescoring'} {100 * difference.rate:+.2f}"
            )
            line += f" ({100 * difference.low:+.2f} to {100 * difference.high:+.2f}), p = {difference.p:.4f}"
        print(line, flush=True)
        rescored = scores if rescored is None else rescored


if __name__ == "__main__":
    main()
