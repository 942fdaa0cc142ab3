"""Ten-seed candidate lists of two participants: every combination method, with paired significance tests.

python benchmarks/combine.py --lists ../shared/real/words/ensembles [--lm MODEL] [--llm MODEL] [--json]

`transferred` uses weights fitted on the other participant's lists only, `cross-fitted` weights from the other folds of
the same list; `packaged` uses the default weights, which were fitted on both participants' lists.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from arcuate.evaluation.candidates import CandidateList, mbr, read_candidates, rover, vote_weights
from arcuate.evaluation.combine import choose_by_vote, summarise_combination
from arcuate.evaluation.linear import (
    Feature,
    FittingExample,
    causal_feature,
    choose_linear,
    feature_weights,
    fit_weights,
    make_example,
    make_table,
    ngram_feature,
)
from arcuate.language.ngram.io import open_model

SETS = ("t15_val_bi", "t15_val_uni", "t12_test_bi", "t12_test_uni")


def fitting_examples(lists: Sequence[CandidateList], extra: Sequence[Feature]) -> list[FittingExample]:
    """All labelled lists of one set."""
    examples = []
    for candidates, votes in zip(lists, vote_weights(lists), strict=True):
        table = make_table(candidates, votes, extra)
        if example := make_example(table.values, table.texts, candidates.reference):
            examples.append(example)
    return examples


def combine_all(
    name: str, sets: dict[str, list[CandidateList]], extras: dict[str, list[Feature]]
) -> dict[str, list[str]]:
    """Texts by every method."""
    lists = sets[name]
    equal = vote_weights(lists)
    texts = {
        "plain word-MBR": [mbr(candidates.texts, letter_cost=0.0) for candidates in lists],
        "mbr": choose_by_vote(mbr, lists, equal),
        "mbr, votes by agreement": choose_by_vote(mbr, lists, vote_weights(lists, "agreement")),
        "rover": choose_by_vote(rover, lists, equal),
    }
    others = [other for other in sets if other.split("_")[0] != name.split("_")[0]]
    for title, extra in extras.items():
        _, prior = feature_weights(extra)
        pool = [example for other in others for example in fitting_examples(sets[other], extra)]
        if pool:
            weights = fit_weights(pool, prior, unbounded=[3])
            texts[f"linear{title}, transferred"] = choose_linear(lists, equal, extra, weights=weights).texts
        texts[f"linear{title}, cross-fitted"] = choose_linear(lists, equal, extra).texts
        packaged = np.array(prior)
        texts[f"linear{title}, packaged"] = choose_linear(lists, equal, extra, weights=packaged).texts
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lists", type=Path, required=True, help="folder with the four .jsonl files")
    parser.add_argument("--lm", help="an n-gram model")
    parser.add_argument("--llm", type=Path, help="a causal language model")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sets = {name: read_candidates(arguments.lists / f"{name}.jsonl") for name in SETS}
    extras: dict[str, list[Feature]] = {"": []}
    if arguments.lm:
        extras[" + n-gram"] = [ngram_feature(open_model(arguments.lm))]
    if arguments.llm:
        texts = [t for lists in sets.values() for candidates in lists for t in candidates.texts]
        extras[" + causal"] = [causal_feature(arguments.llm, texts)]
    rows = []
    for name, lists in sets.items():
        started = time.process_time()
        for method, texts_ in combine_all(name, sets, extras).items():
            summary = summarise_combination(lists, texts_, lm=None).to_dict()
            gap = summary["against_best_single"]
            rows.append(
                {"set": name, "method": method, "wer": summary["wer"], "low": summary["wer_low"]}
                | {"high": summary["wer_high"], "best_single": summary["best_single_wer"], "p": gap["p"]}
                | {"single_mean": summary["single_wer_mean"], "oracle": summary["oracle_wer"]}
            )
        sys.stderr.write(f"{name}: {time.process_time() - started:.0f} s\n")
    if arguments.json:
        print(json.dumps(rows))
        return
    for name in SETS:
        own = [row for row in rows if row["set"] == name]
        first = own[0]
        print(
            f"\n{name}: single {100 * first['single_mean']:.2f} % (best {100 * first['best_single']:.2f} %),"
            f" oracle {100 * first['oracle']:.2f} %"
        )
        for row in own:
            interval = f"{100 * row['low']:.2f}–{100 * row['high']:.2f}"
            print(f"  {row['method']:38s} {100 * row['wer']:6.2f} %  ({interval})  p = {row['p']:.4f}")


if __name__ == "__main__":
    main()
