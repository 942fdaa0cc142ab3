"""The transducer head: a prediction network that reads the tokens so far, and a joiner that weighs both sides.

The prediction network moves on only when a token is emitted, never on a blank. Its output after 0, 1, … U tokens is
joined with every frame: logits = output(tanh(frame + prediction)).
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arcuate.data.alphabet import BLANK
from arcuate.models.config import TransducerSettings
from arcuate.models.interfaces import Joint

START = BLANK  # stands for "nothing yet" on the token side, where a blank can not occur


@dataclass(frozen=True)
class LSTMState:
    hidden: Tensor  # (depth, n, W)
    cell: Tensor  # (depth, n, W)


PredictorState: TypeAlias = Tensor | LSTMState  # the last tokens (n, context), or what an LSTM remembers


class Stateless(nn.Module):
    """Sees the last one or two tokens and nothing else; small, and hard to overfit."""

    def __init__(self, settings: TransducerSettings, n_classes: int) -> None:
        super().__init__()
        self.context, self.dropout = settings.context, settings.dropout
        self.embedding = nn.Embedding(n_classes, settings.width)
        self.mix = nn.Linear(settings.context * settings.width, settings.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """What it says after each number of tokens. (B, U) -> (B, U + 1, W)"""
        padded = F.pad(tokens, (self.context, 0), value=START)
        return self._read(padded.unfold(1, self.context, 1))

    def start(self, n: int) -> tuple[Tensor, Tensor]:
        state = torch.full((n, self.context), START, device=self.embedding.weight.device)
        return self._read(state), state

    def step(self, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.cat([state[:, 1:], tokens[:, None]], dim=1)
        return self._read(state), state

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        return state[rows]

    def concatenate(self, states: list[Tensor]) -> Tensor:
        return torch.cat(states)

    def _read(self, recent: Tensor) -> Tensor:
        embedded = F.dropout(self.embedding(recent).flatten(-2), self.dropout, self.training)
        return F.relu(self.mix(embedded))


class LSTM(nn.Module):
    """Remembers all tokens so far."""

    def __init__(self, settings: TransducerSettings, n_classes: int) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(n_classes, settings.width)
        dropout = settings.dropout if settings.depth > 1 else 0.0
        self.lstm = nn.LSTM(settings.width, settings.width, settings.depth, batch_first=True, dropout=dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """What it says after each number of tokens. (B, U) -> (B, U + 1, W)"""
        embedded = self.embedding(F.pad(tokens, (1, 0), value=START))
        outputs: Tensor = self.lstm(F.dropout(embedded, self.settings.dropout, self.training))[0]
        return outputs

    def start(self, n: int) -> tuple[Tensor, LSTMState]:
        zeros = self.embedding.weight.new_zeros(self.settings.depth, n, self.settings.width)
        return self.step(LSTMState(zeros, zeros), torch.full((n,), START, device=zeros.device))

    def step(self, state: LSTMState, tokens: Tensor) -> tuple[Tensor, LSTMState]:
        outputs, (hidden, cell) = self.lstm(self.embedding(tokens)[:, None], (state.hidden, state.cell))
        return outputs[:, 0], LSTMState(hidden, cell)

    def select(self, state: LSTMState, rows: Tensor) -> LSTMState:
        return LSTMState(state.hidden[:, rows], state.cell[:, rows])

    def concatenate(self, states: list[LSTMState]) -> LSTMState:
        return LSTMState(torch.cat([s.hidden for s in states], 1), torch.cat([s.cell for s in states], 1))


class Transducer(nn.Module):
    def __init__(self, settings: TransducerSettings, n_inputs: int, n_classes: int) -> None:
        super().__init__()
        kind = Stateless if settings.predictor == "stateless" else LSTM
        self.predictor: Stateless | LSTM = kind(settings, n_classes)
        self.from_frames = nn.Linear(n_inputs, settings.width)
        self.from_tokens = nn.Linear(settings.width, settings.width, bias=False)
        self.output = nn.Linear(settings.width, n_classes)

    def forward(self, frames: Tensor, tokens: Tensor) -> Joint:
        """Both sides for a loss: frames (B, F, D), tokens (B, U)."""
        predicted = self.from_tokens(self.predictor(tokens))
        return Joint(self.from_frames(frames), predicted, self.output.weight, self.output.bias)

    def start(self, n: int) -> tuple[Tensor, PredictorState]:
        """Predictions (n, W) before the first token, ready to be joined, and the state to go on from."""
        predicted, state = self.predictor.start(n)
        return self.from_tokens(predicted), state

    def step(self, state: PredictorState, tokens: Tensor) -> tuple[Tensor, PredictorState]:
        """After one more token in each row. (n,) -> (n, W)"""
        predicted, state = self.predictor.step(state, tokens)  # type: ignore[arg-type]
        return self.from_tokens(predicted), state

    def select(self, state: PredictorState, rows: Tensor) -> PredictorState:
        """The states of these rows, in this order, any of them more than once."""
        return self.predictor.select(state, rows)  # type: ignore[arg-type]

    def concatenate(self, states: list[PredictorState]) -> PredictorState:
        """The rows of all these states, one after the other."""
        return self.predictor.concatenate(states)  # type: ignore[arg-type]

    def log_probs(self, frame: Tensor, predicted: Tensor) -> Tensor:
        """Scores of all classes at one frame (W,), already `from_frames`, for each prediction (n, W). (n, V)"""
        return self.output(torch.tanh(frame + predicted)).log_softmax(-1)
