"""Shared by the tests of live decoding: a small lexicon and n-gram over the real classes, small models."""

import itertools
from pathlib import Path

import numpy as np
import torch

from arcuate.config import to_yaml
from arcuate.data.alphabet import CLASSES
from arcuate.data.statistics import Statistics
from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.decoder import Decoder
from arcuate.decoding.joint import joint_search
from arcuate.decoding.options import DecoderOptions
from arcuate.decoding.word_search.search import WordSearch, build_word_search
from arcuate.language.lexicon import make_lexicon
from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.trie import NGramTable, NGramTables, model_from_tables
from arcuate.models.acoustic import TorchModel
from arcuate.models.config import FrontEndSettings, GRUSettings, ModelConfig, ModelSettings, TransducerSettings
from arcuate.models.layout import Head
from arcuate.models.model import Model

# every phoneme is a word, and so are some pairs, so that any output of a random model has words
PHONES = CLASSES[1:-1]
ENTRIES = [(p.lower(), (p,)) for p in PHONES] + [
    (f"{a}{b}".lower() + "2", (a, b)) for a, b in itertools.pairwise(PHONES)
]


def small_ngram() -> LanguageModel:
    words = ["<unk>", "<s>", "</s>", *dict.fromkeys(word for word, _ in ENTRIES)]
    rng = np.random.default_rng(3)
    n = len(words)
    pairs = np.array([p for p in itertools.product(range(n), repeat=2) if p[0] != 2 and p[1] != 1], np.int32)
    pairs = pairs[rng.random(len(pairs)) < 0.1]
    tables = [
        NGramTable(np.arange(n, dtype=np.int32)[:, None], score(rng, n), score(rng, n)),
        NGramTable(pairs, score(rng, len(pairs)), np.zeros(len(pairs), np.float32)),
    ]
    return model_from_tables(NGramTables(words, tuple(tables)))


def score(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.normal(-3.0, 1.0, n).clip(max=-0.05).astype(np.float32)


def write_words(folder: Path) -> tuple[Path, Path]:
    """The lexicon and an n-gram with uniform unigrams, as files."""
    lexicon, arpa = folder / "lexicon.txt", folder / "lm.arpa"
    lexicon.write_text("".join(f"{word}\t{' '.join(phones)}\n" for word, phones in ENTRIES))
    words = ["<unk>", "<s>", "</s>", *dict.fromkeys(word for word, _ in ENTRIES)]
    lines = "".join(f"-2.0\t{word}\t0.0\n" for word in words)
    arpa.write_text(f"\\data\\\nngram 1={len(words)}\n\n\\1-grams:\n{lines}\n\\end\\\n")
    return lexicon, arpa


SEARCH_SETTINGS = DecodingConfig(beam=25, missing_silence_bonus=-1.0, silence_bonus=0.0, word_bonus=0.5)


def options_of(parts: dict[str, Path], **options: object) -> DecoderOptions:
    """Options that select lexicon, n-gram and weights of `write_words` in the folder of `parts`."""
    weights = parts["lm"].with_name("weights.yaml")
    weights.write_text(to_yaml(SEARCH_SETTINGS))
    return DecoderOptions(lm=parts["lm"], lexicon=parts["lexicon"], config=weights, **options)


def small_search() -> WordSearch:
    return build_word_search(make_lexicon(ENTRIES, CLASSES, "small"), small_ngram(), SEARCH_SETTINGS)


def small_model(
    n_channels: int = 6,
    normalise: str = "none",
    seed: int = 0,
    sessions: tuple[str, ...] = ("day1", "day2"),
    transducer: TransducerSettings | None = None,
) -> Model:
    torch.manual_seed(seed)
    front_end = FrontEndSettings(normalise=normalise)
    config = ModelConfig(
        settings=ModelSettings(
            front_end=front_end,
            encoder=GRUSettings(width=12, depth=2),
            transducer=transducer or TransducerSettings(),
        ),
        n_channels=n_channels,
        sessions=sessions,
        classes=CLASSES,
    )
    model = Model(config).eval()
    with torch.no_grad():
        model.head.weight.mul_(6.0)
        if model.transducer is not None:  # sharper than at the start, so that hypotheses differ
            for parameter in model.transducer.parameters():
                parameter.mul_(3.0)
    return model


def decoder_of(
    model: Model,
    search: WordSearch | None = None,
    session: str | None = None,
    statistics: Statistics | None = None,
    head: Head = "ctc",
) -> Decoder:
    """A stream over a model; it must be causal."""
    acoustic = TorchModel(model)
    found = search if head == "ctc" else joint_search(acoustic.transducer, head, search, model.config.classes)
    decoder = Decoder(acoustic, found, session, statistics)
    decoder.check_causal()
    return decoder


def small_decoder(search: WordSearch, **options: object) -> Decoder:
    return decoder_of(small_model(**options), search)  # type: ignore[arg-type]


def bins(n: int, n_channels: int = 6, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(1.0, 2.0, (n, n_channels)).astype(np.float32)
