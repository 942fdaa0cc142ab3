"""Log-probabilities of whole sentences under a causal language model, through `transformers` (extra: llm).

Nothing is fetched and nothing foreign is executed: models are local folders with safetensors weights or GGUF files.
"""

import copy
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
# What transformers, gguf and safetensors raise on files that are not what they claim to be.
LOAD_ERRORS = (
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
NEEDED = ("transformers", "gguf", "accelerate")
# Own sentences in the manner of a conversation: they tell the model what kind of text follows.
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
    """A causal language model with its tokenizer and what it has read before every sentence."""

    model: Any  # transformers.PreTrainedModel
    tokenizer: Any
    name: str
    first: int  # the token that begins a text
    context: tuple[int, ...] = ()  # tokens after it, before the sentence


def missing_parts() -> list[str]:
    """What the extra `llm` would install and is not there."""
    return [name for name in NEEDED if find_spec(name) is None]


def load_causal(path: Path, device: str = "cpu", context: str | None = CONVERSATION) -> CausalModel:
    """A model folder as `save_pretrained` writes it, or a .gguf file; `context` is read before every sentence."""
    if lacking := missing_parts():
        raise UserError(f"rescoring needs {', '.join(lacking)}; install it with: pip install 'arcuate[llm]'")
    if not path.exists():
        raise UserError(f"there is no language model at {path}; give a model folder or a .gguf file")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder, options = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    if path.is_dir() and not any(path.glob("*.safetensors")):
        raise UserError(f"{path} holds no .safetensors weights; pickled weights are not read, convert them")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **options)
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), local_files_only=True, dtype=torch.float32, **options
        )
    except LOAD_ERRORS as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{path} cannot be loaded as a causal language model: {reason:.200}") from error
    before = tuple(tokenizer(context, add_special_tokens=False)["input_ids"]) if context else ()
    first = _first_token(tokenizer, path)
    return CausalModel(model.eval().to(torch.device(device)), tokenizer, path.stem, first, before)


def _first_token(tokenizer: Any, path: Path) -> int:
    """What the model saw between documents in its training: the token that gives the first word a context."""
    between = tokenizer.get_vocab().get("<|endoftext|>")
    for token in (between, tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise UserError(f"{path}: its tokenizer names no token that begins a text; it cannot score sentences")


def as_sentence(text: str) -> str:
    """A normalised text as print has it, since that is what such models were trained on."""
    spelled = _LONE_I.sub("I", text)
    return f"{spelled[:1].upper()}{spelled[1:]}." if spelled else "."


def score_sentences(
    lm: CausalModel,
    texts: Sequence[str],
    *,
    style: Style = "sentence",
    max_tokens: int = 1024,
    progress: Progress | None = None,
) -> np.ndarray:
    """Summed natural-log probability of each text's tokens: (n,).

    `max_tokens` bounds a batch with its padding, and so the memory; it changes nothing in the scores beyond rounding.
    Equal texts are computed once.
    """
    shown = [as_sentence(text) if style == "sentence" else text for text in texts]
    distinct = sorted(set(shown))
    tokens = [lm.tokenizer(text, add_special_tokens=False)["input_ids"] for text in distinct]
    _check_lengths(lm, tokens, distinct)
    scores = np.zeros(len(distinct))
    opening = read_context(lm)
    done = 0
    for chosen in batches([max(len(ids), 1) for ids in tokens], max_tokens):
        scores[chosen] = score_tokens(lm, opening, [tokens[i] for i in chosen])
        done += len(chosen)
        if progress:
            progress(done, len(distinct), "scoring sentences")
    found = dict(zip(distinct, scores.tolist(), strict=True))
    return np.array([found[text] for text in shown])


def _check_lengths(lm: CausalModel, tokens: Sequence[Sequence[int]], texts: Sequence[str]) -> None:
    longest = getattr(lm.model.config, "max_position_embeddings", None)
    for ids, text in zip(tokens, texts, strict=True):
        if longest is not None and len(lm.context) + len(ids) + 1 > longest:
            raise UserError(
                f"{text[:40]!r}… has {len(ids)} tokens and its context {len(lm.context)}; {lm.name} reads at most"
                f" {longest}; leave it out, or give a shorter --context"
            )


def batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of neighbours in length, so that little is padding."""
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
class Opening:
    """The model's state after the context, computed once for all sentences."""

    cache: Any  # keys and values of the context, one row
    log_probs: Tensor  # (V,) of the token that follows
    n_tokens: int


@torch.inference_mode()
def read_context(lm: CausalModel) -> Opening:
    ids = torch.tensor([[lm.first, *lm.context]], device=next(lm.model.parameters()).device)
    outputs = lm.model(input_ids=ids, use_cache=True)
    return Opening(outputs.past_key_values, outputs.logits[0, -1].log_softmax(-1), ids.shape[1])


@torch.inference_mode()
def score_tokens(lm: CausalModel, opening: Opening, tokens: Sequence[Sequence[int]]) -> np.ndarray:
    """Summed log-probabilities of one batch; padding stands behind the text, where no token can see it. (n,)"""
    device = opening.log_probs.device
    rows = [torch.tensor(list(ids), dtype=torch.int64) for ids in tokens]
    lengths = torch.tensor([len(row) for row in rows], device=device)
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=lm.first).to(device)  # (B, L)
    real = torch.arange(ids.shape[1], device=device)[None] < lengths[:, None]  # (B, L)
    if not bool(real.any()):
        return np.zeros(len(rows))
    summed = torch.where(lengths > 0, opening.log_probs[ids[:, 0]], 0.0).double()  # (B,)
    if ids.shape[1] > 1:
        cache = copy.deepcopy(opening.cache)
        cache.batch_repeat_interleave(len(rows))
        seen = torch.ones(len(rows), opening.n_tokens, dtype=torch.int64, device=device)
        mask = torch.cat([seen, real[:, :-1].long()], dim=1)
        outputs = lm.model(input_ids=ids[:, :-1], attention_mask=mask, past_key_values=cache, use_cache=True)
        logits = outputs.logits  # (B, L-1, V)
        log_probs = logits.gather(2, ids[:, 1:, None])[..., 0] - logits.logsumexp(dim=-1)
        summed += log_probs.double().masked_fill(~real[:, 1:], 0).sum(dim=1)
    return summed.cpu().numpy()
