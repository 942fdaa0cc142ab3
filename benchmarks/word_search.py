"""Word search and flashlight-text on the same frames, lexicon and n-gram: error rates and CPU time of one thread.

python benchmarks/word_search.py --words ../shared/real/words --lm lm4.alm --arpa lm4.arpa

`--lm` is the n-gram as `arcuate lm import` writes it; `--arpa` the same, unpacked, for flashlight-text (without it only
arcuate runs). The weights of both are tuned on these trials: those of arcuate from `--config` (default settings without
it), those of flashlight-text from the table shipped with the frames. `--stream` gives the search one frame at a
time instead, and prints the CPU time per frame and how many texts equal those of the offline search.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.decoding.config import DecodingConfig, read_decoding_config
from arcuate.decoding.frame_files import FrameLogProbs, read_frames
from arcuate.decoding.word_search.search import WordSearch, build_word_search
from arcuate.evaluation.metrics import Score, score, total
from arcuate.evaluation.sentences import Sentence, attach_references
from arcuate.evaluation.significance import score_difference
from arcuate.language.lexicon import Lexicon, read_lexicon
from arcuate.language.ngram.model import LanguageModel
from arcuate.models.layout import Frames
from arcuate.progress import peak_memory_bytes

ARCUATE = ((30, 7.0), (50, 8.0), (80, 9.0), (150, 10.0), (200, 12.0), (500, 13.0))
FLASHLIGHT = ((1000, 8.0), (50, 15.0), (200, 12.0), (200, 15.0), (1000, 12.0), (1000, 15.0))


@dataclass(frozen=True)
class Point:
    """One setting of one decoder on all trials."""

    name: str
    texts: tuple[tuple[str, ...], ...]
    seconds: tuple[float, ...]
    oracle: float | None
    scores: tuple[Score, ...]

    @property
    def wer(self) -> float:
        return total(self.scores).rate or 0.0

    @property
    def seconds_per_sentence(self) -> float:
        return statistics.mean(self.seconds)


def decode_words(search: WordSearch, n_best: int, frames: np.ndarray) -> list[tuple[str, ...]]:
    return [h.words for h in search.search(Frames(frames), n_best)]


def measure(
    name: str,
    decode: Callable[[np.ndarray], Sequence[Sequence[str]]],
    trials: Sequence[np.ndarray],
    texts: Sequence[str],
    n_oracle: int = 0,
) -> Point:
    """Decode every trial once, after a warm-up on the longest."""
    decode(max(trials, key=len))
    gc.collect()
    seconds, lists = [], []
    for frames in trials:
        start = time.process_time()
        found = decode(frames)
        seconds.append(time.process_time() - start)
        lists.append([tuple(words) for words in found])
    scores = [score(text.split(), candidates[0]) for text, candidates in zip(texts, lists, strict=True)]
    oracle = [
        min(score(text.split(), words).errors for words in candidates[:n_oracle] or candidates)
        for text, candidates in zip(texts, lists, strict=True)
    ]
    return Point(
        name,
        tuple(candidates[0] for candidates in lists),
        tuple(seconds),
        sum(oracle) / total(scores).length if n_oracle else None,
        tuple(scores),
    )


def run_arcuate(
    scores: FrameLogProbs,
    texts: Sequence[str],
    lexicon: Lexicon,
    model: LanguageModel,
    settings: DecodingConfig,
    n_best: int,
) -> Iterator[Point]:
    search = build_word_search(lexicon, model, settings)
    for beam, threshold in ARCUATE:
        tried = search.with_settings(settings.model_copy(update={"beam": beam, "threshold": threshold}))
        yield measure(
            f"arcuate {beam}/{threshold:g}",
            partial(decode_words, tried, n_best),
            scores.trials,
            texts,
            n_best,
        )


def stream(scores: FrameLogProbs, lexicon: Lexicon, model: LanguageModel, settings: DecodingConfig) -> dict[str, Any]:
    """Milliseconds of CPU time per frame with a partial text, and the trials whose text equals the offline one."""
    search = build_word_search(lexicon, model, settings)
    search.warm_up()
    gc.collect()
    gc.freeze()  # a garbage collection over a lexicon of 126,000 words would delay one frame
    seconds, n_same = [], 0
    for frames in scores.trials:
        state = search.start()
        for t in range(len(frames)):
            started = time.process_time()
            state = search.step(state, Frames(frames[t : t + 1]))
            search.partial(state)
            seconds.append(time.process_time() - started)
        n_same += search.finish(state)[0].words == search.search(Frames(frames))[0].words
    cpu_ms = {f"p{q}": 1000 * float(np.percentile(seconds, q)) for q in (50, 99, 100)}
    return {"frames": len(seconds), "cpu_ms": cpu_ms, "same_text": f"{n_same} of {len(scores.trials)}"}


def run_flashlight(
    scores: FrameLogProbs, texts: Sequence[str], lexicon: Lexicon, arpa: Path, n_best: int
) -> Iterator[Point]:
    from flashlight.lib.text import decoder  # type: ignore[import-not-found,unused-ignore]
    from flashlight.lib.text.dictionary import Dictionary  # type: ignore[import-not-found,unused-ignore]

    words = Dictionary([*lexicon.words, "<unk>"])
    words.set_default_index(words.get_index("<unk>"))
    model = decoder.KenLM(str(arpa), words)
    silence = scores.boundary
    trie, start = decoder.Trie(len(scores.classes), silence), model.start(False)
    for entry, word in enumerate(lexicon.word_of):
        index = words.get_index(lexicon.words[word])
        tokens = lexicon.tokens[lexicon.offsets[entry] : lexicon.offsets[entry + 1]].tolist()
        trie.insert([*tokens, silence], index, model.score(start, index)[1])
    trie.smear(decoder.SmearingMode.MAX)
    for beam, threshold in FLASHLIGHT:
        options = decoder.LexiconDecoderOptions(
            beam, len(scores.classes), threshold, 1.75, 0.0, -np.inf, -2.0, False, decoder.CriterionType.CTC
        )
        search = decoder.LexiconDecoder(options, trie, model, silence, 0, -1, [], False)

        def decode(frames: np.ndarray, search: Any = search) -> list[list[str]]:
            frames = np.ascontiguousarray(frames, np.float32)
            found = search.decode(frames.ctypes.data, *frames.shape)
            best = [[words.get_entry(w) for w in hypothesis.words if w >= 0] for hypothesis in found[:n_best]]
            return best or [[]]

        yield measure(f"flashlight {beam}/{threshold:g}", decode, scores.trials, texts, n_best)


def nearest(point: Point, others: Sequence[Point]) -> Point:
    """The fastest setting with the same or a lower WER, otherwise the one with the lowest WER."""
    good = [o for o in others if o.wer <= point.wer + 1e-9]
    return min(good, key=lambda o: o.seconds_per_sentence) if good else min(others, key=lambda o: o.wer)


def table(mine: Sequence[Point], peers: Sequence[Point]) -> list[dict[str, Any]]:
    rows = [
        {
            "decoder": p.name,
            "wer": p.wer,
            "oracle": p.oracle,
            "ms": 1000 * p.seconds_per_sentence,
            "ms_p95": 1000 * float(np.quantile(p.seconds, 0.95)),
        }
        for p in (*mine, *peers)
    ]
    for row, peer in zip(rows[len(mine) :], peers, strict=True):
        match = nearest(peer, mine)
        row |= {
            "matched_by": match.name,
            "time_ratio": match.seconds_per_sentence / peer.seconds_per_sentence,
            "wer_difference": match.wer - peer.wer,
            "p": difference.p if (difference := score_difference(match.scores, peer.scores)) else 1.0,
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=Path, required=True, help="folder of the real material")
    parser.add_argument("--set", default="dev", help="dev or dev_nbest")
    parser.add_argument("--lm", type=Path, required=True)
    parser.add_argument("--arpa", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--n-best", type=int, default=100, help="hypotheses per trial, for the oracle")
    parser.add_argument("--stream", action="store_true", help="frame by frame")
    parser.add_argument("--trials", type=int, help="use the first trials only")
    options = parser.parse_args()
    folder = options.words / "t15"
    scores = read_frames(folder / f"{options.set}.npz")
    named = [Sentence(name) for name in scores.ids or ()]
    texts = [s.reference or "" for s in attach_references(named, folder / f"{options.set}.jsonl", complete=True)]
    scores, texts = replace(scores, trials=scores.trials[: options.trials]), texts[: options.trials]
    start = time.process_time()
    lexicon, model = read_lexicon(folder / "lexicon.txt", scores.classes), LanguageModel.open(options.lm)
    settings = read_decoding_config(options.config)[0] if options.config else DecodingConfig()
    if options.stream:
        print(json.dumps(stream(scores, lexicon, model, settings)))
        return
    build_word_search(lexicon, model, settings).search(Frames(scores.trials[0]))
    loaded = time.process_time() - start
    mine = list(run_arcuate(scores, texts, lexicon, model, settings, options.n_best))
    memory, peers = peak_memory_bytes() / (1 << 20), []
    if options.arpa:
        peers = list(run_flashlight(scores, texts, lexicon, options.arpa, options.n_best))
    rows = table(mine, peers)
    print(f"{len(scores.trials)} trials; lexicon and n-gram loaded in {loaded:.1f} s; peak memory {memory:.0f} MB")
    for row in rows:
        line = f"{row['decoder']:22} WER {100 * row['wer']:6.2f} %  oracle {100 * (row['oracle'] or 0):6.2f} %"
        line += f"  {row['ms']:7.2f} ms (p95 {row['ms_p95']:.1f})"
        if "p" in row:
            line += f"  {row['matched_by']}: {row['time_ratio']:.2f}x the time,"
            line += f" {100 * row['wer_difference']:+.2f} points, p = {row['p']:.2f}"
        print(line)


if __name__ == "__main__":
    main()
