"""runtime.compile: blocks of a Transformer compute the same, and batches of other lengths do not compile them again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from arcuate.data.alphabet import CLASSES
from arcuate.errors import UserError
from arcuate.experiments.train import train
from arcuate.models.config import (
    EncoderSettings,
    GRUSettings,
    ModelConfig,
    ModelSettings,
    SSMSettings,
    TransformerSettings,
)
from arcuate.models.model import Model
from arcuate.training.step import compile_blocks


def model_of(encoder: EncoderSettings) -> Model:
    torch.manual_seed(0)
    settings = ModelSettings(encoder=encoder)
    return Model(ModelConfig(settings=settings, n_channels=4, sessions=("a", "b"), classes=CLASSES)).eval()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # read by torch's own tracing
def test_compiled_blocks_compute_the_same_for_batches_of_any_length() -> None:
    torch._dynamo.reset()
    counters.clear()
    encoder = TransformerSettings(width=8, depth=2, n_heads=2, context=5)
    plain, compiled = model_of(encoder), model_of(encoder)
    compile_blocks(compiled, backend="aot_eager")  # traces forward and backward pass, and generates no code
    n_graphs = []
    for length in (30, 44, 57, 93, 61):
        bins, n_bins = torch.randn(2, length, 4), torch.tensor([length, length - 9])
        results = []
        for model in (plain, compiled):
            model.zero_grad()
            log_probs = model(bins, n_bins, torch.tensor([0, 1])).log_probs["ctc"]
            log_probs[:, :, 1].sum().backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            results.append([log_probs.detach(), *(g.clone() for g in gradients)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        n_graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < n_graphs[1] == n_graphs[-1], n_graphs  # sizes are variable from the second batch on, at the latest


@pytest.mark.parametrize("encoder", [GRUSettings(width=8, depth=2), SSMSettings(width=8, depth=2, n_heads=2)])
def test_other_encoders_have_nothing_to_compile(encoder: EncoderSettings) -> None:
    assert list(model_of(encoder).encoder.blocks_to_compile()) == []


def test_a_machine_without_a_compiler_is_told_so(
    monkeypatch: pytest.MonkeyPatch, cohort_store: Path, tmp_path: Path
) -> None:
    """As in containers with torch but without gcc."""

    def compile_at_first_step(*arguments: Any) -> None:
        def backend(graph: Any, inputs: Any) -> None:
            raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

        torch.compile(torch.sin, backend=backend)(torch.zeros(1))

    torch._dynamo.reset()
    monkeypatch.setattr("arcuate.experiments.train.train_loop", compile_at_first_step)
    with pytest.raises(UserError, match=r"Failed to find C compiler.*runtime\.compile=false"):
        train("tiny", cohort_store, tmp_path / "run", overrides=["data.workers=0"])
