"""Pronunciations for words that no dictionary has.

Best with the weights that the package `g2p_en` carries, the same network that labelled the benchmarks; only its data
file is read, so neither its code nor its other requirements are needed (`pip install --no-deps g2p_en`). Without it,
letter-to-sound rules.
"""

import importlib.util
import re
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from arcuate.data.pronunciation import Phonemes, dictionary, pronounce_by_rule, pronounce_inflected
from arcuate.errors import UserError

_LETTERS = ("<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz")
_SOUNDS = (  # outputs in their order: vowels with three stresses, of UW one without
    "<pad> <unk> <s> </s> AA0 AA1 AA2 AE0 AE1 AE2 AH0 AH1 AH2 AO0 AO1 AO2 AW0 AW1 AW2 AY0 AY1 AY2 B CH D DH EH0 EH1"
    " EH2 ER0 ER1 ER2 EY0 EY1 EY2 F G HH IH0 IH1 IH2 IY0 IY1 IY2 JH K L M N NG OW0 OW1 OW2 OY0 OY1 OY2 P R S SH T TH"
    " UH0 UH1 UH2 UW UW0 UW1 UW2 V W Y Z ZH"
).split()
_START, _END = 2, 3
_LONGEST = 20
_SPEAKABLE = re.compile(r"[a-z'\-]*[a-z][a-z'\-]*")
_SHAPES = {"enc_emb": (29, 256), "dec_emb": (74, 256), "fc_w": (74, 256), "fc_b": (74,)} | {
    f"{side}_{kind}": shape
    for side in ("enc", "dec")
    for kind, shape in (("w_ih", (768, 256)), ("w_hh", (768, 256)), ("b_ih", (768,)), ("b_hh", (768,)))
}


@dataclass(frozen=True)
class G2pResult:
    phones: Phonemes
    how: str  # "stem", "network" or "rules"


def pronounce_unknown(word: str) -> G2pResult:
    """How a word outside the dictionary is said: a known stem with its ending, else the network, else by rule."""
    if not _SPEAKABLE.fullmatch(word):
        raise UserError(
            f"cannot pronounce {word!r}: only words of the letters a to z, ' and -; give its phonemes"
        )
    if "-" not in word and (phones := pronounce_inflected(word)):
        return G2pResult(phones, "stem")
    weights = _weights()
    if weights is None:
        return G2pResult(pronounce_by_rule(word), "rules")
    parts = [part for part in re.split(r"[-']+", word) if part]
    return G2pResult(tuple(p for part in parts for p in _known(part) or _sound_out(part, weights)), "network")


def _known(word: str) -> Phonemes | None:
    variants = dictionary().get(word)
    return variants[0] if variants else None


@lru_cache(maxsize=1)
def _weights() -> dict[str, np.ndarray] | None:
    spec = importlib.util.find_spec("g2p_en")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "checkpoint20.npz"
        if path.is_file():
            return _read(path)
    return None


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as stored:
            weights = {name: stored[name].astype(np.float32) for name in _SHAPES}
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read ({error}); install g2p_en again") from error
    if any(weights[name].shape != shape for name, shape in _SHAPES.items()):
        raise UserError(f"{path} has other sizes than version 2.1.0 of g2p_en; install that one")
    return weights


def _sound_out(word: str, weights: dict[str, np.ndarray]) -> Phonemes:
    """Letters in, sounds out, one at a time."""
    h = np.zeros(256, np.float32)
    for letter in (*word, "</s>"):
        h = _step(weights, "enc", _LETTERS.index(letter), h)
    phones: list[str] = []
    last = _START
    for _ in range(_LONGEST):
        h = _step(weights, "dec", last, h)
        last = int((weights["fc_w"] @ h + weights["fc_b"]).argmax())
        if last == _END:
            break
        phones.append(_SOUNDS[last].rstrip("012"))
    said = tuple(phone for phone in phones if not phone.startswith("<"))
    return said or pronounce_by_rule(word)


def _step(weights: dict[str, np.ndarray], side: str, symbol: int, h: np.ndarray) -> np.ndarray:
    """One step of a gated recurrent unit."""
    into = weights[f"{side}_w_ih"] @ weights[f"{side}_emb"][symbol] + weights[f"{side}_b_ih"]
    back = weights[f"{side}_w_hh"] @ h + weights[f"{side}_b_hh"]
    reset, keep = 1 / (1 + np.exp(-(into[:512] + back[:512]).reshape(2, 256)))
    fresh = np.tanh(into[512:] + reset * back[512:])
    return (1 - keep) * fresh + keep * h
