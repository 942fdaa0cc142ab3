"""Ten-seed candidate lists of two participants: every combination method, with paired differences.

python benchmarks/combine.py --lists ../shared/real/words/ensembles [--lm MODEL] [--json]

`transferred` uses weights fitted on the other participant's lists only, `cross-fitted` weights from the other folds of
the same list; `packaged` uses the default weights, which were fitted on both participants' lists. Differences are from
the linear method without a language model and with weights of the same kind (for `mbr`: none), with 95 % intervals by
paired bootstrap over trials.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.evaluation.choose import Candidates, cross_fit, fit_weights, mbr
from arcuate.evaluation.combine import FEATURES, feature_names, measure_features, summarise_combination, vote_weights
from arcuate.evaluation.sentences import Sentence, read_decodings, score_sentences
from arcuate.evaluation.significance import score_difference
from arcuate.language.ngram.open import open_model

SETS = ("t15_val_bi", "t15_val_uni", "t12_test_bi", "t12_test_uni")
LENGTH = 3  # column of the feature that may be negative


def linear_texts(
    name: str, title: str, features: Mapping[str, list[Candidates]], prior: Sequence[float]
) -> dict[str, list[str]]:
    """Texts of a set by transferred, cross-fitted and packaged weights."""
    own, participant = features[name], name.split("_")[0]
    pool = [trial for other, trials in features.items() if other.split("_")[0] != participant for trial in trials]
    transferred = fit_weights(pool, prior, [LENGTH])
    return {
        f"{title}, transferred": [trial.choose(transferred) for trial in own],
        f"{title}, cross-fitted": cross_fit(own, [None] * len(own), prior, [LENGTH]).texts,
        f"{title}, packaged": [trial.choose(np.array(prior)) for trial in own],
    }


def make_rows(sentences: Sequence[Sentence], texts: Mapping[str, list[str]], name: str) -> list[dict[str, Any]]:
    """Results of all methods on one set."""
    words = {method: [t.score.words for t in score_sentences(sentences, own)] for method, own in texts.items()}
    rows = []
    for method, own in texts.items():
        summary = summarise_combination(sentences, own).to_dict()
        rows.append({"set": name, "method": method} | {k: v for k, v in summary.items() if "wer" in k or "best" in k})
        baseline = f"linear, {method.rpartition(', ')[2]}"
        if baseline != method and baseline in words and (gap := score_difference(words[method], words[baseline])):
            rows[-1]["difference"] = [gap.rate, gap.low, gap.high, gap.p]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lists", type=Path, required=True, help="folder with the four .jsonl files")
    parser.add_argument("--lm", help="an n-gram model")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sets = {name: read_decodings(arguments.lists / f"{name}.jsonl") for name in SETS}
    models = {"linear": None} | ({"linear + n-gram": open_model(arguments.lm)} if arguments.lm else {})
    texts: dict[str, dict[str, list[str]]] = {
        name: {"mbr": [mbr(s.texts, vote_weights(s)) for s in sentences]} for name, sentences in sets.items()
    }
    for title, lm in models.items():
        features = {name: [measure_features(s, lm) for s in sentences] for name, sentences in sets.items()}
        for name in sets:
            texts[name] |= linear_texts(name, title, features, [FEATURES[f] for f in feature_names(lm)])
    rows = [row for name, sentences in sets.items() for row in make_rows(sentences, texts[name], name)]
    if arguments.json:
        print(json.dumps(rows))
        return
    for name in SETS:
        own = [row for row in rows if row["set"] == name]
        print(
            f"\n{name}: best single {100 * own[0]['best_single_wer']:.2f} %, oracle {100 * own[0]['oracle_wer']:.2f} %"
        )
        for row in own:
            rates = "{:6.2f} %  ({:.2f}–{:.2f})".format(*(100 * row[key] for key in ("wer", "wer_low", "wer_high")))
            change = (
                "{:+6.2f} ({:+.2f} to {:+.2f})".format(*(100 * v for v in row["difference"][:3]))
                if "difference" in row
                else ""
            )
            print(f"  {row['method']:32s} {rates}  {change}")


if __name__ == "__main__":
    main()
