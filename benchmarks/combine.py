"""Ten-seed candidate lists of two participants: every way of combining them, with paired significance.

python benchmarks/combine.py --lists ../shared/real/words/ensembles [--lm MODEL] [--llm MODEL] [--json]

`transferred` uses weights fitted on the other participant's lists only, `cross-fitted` weights from the other folds of
the same list; `packaged` uses the weights in the program, which both participants' lists went into.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from arcuate.evaluation.combine.choose import (
    choose_by_features,
    choose_by_risk,
    choose_by_vote,
    n_words,
    summarise_choice,
    vote_weights,
    word_errors,
)
from arcuate.evaluation.combine.fit import (
    Choice,
    Feature,
    features_of,
    fit_weights,
    known_feature,
    ngram_feature,
    prior_of,
)
from arcuate.evaluation.combine.lists import CandidateList, read_lists
from arcuate.evaluation.combine.mbr import minimum_risk
from arcuate.language.ngram.io import open_model

SETS = ("t15_val_bi", "t15_val_uni", "t12_test_bi", "t12_test_uni")


def choices(lists: Sequence[CandidateList], extra: Sequence[Feature]) -> list[Choice]:
    """All labelled lists of one set as the fit takes them."""
    made = []
    for found, votes in zip(lists, vote_weights(lists), strict=True):
        table = features_of(found, votes, extra)
        if found.reference is not None and table.texts:
            made.append(
                Choice(table.values, word_errors(found.reference, table.texts), n_words(found.reference))
            )
    return made


def ways(
    name: str, sets: dict[str, list[CandidateList]], extras: dict[str, list[Feature]]
) -> dict[str, list[str]]:
    """Texts by every method."""
    lists = sets[name]
    equal = vote_weights(lists)
    texts = {
        "plain word-MBR": [minimum_risk(found.texts, letter_share=0.0) for found in lists],
        "mbr": choose_by_risk(lists, equal),
        "mbr, voters by agreement": choose_by_risk(lists, vote_weights(lists, "agreement")),
        "rover": choose_by_vote(lists, equal),
    }
    others = [other for other in sets if other.split("_")[0] != name.split("_")[0]]
    for title, extra in extras.items():
        _, prior = prior_of(extra)
        pool = [choice for other in others for choice in choices(sets[other], extra)]
        if pool:
            weights = fit_weights(pool, prior, free=[3])
            texts[f"linear{title}, transferred"] = choose_by_features(
                lists, equal, extra, weights=weights
            ).texts
        texts[f"linear{title}, cross-fitted"] = choose_by_features(lists, equal, extra).texts
        packaged = np.array(prior)
        texts[f"linear{title}, packaged"] = choose_by_features(lists, equal, extra, weights=packaged).texts
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lists", type=Path, required=True, help="folder with the four .jsonl files")
    parser.add_argument("--lm", help="an n-gram model")
    parser.add_argument("--llm", type=Path, help="a causal language model")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sets = {name: read_lists(arguments.lists / f"{name}.jsonl") for name in SETS}
    extras: dict[str, list[Feature]] = {"": []}
    if arguments.lm:
        extras[" + n-gram"] = [ngram_feature(open_model(arguments.lm))]
    if arguments.llm:
        from arcuate.evaluation.rescoring.causal import load_causal, score_sentences

        texts = sorted({t for lists in sets.values() for found in lists for t in found.texts})
        scores = score_sentences(load_causal(arguments.llm), texts)
        extras[" + causal"] = [known_feature("causal", 0.2, dict(zip(texts, scores.tolist(), strict=True)))]
    rows = []
    for name, lists in sets.items():
        begun = time.process_time()
        for method, texts_ in ways(name, sets, extras).items():
            summary = summarise_choice(lists, texts_, lm=None)
            gap = summary["against_best_single"]
            rows.append(
                {"set": name, "method": method, "wer": summary["wer"], "low": summary["wer_low"]}
                | {"high": summary["wer_high"], "best_single": summary["best_single_wer"], "p": gap["p"]}
                | {"single_mean": summary["single_wer_mean"], "oracle": summary["oracle_wer"]}
            )
        sys.stderr.write(f"{name}: {time.process_time() - begun:.0f} s\n")
    if arguments.json:
        print(json.dumps(rows))
        return
    for name in SETS:
        mine = [row for row in rows if row["set"] == name]
        first = mine[0]
        print(
            f"\n{name}: single {100 * first['single_mean']:.2f} % (best {100 * first['best_single']:.2f} %),"
            f" oracle {100 * first['oracle']:.2f} %"
        )
        for row in mine:
            interval = f"{100 * row['low']:.2f}–{100 * row['high']:.2f}"
            print(f"  {row['method']:38s} {100 * row['wer']:6.2f} %  ({interval})  p = {row['p']:.4f}")


if __name__ == "__main__":
    main()
