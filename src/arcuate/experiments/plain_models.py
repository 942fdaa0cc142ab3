"""The official models as plain torch.nn modules: explicit patches, and one loop over time.

`selftest` compares the speed of the models of this package with them. They have the same sizes and the same outputs per
frame, without dropout.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arcuate.models.config import GRUSettings, ModelConfig, SSMSettings, TransformerSettings


class PlainModel(nn.Module):
    """Session layer and patches in their most direct form, an encoder of torch.nn, and the output layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        settings = config.settings
        self.patch, n_channels = settings.front_end.patch.sampled, config.n_channels
        self.dilation = settings.front_end.patch.dilation
        n_maps = len(config.sessions) if settings.front_end.session_layer.enabled else 0
        self.weights = nn.ParameterList(nn.Parameter(torch.eye(n_channels)) for _ in range(n_maps))
        n_inputs, encoder = n_channels * self.patch.bins, settings.encoder
        match encoder:
            case GRUSettings():
                self.encoder: nn.Module = _PlainGRU(encoder, n_inputs)
            case TransformerSettings():
                self.encoder = _PlainTransformer(encoder, n_inputs)
            case SSMSettings():
                self.encoder = _PlainSSM(encoder, n_inputs)
        width = encoder.width * (2 if isinstance(encoder, GRUSettings) and encoder.bidirectional else 1)
        self.head = nn.Linear(width, len(config.classes))

    def forward(self, bins: Tensor, session: list[int]) -> Tensor:
        """(B, T, C) -> log-probabilities (B, F, V)"""
        if len(self.weights):
            bins = F.softsign(torch.einsum("btc,bcd->btd", bins, torch.stack([self.weights[s] for s in session])))
        bins = bins[:, :: self.dilation]
        patches = bins.unfold(1, self.patch.bins, self.patch.stride).transpose(2, 3).flatten(2)  # (B, F, bins * C)
        return F.log_softmax(self.head(self.encoder(patches)), dim=-1)


class _PlainGRU(nn.Module):
    def __init__(self, settings: GRUSettings, n_inputs: int) -> None:
        super().__init__()
        options = {"batch_first": True, "bidirectional": settings.bidirectional}
        self.gru = nn.GRU(n_inputs, settings.width, settings.depth, **options)

    def forward(self, x: Tensor) -> Tensor:
        frames: Tensor = self.gru(x)[0]
        return frames


class _PlainTransformer(nn.Module):
    """nn.TransformerEncoder with a mask; its attention covers the complete trial."""

    def __init__(self, settings: TransformerSettings, n_inputs: int) -> None:
        super().__init__()
        self.input = nn.Linear(n_inputs, settings.width)
        width = settings.width
        n_hidden = settings.ffn_expansion * width
        layer = nn.TransformerEncoderLayer(
            width, settings.n_heads, n_hidden, 0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, settings.depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.context, self.causal = settings.context, settings.causal

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(x.shape[1], device=x.device)
        distance = index[:, None] - index
        hidden = distance >= self.context
        if self.causal:
            hidden = hidden | (distance < 0)
        frames: Tensor = self.layers(self.input(x), mask=hidden)
        return frames


class _PlainSSM(nn.Module):
    """The recurrence of Mamba-2 frame by frame, in each direction."""

    def __init__(self, settings: SSMSettings, n_inputs: int) -> None:
        super().__init__()
        self.input = nn.Linear(n_inputs, settings.width)
        n = settings.n_directions
        sizes = (settings.width, settings.width // n, settings.n_heads // n, settings.state_dim, settings.conv_kernel)
        self.blocks = nn.ModuleList(
            nn.ModuleList(_PlainMixer(*sizes, backward=bool(i)) for i in range(n)) for _ in range(settings.depth)
        )
        self.outputs = nn.ModuleList(nn.Linear(settings.width, settings.width) for _ in range(settings.depth))
        self.norms = nn.ModuleList(nn.LayerNorm(settings.width) for _ in range(settings.depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.input(x)
        for mixers, output, norm in zip(self.blocks, self.outputs, self.norms, strict=True):
            normed = norm(x)
            x = x + output(torch.cat([mixer(normed) for mixer in mixers], dim=-1))  # type: ignore[attr-defined]
        return x


class _PlainMixer(nn.Module):
    def __init__(
        self, n_inputs: int, width: int, n_heads: int, state_dim: int, kernel: int, backward: bool = False
    ) -> None:
        super().__init__()
        self.sizes, self.backward_in_time = (width, n_heads, state_dim), backward
        self.projection = nn.Linear(n_inputs, 2 * width + 2 * state_dim + n_heads, bias=False)
        self.conv = nn.Conv1d(width + 2 * state_dim, width + 2 * state_dim, kernel, groups=width + 2 * state_dim)
        self.a_log, self.skip = nn.Parameter(torch.zeros(n_heads)), nn.Parameter(torch.ones(n_heads))
        self.norm = nn.LayerNorm(width)

    def forward(self, frames: Tensor) -> Tensor:
        width, n_heads, n = self.sizes
        frames = frames.flip(1) if self.backward_in_time else frames
        gate, inputs, dt = self.projection(frames).split((width, width + 2 * n, n_heads), dim=-1)
        padded = F.pad(inputs.transpose(1, 2), (self.conv.kernel_size[0] - 1, 0))
        x, b, c = F.silu(self.conv(padded).transpose(1, 2)).split((width, n, n), dim=-1)
        dt, heads = F.softplus(dt), x.unflatten(-1, (n_heads, -1))  # (B, F, H), (B, F, H, P)
        decay = torch.exp(-dt * self.a_log.exp())
        state, outputs = heads.new_zeros(len(x), n_heads, width // n_heads, n), []
        for t in range(x.shape[1]):
            added = (dt[:, t, :, None] * heads[:, t])[..., None] * b[:, t, None, None]
            state = decay[:, t, :, None, None] * state + added
            outputs.append((state * c[:, t, None, None]).sum(-1) + self.skip[:, None] * heads[:, t])
        y = self.norm(torch.stack(outputs, dim=1).flatten(2) * F.silu(gate))
        return y.flip(1) if self.backward_in_time else y
