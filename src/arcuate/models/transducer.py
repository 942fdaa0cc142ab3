"""Transducer head (RNN-T, Graves 2012): prediction network over the tokens so far, and joiner.

The prediction network advances only when a token is emitted, never on a blank. Its output after 0, 1, … U tokens is
joined with every frame: logits = output(tanh(frame + prediction)).
"""

import copy

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arcuate.data.alphabet import BLANK
from arcuate.models.config import TransducerSettings
from arcuate.models.gru import recurs_in_full_precision
from arcuate.models.interfaces import Joint

_START = BLANK  # start-of-sequence token of the prediction network, whose inputs never contain a blank


class Transducer(nn.Module):
    """Prediction network and joiner for the loss (`forward`) and for searches (`start`, `step`, `log_probs`).

    The state of the prediction network is a tensor with one row per hypothesis: `state[rows]` selects hypotheses.
    """

    def __init__(self, settings: TransducerSettings, n_inputs: int, n_classes: int) -> None:
        super().__init__()
        predictor = StatelessPredictor if settings.predictor == "stateless" else LSTMPredictor
        self.predictor: StatelessPredictor | LSTMPredictor = predictor(settings, n_classes)
        self.encoder_proj = nn.Linear(n_inputs, settings.width)
        self.predictor_proj = nn.Linear(settings.width, settings.width, bias=False)
        self.output = nn.Linear(settings.width, n_classes)

    def forward(self, frames: Tensor, tokens: Tensor) -> Joint:
        """Inputs of the loss. (B, F, D), (B, U)"""
        predicted = self.predictor_proj(self.predictor(tokens))
        return Joint(self.encoder_proj(frames), predicted, self.output.weight, self.output.bias)

    def start(self, n: int) -> tuple[Tensor, Tensor]:
        """Projected predictions (n, W) before the first token, and the state after them."""
        predicted, state = self.predictor.start(n)
        return self.predictor_proj(predicted), state

    def step(self, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Projected predictions after one more token per row. (n,) -> (n, W)"""
        predicted, state = self.predictor.step(state, tokens)
        return self.predictor_proj(predicted), state

    def log_probs(self, frame: Tensor, predicted: Tensor) -> Tensor:
        """Log-probabilities of all classes at one projected frame (W,) for each prediction (n, W). (n, V)"""
        return self.output(torch.tanh(frame + predicted)).log_softmax(-1)

    def for_search(self) -> "ArrayHead":
        """The head as searches use it, with numpy arrays.

        It is a copy on the CPU without dropout: searches take many steps of a few rows, and each would wait for a GPU.
        """
        return ArrayHead(copy.deepcopy(self).cpu().eval())


class StatelessPredictor(nn.Module):
    """Prediction network over the last `context` tokens (Ghodsi et al. 2020); small, and hard to overfit.

    The state holds these tokens. (n, context)
    """

    def __init__(self, settings: TransducerSettings, n_classes: int) -> None:
        super().__init__()
        self.context, self.dropout = settings.context, settings.dropout
        self.embedding = nn.Embedding(n_classes, settings.width)
        self.linear = nn.Linear(settings.context * settings.width, settings.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Outputs after 0, 1, … U tokens. (B, U) -> (B, U + 1, W)"""
        padded = F.pad(tokens, (self.context, 0), value=_START)
        return self._predict(padded.unfold(1, self.context, 1))

    def start(self, n: int) -> tuple[Tensor, Tensor]:
        state = torch.full((n, self.context), _START, device=self.embedding.weight.device)
        return self._predict(state), state

    def step(self, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.cat([state[:, 1:], tokens[:, None]], dim=1)
        return self._predict(state), state

    def _predict(self, recent: Tensor) -> Tensor:
        embedded = F.dropout(self.embedding(recent).flatten(-2), self.dropout, self.training)
        return F.relu(self.linear(embedded))


class LSTMPredictor(nn.Module):
    """Prediction network over all tokens so far; the state holds hidden and cell state. (n, 2, depth, W)"""

    def __init__(self, settings: TransducerSettings, n_classes: int) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(n_classes, settings.width)
        dropout = settings.dropout if settings.depth > 1 else 0.0
        self.lstm = nn.LSTM(settings.width, settings.width, settings.depth, batch_first=True, dropout=dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Outputs after 0, 1, … U tokens. (B, U) -> (B, U + 1, W)"""
        embedded = self.embedding(F.pad(tokens, (1, 0), value=_START))
        embedded = F.dropout(embedded, self.settings.dropout, self.training)
        device = embedded.device.type
        if recurs_in_full_precision(device):
            with torch.autocast(device, enabled=False):
                return self._recur(embedded)
        return self._recur(embedded)

    def _recur(self, x: Tensor) -> Tensor:
        drops = self.training and self.lstm.dropout > 0
        if x.device.type != "cpu" and (drops or (torch.is_grad_enabled() and not self.training)):
            return self._forward_by_layer(x)
        outputs: Tensor = self.lstm(x)[0]
        return outputs

    def _forward_by_layer(self, x: Tensor) -> Tensor:
        """Run the layers one by one with torch's dropout; cuDNN's ignores `torch.manual_seed`. (B, U, W) -> (B, U, W)

        cuDNN computes gradients only if `train` is set; without dropout, `train` has no other effect.
        """
        train = torch.is_grad_enabled()
        zeros = x.new_zeros(1, len(x), self.settings.width)
        for layer, weights in enumerate(self.lstm.all_weights):
            if layer:
                x = F.dropout(x, self.lstm.dropout, self.training)
            # biases, layers, dropout, train, bidirectional, batch_first
            x = torch.lstm(x, (zeros, zeros), list[Tensor](weights), True, 1, 0.0, train, False, True)[0]
        return x

    def start(self, n: int) -> tuple[Tensor, Tensor]:
        zeros = self.embedding.weight.new_zeros(n, 2, self.settings.depth, self.settings.width)
        return self.step(zeros, torch.full((n,), _START, device=zeros.device))

    def step(self, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden, cell = state.permute(1, 2, 0, 3).contiguous()  # (depth, n, W) each, as torch expects them
        outputs, after = self.lstm(self.embedding(tokens)[:, None], (hidden, cell))
        return outputs[:, 0], torch.stack(after).permute(2, 0, 1, 3)


class ArrayHead:
    """`TransducerHead` of the searches (`decoding/transducer.py`), computed by a torch module."""

    def __init__(self, transducer: Transducer) -> None:
        self.transducer = transducer

    @property
    def n_classes(self) -> int:
        return self.transducer.output.out_features

    @property
    def context(self) -> int | None:
        predictor = self.transducer.predictor
        return predictor.context if isinstance(predictor, StatelessPredictor) else None

    @property
    def _device(self) -> torch.device:
        return self.transducer.output.weight.device

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    @torch.inference_mode()
    def project(self, frames: np.ndarray) -> np.ndarray:
        return self.transducer.encoder_proj(self._tensor(frames)).cpu().numpy()

    @torch.inference_mode()
    def silent_frame(self) -> np.ndarray:
        zeros = self.transducer.output.weight.new_zeros(self.transducer.encoder_proj.in_features)
        return self.transducer.encoder_proj(zeros).cpu().numpy()

    @torch.inference_mode()
    def start(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        predicted, state = self.transducer.start(n)
        return predicted.cpu().numpy(), state.cpu().numpy()

    @torch.inference_mode()
    def step(self, state: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        predicted, after = self.transducer.step(self._tensor(state), self._tensor(tokens))
        return predicted.cpu().numpy(), after.cpu().numpy()

    @torch.inference_mode()
    def join(self, frames: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        hidden = torch.tanh(self._tensor(frames)[:, None] + self._tensor(predicted))
        logits = self.transducer.output(hidden).float()  # (f, R, V)
        return logits.cpu().numpy(), logits.logsumexp(-1).cpu().numpy()
