"""Grapheme-to-phoneme conversion for words outside the dictionary.

Uses the weights of the package `g2p_en` (Park & Kim 2019), the network that labelled the benchmarks. Only its data file
is read, so neither its code nor its other requirements are needed (`pip install --no-deps g2p_en`). Without it,
letter-to-sound rules are used.
"""

import re
import zipfile
from functools import lru_cache
from pathlib import Path

import numpy as np

from arcuate.data.pronunciation import Phonemes, look_up, pronounce_by_rule, pronounce_inflected
from arcuate.errors import UserError
from arcuate.files import find_package_file

_LETTERS = ("<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz")
_OUTPUTS = (  # in the order of the network: vowels with three stresses, and UW once without
    "<pad> <unk> <s> </s> AA0 AA1 AA2 AE0 AE1 AE2 AH0 AH1 AH2 AO0 AO1 AO2 AW0 AW1 AW2 AY0 AY1 AY2 B CH D DH EH0 EH1"
    " EH2 ER0 ER1 ER2 EY0 EY1 EY2 F G HH IH0 IH1 IH2 IY0 IY1 IY2 JH K L M N NG OW0 OW1 OW2 OY0 OY1 OY2 P R S SH T TH"
    " UH0 UH1 UH2 UW UW0 UW1 UW2 V W Y Z ZH"
).split()
_START, _END = 2, 3
_MAX_PHONEMES = 20
_PRONOUNCEABLE = re.compile(r"[a-z'\-]*[a-z][a-z'\-]*")
_SHAPES = {"enc_emb": (29, 256), "dec_emb": (74, 256), "fc_w": (74, 256), "fc_b": (74,)} | {
    f"{side}_{kind}": shape
    for side in ("enc", "dec")
    for kind, shape in (("w_ih", (768, 256)), ("w_hh", (768, 256)), ("b_ih", (768,)), ("b_hh", (768,)))
}


def pronounce_unknown(word: str) -> Phonemes:
    """Phonemes of a word outside the dictionary: by a known stem with its ending, the network, or rules."""
    if not _PRONOUNCEABLE.fullmatch(word):
        raise UserError(f"cannot pronounce {word!r}: expected the letters a to z, ' and -; give its phonemes")
    if "-" not in word and (phonemes := pronounce_inflected(word)):
        return phonemes
    weights = _load_weights()
    if weights is None:
        return pronounce_by_rule(word)
    parts = [part for part in re.split(r"[-']+", word) if part]
    return tuple(p for part in parts for p in look_up(part) or _run_network(part, weights))


@lru_cache(maxsize=1)
def _load_weights() -> dict[str, np.ndarray] | None:
    path = find_package_file("g2p_en", "checkpoint20.npz")
    return _read_weights(path) if path else None


def _read_weights(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as stored:
            weights = {name: stored[name].astype(np.float32) for name in _SHAPES}
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read ({error}); install g2p_en again") from error
    if any(weights[name].shape != shape for name, shape in _SHAPES.items()):
        raise UserError(f"{path} does not match g2p_en 2.1.0; install that version")
    return weights


def _run_network(word: str, weights: dict[str, np.ndarray]) -> Phonemes:
    """Greedy decoding of the encoder–decoder GRU: letters in, phonemes out."""
    h = np.zeros(256, np.float32)
    for letter in (*word, "</s>"):
        h = _gru_step(weights, "enc", _LETTERS.index(letter), h)
    outputs: list[str] = []
    last = _START
    for _ in range(_MAX_PHONEMES):
        h = _gru_step(weights, "dec", last, h)
        last = int((weights["fc_w"] @ h + weights["fc_b"]).argmax())
        if last == _END:
            break
        outputs.append(_OUTPUTS[last].rstrip("012"))
    phonemes = tuple(name for name in outputs if not name.startswith("<"))
    return phonemes or pronounce_by_rule(word)


def _gru_step(weights: dict[str, np.ndarray], side: str, symbol: int, h: np.ndarray) -> np.ndarray:
    """One step of a gated recurrent unit."""
    inputs = weights[f"{side}_w_ih"] @ weights[f"{side}_emb"][symbol] + weights[f"{side}_b_ih"]
    recurrent = weights[f"{side}_w_hh"] @ h + weights[f"{side}_b_hh"]
    reset, update = 1 / (1 + np.exp(-(inputs[:512] + recurrent[:512]).reshape(2, 256)))
    candidate = np.tanh(inputs[512:] + reset * recurrent[512:])
    return (1 - update) * candidate + update * h
