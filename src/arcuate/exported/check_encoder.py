"""Check the properties that training, evaluation and streaming require of an encoder (`arcuate new check`).

The encoder is tested inside a small model, through the same functions that training and decoding call.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from arcuate.config import apply_overrides, component_class
from arcuate.data.alphabet import CLASSES
from arcuate.errors import UserError
from arcuate.models.config import FrontEndSettings, ModelConfig, ModelSettings, Patch
from arcuate.models.io import load_model, save_model
from arcuate.models.model import Model
from arcuate.plugins import has_component, trust_code

_TOLERANCE = 1e-4
_N_CHANNELS, _SESSIONS = 8, ("first", "second")
_LENGTHS = (61, 23, 40, 5)  # bins of the trials; the last is shorter than one patch
_CHUNKS = (1, 3, 14, 7)  # bins per step of a stream, in turn
_BUILT_IN = ("gru", "ssm", "transformer")


@dataclass(frozen=True)
class PropertyCheck:
    """Outcome of the check of one property."""

    name: str
    passed: bool | None  # None: not applicable
    detail: str


@dataclass(frozen=True)
class EncoderCheck:
    """Outcome of all checks of an encoder."""

    kind: str
    n_parameters: int
    checks: tuple[PropertyCheck, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    @property
    def exit_code(self) -> int:
        return int(not self.passed)

    def to_dict(self) -> dict[str, Any]:
        checks = [{"name": check.name, "passed": check.passed, "detail": check.detail} for check in self.checks]
        return {"kind": self.kind, "n_parameters": self.n_parameters, "passed": self.passed, "checks": checks}


def check_encoder(kind: str, settings: Mapping[str, Any] | list[str] | None = None) -> EncoderCheck:
    """Test an encoder: streaming = offline, padding, batch order, gradients, saving, export.

    Args:
        kind: Import path such as mylab.models:ConvNet, or the name of an encoder.
        settings: Settings of the encoder, such as width=32; in Python also a mapping.
    """
    tree: dict[str, Any] = {"kind": kind}
    apply_overrides(tree, settings or ())
    with trust_code():
        if kind not in _BUILT_IN and not has_component("encoders", kind):
            component_class("encoders", kind)  # raises, with the names that are installed
        try:
            model_settings = ModelSettings.model_validate(
                {"encoder": tree, "front_end": FrontEndSettings(patch=Patch(bins=6, stride=3)).model_dump()}
            )
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise UserError(f"the settings of {kind} are invalid: {where}: {first['msg']}") from None
        torch.manual_seed(0)
        config = ModelConfig(settings=model_settings, n_channels=_N_CHANNELS, sessions=_SESSIONS, classes=CLASSES)
        model = _run(lambda: Model(config), f"{kind} cannot be built")
        assert isinstance(model, Model)
        return EncoderCheck(kind, sum(p.numel() for p in model.parameters()), tuple(_check_properties(model)))


def _run(function: Callable[[], Any], what: str) -> Any:
    try:
        return function()
    except UserError:
        raise
    except Exception as error:  # third-party code may raise anything
        raise UserError(f"{what}: {_summary(error)}") from error


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _check_properties(model: Model) -> Iterator[PropertyCheck]:
    properties: tuple[tuple[str, Callable[[Model], str | None]], ...] = (
        ("one frame per patch", _check_frames),
        ("evaluation is deterministic", _check_deterministic),
        ("padding changes nothing", _check_padding),
        ("batch order changes nothing", _check_order),
        ("streaming equals offline", _check_streaming),
        ("all parameters get finite gradients", _check_gradients),
        ("a saved and reloaded model gives the same outputs", _check_saving),
    )
    for name, check in properties:
        if check is _check_streaming and not model.config.settings.encoder.causal:
            yield PropertyCheck(name, None, "the encoder is not causal with these settings, so it cannot stream")
            continue
        try:
            problem = check(model.eval())
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything; reported as a failure
            problem = _summary(error)
        yield PropertyCheck(name, problem is None, problem or "")
    yield _check_export(model.eval())


def _batch() -> tuple[Tensor, Tensor, Tensor]:
    """Bins (B, T, C) with zeros as padding, their lengths and sessions."""
    generator = torch.Generator().manual_seed(1)
    bins = torch.randn(len(_LENGTHS), max(_LENGTHS), _N_CHANNELS, generator=generator)
    for i, length in enumerate(_LENGTHS):
        bins[i, length:] = 0.0
    return bins, torch.tensor(_LENGTHS), torch.tensor([0, 1, 0, 1])


def _log_probs(model: Model, bins: Tensor, n_bins: Tensor, session: Tensor) -> list[Tensor]:
    """Outputs of each trial on its true frames."""
    with torch.no_grad():
        outputs = model(bins, n_bins, session)
    return [row[:n] for row, n in zip(outputs.log_probs["ctc"], outputs.n_frames.tolist(), strict=True)]


def _largest(a: list[Tensor], b: list[Tensor]) -> float:
    if any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return float("inf")
    return max(float((x - y).abs().max()) if x.numel() else 0.0 for x, y in zip(a, b, strict=True))


def _compare(a: list[Tensor], b: list[Tensor], what: str) -> str | None:
    difference = _largest(a, b)
    if difference <= _TOLERANCE:
        return None
    shapes = "" if difference != float("inf") else f"; shapes {[tuple(x.shape) for x in a]} and"
    shapes += "" if not shapes else f" {[tuple(x.shape) for x in b]}"
    return f"{what} differ by up to {difference:.2g}, expected at most {_TOLERANCE:g}{shapes}"


def _check_frames(model: Model) -> str | None:
    bins, n_bins, session = _batch()
    with torch.no_grad():
        frames = model(bins, n_bins, session).frames
    patch = model.config.settings.front_end.patch
    expected = (len(bins), patch.count_frames(bins.shape[1]), model.encoder.n_outputs)
    if tuple(frames.shape) != expected:
        return f"frames have shape {tuple(frames.shape)}, expected {expected} (trials, frames, n_outputs)"
    return None if bool(frames.isfinite().all()) else "frames contain NaN or infinity"


def _check_deterministic(model: Model) -> str | None:
    first, second = _log_probs(model, *_batch()), _log_probs(model, *_batch())
    return None if _largest(first, second) == 0 else "two evaluations of one batch differ; disable dropout in eval mode"


def _check_padding(model: Model) -> str | None:
    bins, n_bins, session = _batch()
    alone = [
        _log_probs(model, bins[i : i + 1, :n], n_bins[i : i + 1], session[i : i + 1])[0]
        for i, n in enumerate(n_bins.tolist())
    ]
    return _compare(_log_probs(model, bins, n_bins, session), alone, "outputs in a batch and of single trials")


def _check_order(model: Model) -> str | None:
    bins, n_bins, session = _batch()
    order = torch.tensor([2, 0, 3, 1])
    changed = _log_probs(model, bins[order], n_bins[order], session[order])
    plain = _log_probs(model, bins, n_bins, session)
    return _compare([plain[i] for i in order.tolist()], changed, "outputs in two orders")


def _check_streaming(model: Model) -> str | None:
    bins, n_bins, session = _batch()
    streamed = []
    with torch.no_grad():
        for i, n in enumerate(n_bins.tolist()):
            state, parts, start, k = model.start(int(session[i])), [], 0, 0
            while start < n:
                stop = min(n, start + _CHUNKS[k % len(_CHUNKS)])
                outputs, state = model.step(state, bins[i : i + 1, start:stop])
                parts.append(outputs.log_probs["ctc"][0])
                start, k = stop, k + 1
            parts.append(model.finish(state).log_probs["ctc"][0])
            streamed.append(torch.cat(parts))
    return _compare(_log_probs(model, bins, n_bins, session), streamed, "outputs offline and as a stream")


def _check_gradients(model: Model) -> str | None:
    model.train()
    model.zero_grad()
    outputs = model(*_batch())
    outputs.log_probs["ctc"].square().mean().backward()
    bad = [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.isfinite().all())]
    model.zero_grad()
    return f"{', '.join(bad[:3])} have no gradient or a non-finite one" if bad else None


def _check_saving(model: Model) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), model)
        loaded = load_model(folder)
    return _compare(_log_probs(model, *_batch()), _log_probs(loaded, *_batch()), "outputs before and after saving")


def _check_export(model: Model) -> PropertyCheck:
    """Whether `arcuate export` can write the model; optional, because research encoders need not be deployable."""
    name = "can be exported (optional)"
    try:
        from arcuate.exported.graphs import build_graphs

        build_graphs(model)
    except ImportError as error:
        return PropertyCheck(name, None, f"needs {error.name}; install it with: pip install 'arcuate[export]'")
    except UserError as error:
        return PropertyCheck(name, None, f"no: {error}")
    return PropertyCheck(name, True, "")
