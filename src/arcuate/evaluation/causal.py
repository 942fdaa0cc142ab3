"""Log-probabilities of sentences under a causal language model, through `transformers` (extra: llm).

Models are local folders with safetensors weights, or GGUF files. Nothing is downloaded and no model code is executed.
"""

import copy
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from arcuate.errors import UserError
from arcuate.progress import Progress

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


def load_causal(path: Path, context: str | None = CONVERSATION) -> CausalModel:
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
    return CausalModel(model.eval(), tokenizer, path.stem, first, context_tokens)


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
    max_tokens: int = 1024,
    progress: Progress | None = None,
) -> np.ndarray:
    """Summed natural-log probability of each text's tokens: (n,).

    `max_tokens` limits the size of a batch, including padding, and thereby memory; scores change only by rounding.
    Equal texts are scored once.
    """
    sentences = [as_sentence(text) for text in texts]
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
