"""Ten-seed candidate lists of two participants: every combination method, with paired differences.

python benchmarks/combine.py --lists ../shared/real/words/ensembles [--lm MODEL] [--llm MODEL --llm-scores FILE]
    [--further] [--json]

`transferred` uses weights fitted on the other participant's lists only, `cross-fitted` weights from the other folds of
the same list; `packaged` uses the default weights, which were fitted on both participants' lists. Differences are from
the linear method without a language model and with weights of the same kind (for methods by vote: from `mbr`), with
95 % intervals by paired bootstrap over trials.

`--further` adds what was tried and not kept: MBR over the posterior of the linear method instead of its best candidate,
expected phoneme errors as a feature, the seeds as features, and splices, which are the likeliest paths through the
confusion network of ROVER that no decoder printed. `--llm-scores` keeps the log-probabilities of the causal model in a
file, because computing them takes minutes.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

from arcuate.data.text import text_to_tokens
from arcuate.evaluation.candidates import (
    CandidateList,
    confusion_network,
    mbr,
    read_candidates,
    rover,
    score_candidates,
    softmax,
    vote_weights,
)
from arcuate.evaluation.combine import choose_by_vote, summarise_combination
from arcuate.evaluation.linear import (
    CAUSAL_WEIGHT,
    NGRAM_WEIGHT_WITH_CAUSAL,
    Feature,
    FeatureTable,
    assign_folds,
    causal_feature,
    cross_fit,
    feature_weights,
    fit_weights,
    make_example,
    make_table,
    ngram_feature,
)
from arcuate.evaluation.significance import score_difference
from arcuate.files import read_json, write_json
from arcuate.language.ngram.open import open_model

SETS = ("t15_val_bi", "t15_val_uni", "t12_test_bi", "t12_test_uni")
N_FOLDS = 5
N_SPLICES, N_PATHS = 5, 60  # splices per trial, and paths of the confusion network that they are chosen from
PHONEME_PRIOR, SEED_PRIOR = 0.3, 0.1  # where fitting starts


@dataclass(frozen=True)
class Scored:
    """Feature tables of all trials of one set."""

    lists: Sequence[CandidateList]
    tables: Sequence[FeatureTable]

    @property
    def examples(self) -> list[Any]:
        pairs = zip(self.lists, self.tables, strict=True)
        return [make_example(table.values, table.texts, c.reference) for c, table in pairs]


@dataclass(frozen=True)
class Variant:
    """One choice of features: where fitting starts, weights that may be negative, and the tables of all sets."""

    prior: Sequence[float]
    unbounded: Sequence[int]
    sets: Mapping[str, Scored]
    packaged: bool = True  # whether `prior` are the packaged weights


def linear_variant(sets: Mapping[str, list[CandidateList]], extra: Sequence[Feature]) -> Variant:
    """The linear method of `arcuate combine`."""
    names, prior = feature_weights(extra)
    scored = {
        name: Scored(lists, [make_table(c, votes, extra) for c, votes in zip(lists, vote_weights(lists), strict=True)])
        for name, lists in sets.items()
    }
    return Variant(prior, [names.index("length")], scored)


def with_columns(variant: Variant, add: Any, priors: Sequence[float]) -> Variant:
    """Further features: `add(candidates, texts)` gives columns (n, k)."""
    sets = {}
    for name, own in variant.sets.items():
        tables = [
            replace(table, values=np.hstack([table.values, add(c, table.texts)]))
            for c, table in zip(own.lists, own.tables, strict=True)
        ]
        sets[name] = replace(own, tables=tables)
    return replace(variant, prior=[*variant.prior, *priors], sets=sets, packaged=False)


def phoneme_agreement(candidates: CandidateList, texts: Sequence[str]) -> np.ndarray:
    """Negative expected phoneme errors of each text against all candidates. (n, 1)"""
    spelled = {text: "".join(map(chr, text_to_tokens(text)[0])) for text in (*texts, *candidates.texts)}
    own, others = ([spelled[text] for text in group] for group in (texts, candidates.texts))
    return -cdist(own, others, scorer=Levenshtein.distance, dtype=np.int32).mean(axis=1, keepdims=True)


def seed_votes(candidates: CandidateList, texts: Sequence[str]) -> np.ndarray:
    """Whether each seed decoded the text. (n, seeds)"""
    return np.array([[float(text == other) for other in candidates.texts] for text in texts])


def splices_of(candidates: CandidateList) -> list[str]:
    """The likeliest texts that combine words of several candidates and that no decoder printed."""
    paths: list[tuple[tuple[str, ...], float]] = [((), 0.0)]
    for slot in confusion_network(candidates.texts):
        votes = sum(slot.values())
        longer = [
            ((*words, word) if word else words, log_prob + np.log(vote / votes))
            for words, log_prob in paths
            for word, vote in slot.items()
        ]
        paths = sorted(longer, key=lambda path: -path[1])[:N_PATHS]
    texts = dict.fromkeys(" ".join(words) for words, _ in paths)
    return [text for text in texts if text not in candidates.texts][:N_SPLICES]


def splice_variant(sets: Mapping[str, list[CandidateList]], extra: Sequence[Feature]) -> Variant:
    """The linear method with splices as further candidates, which have half a vote in `share` and none elsewhere."""
    names, prior = feature_weights(extra)
    scored = {}
    for name, lists in sets.items():
        tables = []
        for c in lists:
            texts = (*c.texts, *splices_of(c))
            votes = np.array([1.0] * len(c.texts) + [0.0] * (len(texts) - len(c.texts)))
            table = make_table(replace(c, texts=texts), votes, extra)
            share = names.index("share")
            table.values[:, share] = np.maximum(table.values[:, share], np.log(0.5 / len(c.texts)))
            tables.append(table)
        scored[name] = Scored(lists, tables)
    return Variant(prior, [names.index("length")], scored, packaged=False)


def choose_best(table: FeatureTable, weights: np.ndarray) -> str:
    return table.choose(weights)


def choose_by_risk(table: FeatureTable, weights: np.ndarray) -> str:
    """MBR decoding with the softmax of the weighted sums as the probabilities of the candidates."""
    return mbr(table.texts, softmax(table.values @ weights), letter_cost=0.0)


def linear_texts(name: str, title: str, variant: Variant, choose: Any) -> dict[str, list[str]]:
    """Texts of a set by transferred, cross-fitted and, if there are, packaged weights."""
    own = variant.sets[name]
    participant = name.split("_")[0]
    pool = [e for other, s in variant.sets.items() if other.split("_")[0] != participant for e in s.examples if e]
    transferred = fit_weights(pool, variant.prior, variant.unbounded)
    folds = assign_folds([c.session for c in own.lists], N_FOLDS)
    by_trial, _ = cross_fit(own.examples, folds, variant.prior, variant.unbounded)
    found = {
        f"{title}, transferred": [choose(table, transferred) for table in own.tables],
        f"{title}, cross-fitted": [choose(t, w) for t, w in zip(own.tables, by_trial, strict=True)],
    }
    if variant.packaged and choose is choose_best:
        found[f"{title}, packaged"] = [choose(table, np.array(variant.prior)) for table in own.tables]
    return found


def combine_all(
    name: str, lists: Sequence[CandidateList], variants: Mapping[str, Variant], further: bool
) -> dict[str, list[str]]:
    """Texts of one set by every method."""
    equal = vote_weights(lists)
    texts = {
        "mbr": choose_by_vote(mbr, lists, equal),
        "plain word-MBR": [mbr(candidates.texts, letter_cost=0.0) for candidates in lists],
        "mbr, votes by agreement": choose_by_vote(mbr, lists, vote_weights(lists, "agreement")),
        "rover": choose_by_vote(rover, lists, equal),
    }
    for title, variant in variants.items():
        texts |= linear_texts(name, title, variant, choose_best)
        if further and variant.packaged:
            texts |= linear_texts(name, f"{title}, MBR", variant, choose_by_risk)
    return texts


def baseline_of(method: str) -> str:
    """The method that another one is compared with."""
    kind = method.rpartition(", ")[2]
    return f"linear, {kind}" if kind in ("transferred", "cross-fitted", "packaged") else "mbr"


def causal_scores(model: Path, texts: Iterable[str], file: Path | None) -> Feature:
    """The feature of a causal model; log-probabilities that `file` has are not computed again."""
    known: dict[str, float] = read_json(file) if file and file.is_file() else {}
    distinct = sorted(set(texts))
    if missing := [text for text in distinct if text not in known]:
        known |= dict(zip(missing, causal_feature(model, missing).score(missing).tolist(), strict=True))
        if file:
            write_json(file, known)
    return Feature("causal", CAUSAL_WEIGHT, lambda wanted: np.array([known[text] for text in wanted]))


def make_variants(arguments: argparse.Namespace, sets: Mapping[str, list[CandidateList]]) -> dict[str, Variant]:
    """All choices of features that the options ask for, by name."""
    lm = open_model(arguments.lm) if arguments.lm else None
    extras: dict[str, list[Feature]] = {"linear": []}
    if lm:
        extras["linear + n-gram"] = [ngram_feature(lm)]
    if arguments.llm:
        texts = [t for lists in sets.values() for c in lists for t in c.texts]
        if arguments.further:
            texts += [t for lists in sets.values() for c in lists for t in splices_of(c)]
        causal = causal_scores(arguments.llm, texts, arguments.llm_scores)
        extras["linear + causal"] = [causal]
        if lm:
            extras["linear + n-gram + causal"] = [ngram_feature(lm, NGRAM_WEIGHT_WITH_CAUSAL), causal]
    variants = {title: linear_variant(sets, extra) for title, extra in extras.items()}
    if arguments.further:
        n_seeds = len(next(iter(sets.values()))[0].texts)
        for title in dict.fromkeys((next(iter(extras)), list(extras)[-1])):  # without, and with all language models
            plain, extra = variants[title], extras[title]
            variants[f"{title} + phonemes"] = with_columns(plain, phoneme_agreement, [PHONEME_PRIOR])
            variants[f"{title} + seeds"] = with_columns(plain, seed_votes, [SEED_PRIOR] * n_seeds)
            variants[f"{title}, splices"] = splice_variant(sets, extra)
    return variants


def make_rows(name: str, lists: Sequence[CandidateList], texts: Mapping[str, list[str]]) -> list[dict[str, Any]]:
    """Results of all methods on one set."""
    rows = []
    words = {method: [t.score.words for t in score_candidates(lists, own)] for method, own in texts.items()}
    for method, own in texts.items():
        summary = summarise_combination(lists, own, lm=None).to_dict()
        rows.append(
            {"set": name, "method": method, "wer": summary["wer"], "low": summary["wer_low"]}
            | {"high": summary["wer_high"], "best_single": summary["best_single_wer"]}
            | {"p_against_best_single": summary["against_best_single"]["p"]}
            | {"single_mean": summary["single_wer_mean"], "oracle": summary["oracle_wer"]}
        )
        if (baseline := baseline_of(method)) != method:
            gap = score_difference(words[method], words[baseline])
            rows[-1] |= {"baseline": baseline, "difference": [gap.rate, gap.low, gap.high], "p": gap.p} if gap else {}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lists", type=Path, required=True, help="folder with the four .jsonl files")
    parser.add_argument("--lm", help="an n-gram model")
    parser.add_argument("--llm", type=Path, help="a causal language model")
    parser.add_argument("--llm-scores", type=Path, help="file for the log-probabilities of the causal model")
    parser.add_argument("--further", action="store_true", help="also what was tried and not kept")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sets = {name: read_candidates(arguments.lists / f"{name}.jsonl") for name in SETS}
    variants = make_variants(arguments, sets)
    rows = []
    for name, lists in sets.items():
        started = time.process_time()
        rows += make_rows(name, lists, combine_all(name, lists, variants, arguments.further))
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
            change = ""
            if "difference" in row:
                change = "{:+6.2f} ({:+.2f} to {:+.2f})".format(*(100 * value for value in row["difference"]))
            print(f"  {row['method']:48s} {100 * row['wer']:6.2f} %  ({interval})  {change}")


if __name__ == "__main__":
    main()
