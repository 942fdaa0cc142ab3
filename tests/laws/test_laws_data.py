"""The same batches, log-probabilities and gradients for any number of workers and processes."""

import dataclasses
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arcuate.data.batching import Batch, training_batches
from arcuate.data.selection import select
from arcuate.data.store import Store
from arcuate.evaluation.trials import decode_trials, session_sums
from arcuate.experiments.recipe import Recipe, load_recipe
from arcuate.experiments.train import build_model
from arcuate.models.model import Model
from arcuate.training.environment import Distributed
from arcuate.training.state import TrainingState
from arcuate.training.step import compute_gradients, encode_for_training
from support.laws import assert_same_frames, cases, law
from support.training import make_state, planned_batches

CPU = torch.device("cpu")
STILL = ["front_end.session_layer.dropout=0", "train.clip_norm=null", "data.workers=0"]
KINDS = {
    "gru": ["encoder.width=12", "encoder.dropout=0"],
    "ssm": ["encoder={kind: ssm, width: 12, depth: 2, n_heads: 2, state_dim: 4, dropout: 0}"],
    "transformer": [
        "encoder={kind: transformer, width: 12, depth: 2, n_heads: 2, context: 20, input_dropout: 0,"
        " attention_dropout: 0, dropout: 0}"
    ],
    "gru and transducer": [
        *("encoder.width=12", "encoder.dropout=0", "transducer={enabled: true, width: 8, dropout: 0}"),
        "loss.rnnt.weight=0.5",
    ],
    "ssm and lstm transducer": [
        "encoder={kind: ssm, width: 12, depth: 1, n_heads: 2, state_dim: 4, dropout: 0}",
        *("transducer={enabled: true, predictor: lstm, width: 8, dropout: 0}", "loss.rnnt.weight=0.5"),
    ],
}


@pytest.fixture(scope="module")
def store(cohort_store: Path) -> Store:
    return Store.open(cohort_store)


@cache
def make_model(kind: str, normalise: str, log: bool, store: Store) -> Model:
    front_end = [f"front_end.normalise={normalise}", f"front_end.log1p={str(log).lower()}"]
    recipe = load_recipe("tiny", [*STILL, *KINDS[kind], *front_end])
    return build_model(recipe, store, select(store, recipe.data, recipe.front_end.patch.count_frames)).eval()


kinds = st.sampled_from(list(KINDS))


@law(0.25)
@given(st.integers(0, 200), st.integers(1, 8), st.integers(1, 3), st.sampled_from(["shuffled", "bucketed", "sessions"]))
def test_workers_read_the_same_batches(store, start, n_batches, workers, batching):
    sizes = "n_sessions: 2, n_trials: 2" if batching == "sessions" else "batch_size: 4"
    recipe = load_recipe("tiny", [f"data.batching={{kind: {batching}, {sizes}}}", "front_end.normalise=block"])
    planned = planned_batches(store, recipe)
    alone = list(training_batches(planned, start, start + n_batches, workers=0))
    shared = list(training_batches(planned, start, start + n_batches, workers=workers))
    assert len(alone) == len(shared) == n_batches
    for a, b in zip(alone, shared, strict=True):
        assert a.position == b.position and a.trials == b.trials
        assert all(torch.equal(x, y) for x, y in zip(a.tensors(), b.tensors(), strict=True)), f"batch {a.position}"
    cases["workers"] += 1


@dataclasses.dataclass(frozen=True)
class Part(Distributed):
    """One of several processes whose gradients are averaged by the test."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values


def gradients(state: TrainingState, batch: Batch, part: Distributed) -> dict[str, torch.Tensor]:
    compute_gradients(state, partial(encode_for_training, state.model), [batch], CPU, part)
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in state.model.named_parameters()
    }


states: dict[tuple[str, int], tuple[Recipe, TrainingState]] = {}


@law(0.5)
@given(st.data(), kinds, st.integers(1, 7), st.integers(2, 8), st.integers(0, 500))
def test_any_number_of_processes(store, tmp_path_factory, data, kind, batch_size, size, position):
    """Averaged gradients of the parts of a batch are those of the batch; so are the log-probabilities after a step."""
    key = kind, batch_size
    if key not in states:
        recipe = load_recipe("tiny", [*STILL, *KINDS[kind], f"data.batching.batch_size={batch_size}"])
        states[key] = recipe, make_state(store, recipe, tmp_path_factory.mktemp("ranks") / "run")
    recipe, state = states[key]
    whole = gradients(state, planned_batches(store, recipe)[position], Part(0, 1))
    parts = [gradients(state, planned_batches(store, recipe, (r, size))[position], Part(r, size)) for r in range(size)]
    averaged = {name: torch.stack([part[name] for part in parts]).mean(0) for name in whole}
    norm = torch.nn.utils.get_total_norm(list(whole.values()))
    step = 0.1 / max(float(norm), 1e-6)
    before = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    trial = store.trials[data.draw(st.integers(0, len(store.trials) - 1))]
    outputs = []
    for gradient in (whole, averaged):
        state.model.load_state_dict({n: before[n] - step * gradient[n] for n in before}, strict=False)
        outputs.append(decode_trials(state.model, store, [trial], keep_log_probs=True)[0].log_probs)
    state.model.load_state_dict(before, strict=False)
    context = f"{kind}, {size} processes, batch {position} of {batch_size} trials, {trial.id}"
    assert_same_frames("processes", outputs[1], outputs[0], recipe.front_end.patch, context=context)
    cases["processes"] += 1


@law(0.5)
@given(kinds, st.integers(1, 5), st.integers(1, 12), st.integers(1, 9))
def test_validation_divided_among_processes(store, kind, size, n_trials, batch_size):
    """Every process decodes its share; the added counts are those of one process."""
    model = make_model(kind, "block", False, store)
    trials = [t for t in store.trials if t.split == "val"][:n_trials]
    alone = decode_trials(model, store, trials, batch_size=batch_size, keep_log_probs=True)
    sums = torch.zeros_like(session_sums(alone, store.sessions))
    for rank in range(size):
        share = decode_trials(model, store, trials[rank::size], batch_size=batch_size, keep_log_probs=True)
        sums += session_sums(share, store.sessions)
        for expected, found in zip(alone[rank::size], share, strict=True):
            patch = model.config.settings.front_end.patch
            assert_same_frames("validation", found.log_probs, expected.log_probs, patch, context=found.trial.id)
    assert torch.equal(sums.nan_to_num(), session_sums(alone, store.sessions).nan_to_num())
    cases["validation"] += 1
