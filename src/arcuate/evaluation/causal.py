"""Log-probabilities of sentences under a causal language model, through `transformers` (extra: llm).

Models are local folders with safetensors weights, or GGUF files. Nothing is downloaded and no model code is executed.
"""

import copy
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from arcuate.errors import UserError
from arcuate.progress import Progress

Style = Literal["sentence", "plain"]
# Exceptions of transformers, gguf and safetensors for malformed files.
_LOAD_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    ImportError,
    RuntimeError,
    TypeError,
    AttributeError,
    struct.error,
    SafetensorError,
)
_REQUIRED = ("transformers", "gguf", "accelerate")
# Precedes every sentence by default, so that the model expects conversational text. Written for this project.
CONVERSATION = """Yeah, we were thinking about that too.
Well, my brother fixes old radios on weekends.
So how did you end up living out there?
It's kind of hard to say what they really wanted.
But she didn't want to drive all the way back.
I guess we could try it again tomorrow.
"""
_LONE_I = re.compile(r"\bi\b")


@dataclass(frozen=True, eq=False)
class CausalModel:
    """A causal language model with its tokenizer and the context of every sentence."""

    model: Any  # transformers.PreTrainedModel
    tokenizer: Any
    name: str
    first: int  # token at the start of a text
    context: tuple[int, ...] = ()  # tokens between it and the sentence


def missing_packages() -> list[str]:
    """Packages of the extra `llm` that are not installed."""
    return [name for name in _REQUIRED if find_spec(name) is None]


def load_causal(path: Path, device: str = "cpu", context: str | None = CONVERSATION) -> CausalModel:
    """Load a model folder of `save_pretrained`, or a .gguf file; `context` precedes every sentence."""
    if missing := missing_packages():
        raise UserError(f"rescoring needs {', '.join(missing)}; install with: pip install 'arcuate[llm]'")
    if not path.exists():
        raise UserError(f"no language model at {path}; give a model folder or a .gguf file")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder, options = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    if path.is_dir() and not any(path.glob("*.safetensors")):
        raise UserError(
            f"{path} has no .safetensors weights; pickled weights are not loaded: convert them to safetensors"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **options)
        model = AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True, dtype=torch.float32, **options)
    except _LOAD_ERRORS as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{path} cannot be loaded as a causal language model: {reason:.200}") from error
    context_tokens = tuple(tokenizer(context, add_special_tokens=False)["input_ids"]) if context else ()
    first = _first_token(tokenizer, path)
    return CausalModel(model.eval().to(torch.device(device)), tokenizer, path.stem, first, context_tokens)


def _first_token(tokenizer: Any, path: Path) -> int:
    """The separator between documents in training; it is the context of the first word."""
    separator = tokenizer.get_vocab().get("<|endoftext|>")
    for token in (separator, tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise UserError(f"{path}: its tokenizer has no start-of-text token; give a model that has one")


def as_sentence(text: str) -> str:
    """A normalised text with initial capital and full stop, as in the training text of such models."""
    written = _LONE_I.sub("I", text)
    return f"{written[:1].upper()}{written[1:]}." if written else "."


def score_sentences(
    lm: CausalModel,
    texts: Sequence[str],
    *,
    style: Style = "sentence",
    max_tokens: int = 1024,
    progress: Progress | None = None,
) -> np.ndarray:
    """Summed natural-log probability of each text's tokens: (n,).

    `max_tokens` limits the size of a batch, including padding, and thereby memory; scores change only by rounding.
    Equal texts are scored once.
    """
    sentences = [as_sentence(text) if style == "sentence" else text for text in texts]
    distinct = sorted(set(sentences))
    tokens = [lm.tokenizer(text, add_special_tokens=False)["input_ids"] for text in distinct]
    _check_lengths(lm, tokens, distinct)
    scores = np.zeros(len(distinct))
    prefix = _encode_prefix(lm)
    done = 0
    for chosen in _batches([max(len(ids), 1) for ids in tokens], max_tokens):
        scores[chosen] = _score_tokens(lm, prefix, [tokens[i] for i in chosen])
        done += len(chosen)
        if progress:
            progress(done, len(distinct), "scoring sentences")
    by_text = dict(zip(distinct, scores.tolist(), strict=True))
    return np.array([by_text[text] for text in sentences])


def _check_lengths(lm: CausalModel, tokens: Sequence[Sequence[int]], texts: Sequence[str]) -> None:
    longest = getattr(lm.model.config, "max_position_embeddings", None)
    for ids, text in zip(tokens, texts, strict=True):
        if longest is not None and len(lm.context) + len(ids) + 1 > longest:
            raise UserError(
                f"{text[:40]!r}… has {len(ids)} tokens and its context {len(lm.context)}; {lm.name} accepts at most"
                f" {longest}; remove the sentence, or give a shorter --context"
            )


def _batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of texts of similar length, to limit padding."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * lengths[i] > max_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


@dataclass(frozen=True, eq=False)
class _ScoredPrefix:
    """The first words of a sentence: tokens, score, and the state of the model after them."""

    tokens: tuple[int, ...]
    log_prob: float
    next_log_probs: Tensor  # (V,) of the next token
    layers: tuple[tuple[Tensor, Tensor], ...]  # keys and values (heads, tokens, dim) of each layer


PrefixScores = Mapping[tuple[str, ...], _ScoredPrefix]


@dataclass(frozen=True, eq=False)
class CausalPrefixScorer:
    """Scores of growing hypotheses for the delayed fusion of the word search (`PrefixScorer`).

    A new prefix reuses the cached keys and values of its longest scored prefix, so only the remaining tokens pass
    through the model. Texts have the form that `score_sentences` uses, which gives the same scores up to rounding.
    """

    lm: CausalModel
    _context: "_Prefix" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_context", _encode_prefix(self.lm))

    def start(self) -> PrefixScores:
        context = self._context
        empty = tuple((keys[0, :, :0], values[0, :, :0]) for keys, values in _cache_layers(context.cache))
        return {(): _ScoredPrefix((), 0.0, context.log_probs, empty)}

    def extend(self, scores: PrefixScores, prefixes: Sequence[tuple[str, ...]]) -> PrefixScores:
        """Scores with further prefixes."""
        new = [prefix for prefix in dict.fromkeys(prefixes) if prefix not in scores]
        texts = [as_sentence(" ".join(prefix))[:-1] for prefix in new]  # without the full stop
        return {**scores, **dict(zip(new, self._score(scores, new, texts), strict=True))}

    def log_prob(self, scores: PrefixScores, prefix: tuple[str, ...]) -> float | None:
        return scores[prefix].log_prob if prefix in scores else None

    def sentences(self, scores: PrefixScores, sentences: Sequence[tuple[str, ...]]) -> np.ndarray:
        """Scores of complete sentences. (n,)"""
        texts = [as_sentence(" ".join(words)) for words in sentences]
        return np.array([found.log_prob for found in self._score(scores, sentences, texts)])

    def _score(
        self, scores: PrefixScores, prefixes: Sequence[tuple[str, ...]], texts: Sequence[str]
    ) -> list[_ScoredPrefix]:
        tokens = [tuple(self.lm.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
        _check_lengths(self.lm, tokens, texts)
        parents = [self._parent(scores, *pair) for pair in zip(prefixes, tokens, strict=True)]
        by_length: dict[int, list[int]] = {}  # parents of one length need no padding
        for i, parent in enumerate(parents):
            by_length.setdefault(len(parent.tokens), []).append(i)
        found: dict[int, _ScoredPrefix] = {}
        for chosen in by_length.values():
            continued = _continue(self.lm, self._context, [parents[i] for i in chosen], [tokens[i] for i in chosen])
            found.update(zip(chosen, continued, strict=True))
        return [found[i] for i in range(len(prefixes))]

    @staticmethod
    def _parent(scores: PrefixScores, words: tuple[str, ...], tokens: tuple[int, ...]) -> _ScoredPrefix:
        """The longest scored prefix of these words whose tokens are a prefix of `tokens`."""
        for n in range(len(words), -1, -1):
            known = scores.get(words[:n])
            if known is not None and len(known.tokens) < len(tokens) and tokens[: len(known.tokens)] == known.tokens:
                return known
        return scores[()]


def _cache_layers(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values (B, heads, tokens, dim) of each layer of a transformers cache."""
    if hasattr(cache, "layers"):
        return [(layer.keys, layer.values) for layer in cache.layers]
    return list(zip(cache.key_cache, cache.value_cache, strict=True))


@torch.inference_mode()
def _continue(
    lm: CausalModel, context: "_Prefix", parents: Sequence[_ScoredPrefix], tokens: Sequence[tuple[int, ...]]
) -> list[_ScoredPrefix]:
    """Continue scored prefixes of equal length up to `tokens`, each at least one token longer, in one batch."""
    from transformers import DynamicCache

    device, n_parent = context.log_probs.device, len(parents[0].tokens)
    new = [torch.tensor(ids[n_parent:], dtype=torch.int64) for ids in tokens]
    ids = torch.nn.utils.rnn.pad_sequence(new, batch_first=True, padding_value=lm.first).to(device)  # (B, L)
    lengths = torch.tensor([len(row) for row in new], device=device)
    real = torch.arange(ids.shape[1], device=device)[None] < lengths[:, None]  # padding follows the text
    cache = DynamicCache()
    for index, (keys, values) in enumerate(_cache_layers(context.cache)):
        own = [torch.stack([parent.layers[index][k] for parent in parents]) for k in (0, 1)]
        shared = [part.expand(len(parents), -1, -1, -1) for part in (keys, values)]
        all_keys, all_values = (torch.cat([a, b], dim=2) for a, b in zip(shared, own, strict=True))
        cache.update(all_keys, all_values, index)
    n_seen = context.n_tokens + n_parent
    mask = torch.cat([torch.ones(len(new), n_seen, dtype=torch.int64, device=device), real.long()], dim=1)
    outputs = lm.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    before = torch.stack([parent.next_log_probs for parent in parents])  # (B, V)
    log_probs = torch.cat([before[:, None], outputs.logits.log_softmax(-1)], dim=1)  # (B, L + 1, V)
    summed = log_probs[:, :-1].gather(2, ids[..., None])[..., 0].double().masked_fill(~real, 0).sum(dim=1)
    after = [(keys[:, :, n_seen:], values[:, :, n_seen:]) for keys, values in _cache_layers(outputs.past_key_values)]
    return [
        _ScoredPrefix(
            tuple(tokens[i]),
            parent.log_prob + float(summed[i]),
            log_probs[i, len(new[i])].clone(),
            tuple(
                (
                    torch.cat([old_keys, keys[i, :, : len(new[i])]], dim=1),
                    torch.cat([old_values, values[i, :, : len(new[i])]], dim=1),
                )
                for (old_keys, old_values), (keys, values) in zip(parent.layers, after, strict=True)
            ),
        )
        for i, parent in enumerate(parents)
    ]


@dataclass(frozen=True, eq=False)
class _Prefix:
    """State of the model after the context, computed once for all sentences."""

    cache: Any  # keys and values of the context, batch size 1
    log_probs: Tensor  # (V,) of the next token
    n_tokens: int


@torch.inference_mode()
def _encode_prefix(lm: CausalModel) -> _Prefix:
    ids = torch.tensor([[lm.first, *lm.context]], device=next(lm.model.parameters()).device)
    outputs = lm.model(input_ids=ids, use_cache=True)
    return _Prefix(outputs.past_key_values, outputs.logits[0, -1].log_softmax(-1), ids.shape[1])


@torch.inference_mode()
def _score_tokens(lm: CausalModel, prefix: _Prefix, tokens: Sequence[Sequence[int]]) -> np.ndarray:
    """Summed log-probabilities of one batch; padding follows the text, where causal attention ignores it. (n,)"""
    device = prefix.log_probs.device
    rows = [torch.tensor(list(ids), dtype=torch.int64) for ids in tokens]
    lengths = torch.tensor([len(row) for row in rows], device=device)
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=lm.first).to(device)  # (B, L)
    real = torch.arange(ids.shape[1], device=device)[None] < lengths[:, None]  # (B, L)
    if not bool(real.any()):
        return np.zeros(len(rows))
    summed = torch.where(lengths > 0, prefix.log_probs[ids[:, 0]], 0.0).double()  # (B,)
    if ids.shape[1] > 1:
        cache = copy.deepcopy(prefix.cache)
        cache.batch_repeat_interleave(len(rows))
        seen = torch.ones(len(rows), prefix.n_tokens, dtype=torch.int64, device=device)
        mask = torch.cat([seen, real[:, :-1].long()], dim=1)
        outputs = lm.model(input_ids=ids[:, :-1], attention_mask=mask, past_key_values=cache, use_cache=True)
        logits = outputs.logits  # (B, L-1, V)
        log_probs = logits.gather(2, ids[:, 1:, None])[..., 0] - logits.logsumexp(dim=-1)
        summed += log_probs.double().masked_fill(~real[:, 1:], 0).sum(dim=1)
    return summed.cpu().numpy()
