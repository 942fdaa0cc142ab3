"""Hypothesis strategies for models and batches."""

import torch
from hypothesis import strategies as st

from arcuate.data.alphabet import CLASSES
from arcuate.data.batching import BatchStatistics
from arcuate.models.config import (
    ConvStemSettings,
    DenoiserSettings,
    EncoderSettings,
    FrontEndSettings,
    GRUSettings,
    ModelConfig,
    ModelSettings,
    Patch,
    SessionLayerSettings,
    SmoothingSettings,
    SpeakingModeSettings,
    SSMSettings,
    TransducerSettings,
    TransformerSettings,
)
from arcuate.models.model import Model
from arcuate.models.transformer import Transformer

N_CHANNELS, N_SESSIONS = 4, 3


def gru(draw, bidirectional: bool) -> GRUSettings:
    depth, learned_initial_state = draw(st.integers(1, 2)), draw(st.booleans())
    return GRUSettings(width=5, depth=depth, bidirectional=bidirectional, learned_initial_state=learned_initial_state)


def ssm(draw, bidirectional: bool) -> SSMSettings:
    heads, depth = draw(st.sampled_from([2, 4])), draw(st.integers(1, 2))
    return SSMSettings(width=8, depth=depth, n_heads=heads, state_dim=3, bidirectional=bidirectional)


def transformer(draw, bidirectional: bool) -> TransformerSettings:
    """Contexts shorter and longer than the trials."""
    return TransformerSettings(
        width=8,
        depth=draw(st.integers(1, 2)),
        n_heads=draw(st.sampled_from([1, 2, 4])),
        context=draw(st.sampled_from([1, 2, 5, 16, 100])),
        bidirectional=bidirectional,
    )


KINDS = {"gru": gru, "ssm": ssm, "transformer": transformer}  # all encoders satisfy the same laws


NO_TRANSDUCER = TransducerSettings()
TRANSDUCERS = (
    TransducerSettings(enabled=True, width=6),
    TransducerSettings(enabled=True, width=6, predictor="lstm"),
)


@st.composite
def models(draw, bidirectional=st.booleans(), transducer=st.just(NO_TRANSDUCER)) -> Model:
    dilation = draw(st.sampled_from([1, 1, 2, 3]))
    n_sampled = draw(st.integers(1 if dilation == 1 else 2, 8 // dilation + 1))
    front_end = FrontEndSettings(
        normalise=draw(st.sampled_from(["none", "block", "rolling"])),
        log1p=draw(st.booleans()),
        smoothing=SmoothingSettings(sd=draw(st.sampled_from([0.0, 2.0])), taps=draw(st.sampled_from([1, 4, 9, 20]))),
        session_layer=SessionLayerSettings(enabled=draw(st.booleans()), layer_norm=draw(st.booleans())),
        stem=ConvStemSettings(enabled=draw(st.booleans())),
        patch=Patch(
            bins=(n_sampled - 1) * dilation + 1,
            stride=draw(st.integers(1, n_sampled - (dilation > 1))) * dilation,
            dilation=dilation,
        ),
    )
    encoder: EncoderSettings = KINDS[draw(st.sampled_from(sorted(KINDS)))](draw, draw(bidirectional))
    torch.manual_seed(draw(st.integers(0, 99)))
    config = ModelConfig(
        settings=ModelSettings(
            front_end=front_end,
            encoder=encoder,
            transducer=draw(transducer),
            mode=SpeakingModeSettings(enabled=draw(st.booleans())),
            denoiser=DenoiserSettings(enabled=draw(st.booleans()), width=4, steps=2),
        ),
        n_channels=N_CHANNELS,
        sessions=tuple(f"s{i}" for i in range(N_SESSIONS)),
        classes=CLASSES,
    )
    model = Model(config).eval()
    with torch.no_grad():
        if model.transducer is not None:
            for parameter in model.transducer.parameters():
                parameter *= 3.0  # sharper than at the start, so that hypotheses differ
        for part in filter(None, (model.front_end, model.mode, model.denoiser)):
            for parameter in part.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
        if isinstance(model.encoder, Transformer):
            model.encoder.position_bias.table.normal_()  # initialised to 0, which would hide positions
        if model.mode is not None:
            model.mode.set_evidence_statistics(
                torch.full_like(model.mode.evidence_mean, 4.0), torch.full_like(model.mode.evidence_sd, 9.0)
            )
    return model


def make_batch(lengths: list[int], seed: int) -> tuple:
    torch.manual_seed(seed)
    n = len(lengths)
    bins = torch.randn(n, max(lengths), N_CHANNELS) * 2 + 1
    past = BatchStatistics(torch.randn(n, N_CHANNELS), torch.rand(n, N_CHANNELS) + 0.5, torch.randint(0, 99, (n,)))
    return bins, torch.tensor(lengths), torch.randint(0, N_SESSIONS, (n,)), past


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=4)
