"""Helpers of the rescoring tests."""

import importlib.util
from pathlib import Path

import pytest

MISSING = [name for name in ("transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights and a tokenizer of single letters, as `save_pretrained` writes them."""
    if MISSING:
        pytest.skip("the extra llm is not installed")
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("small")
    vocabulary = {"<|endoftext|>": 0, "<unk>": 1, ".": 2} | {c: i for i, c in enumerate("abcdABCD", start=3)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
