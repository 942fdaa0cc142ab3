"""Word search over characters: real CTC posteriors of a handwriting decoder, a grapheme lexicon, an n-gram.

python benchmarks/handwriting_search.py --words ../shared/real/words --lm lm4.alm
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from arcuate.data.alphabet import BOUNDARY_NAMES
from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.hypothesis import greedy
from arcuate.decoding.log_probs import read_log_probs
from arcuate.decoding.word_search.search import build_word_search
from arcuate.evaluation.metrics import score, total
from arcuate.evaluation.transcribe import peak_rss_mb, read_references
from arcuate.language.lexicon import grapheme_lexicon
from arcuate.language.ngram.model import LanguageModel

FOLD = (",", ".", "?")
POINTS = ((50, 12.0), (200, 15.0), (500, 18.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=Path, required=True, help="folder of the real material")
    parser.add_argument("--lm", type=Path, required=True)
    parser.add_argument("--lm-weight", type=float, default=1.6)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = options.words / "handwriting"
    scores, speed = (read_log_probs(folder / f"{name}.npz", ">", FOLD) for name in ("dev", "speed"))
    texts = [r.text or "" for r in read_references(folder / "dev.jsonl", len(scores.trials), scores.ids)]
    model = LanguageModel.open(options.lm)
    special = ("<s>", "</s>", "<unk>")
    lexicon, skipped = grapheme_lexicon((w for w in model.words if w not in special), scores.classes[:-1])
    lexicon = type(lexicon)(
        lexicon.words, lexicon.word_of, lexicon.tokens, lexicon.offsets, scores.classes, lexicon.name
    )
    rows: list[dict[str, Any]] = []
    greedy_words = [
        "".join(" " if scores.classes[t] in BOUNDARY_NAMES else scores.classes[t] for t in greedy(frames)).split()
        for frames in scores.trials
    ]
    rows.append({"search": "greedy", **rates(texts, [" ".join(words) for words in greedy_words])})
    base = build_word_search(lexicon, model, DecodingConfig(lm_weight=options.lm_weight), boundary=scores.boundary)
    for beam, threshold in POINTS:
        search = base.with_settings(base.settings.model_copy(update={"beam": beam, "threshold": threshold}))
        search.search(scores.trials[0])
        found = [search.search(frames)[0].text or "" for frames in scores.trials]
        seconds = []
        for frames in speed.trials:
            start = time.process_time()
            search.search(frames)
            seconds.append(time.process_time() - start)
        row: dict[str, Any] = {"search": f"beam {beam}, threshold {threshold:g}", **rates(texts, found)}
        rows.append(row | {"seconds_per_sentence": statistics.mean(seconds)})
    result: dict[str, Any] = {
        "rows": rows,
        "words": len(lexicon.words),
        "skipped": len(skipped),
        "peak_rss_mb": peak_rss_mb(),
    }
    if options.json:
        print(json.dumps(result))
        return
    for row in result["rows"]:
        print(f"{row['search']:26} WER {100 * row['wer']:.2f} %  CER {100 * row['cer']:.2f} %", end="")
        print(f"  {1000 * row['seconds_per_sentence']:.1f} ms" if "seconds_per_sentence" in row else "")
    print(f"{result['words']} words ({result['skipped']} cannot be spelled); {result['peak_rss_mb']:.0f} MB")


def rates(texts: list[str], found: list[str]) -> dict[str, float | None]:
    pairs = list(zip(texts, found, strict=True))
    words, letters = (
        total(score(a.split(), b.split()) for a, b in pairs),
        total(score(a, b) for a, b in pairs),
    )
    return {"wer": words.rate, "cer": letters.rate}


if __name__ == "__main__":
    main()
