"""Import of official PyTorch checkpoints into model folders.

`nejm` is the Brain-to-Text '25 baseline, `cffan` the '24 baseline, or its saat12d fork, which can have a layer norm.
Nothing in a checkpoint is executed. Sizes are read from the tensors and checked against the training settings stored
beside them; tensors without a use in the model are listed in `import.json`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from arcuate.config import read_yaml
from arcuate.data.alphabet import CLASSES, N_CLASSES
from arcuate.data.unpickle import load_checkpoint, load_pickle
from arcuate.errors import UserError
from arcuate.files import locked_folder, to_json_value
from arcuate.models.config import (
    FrontEndSettings,
    GRUSettings,
    ModelConfig,
    ModelSettings,
    Patch,
    SessionLayerSettings,
    SmoothingSettings,
)
from arcuate.models.front_end import gaussian_kernel
from arcuate.models.io import save_model
from arcuate.models.model import build_on_meta

Kind = Literal["nejm", "cffan"]
_Value = TypeVar("_Value", int, float, bool)

# Sessions of the '24 release in the order of its preparation script; its checkpoints store no names.
T12_SESSIONS = tuple(
    f"t12.2022.{month:02d}.{day:02d}"
    for month, days in {
        4: (28,),
        5: (5, 17, 19, 24, 26),
        6: (2, 7, 14, 16, 21, 23, 28),
        7: (5, 14, 21, 27, 29),
        8: (2, 11, 13, 18, 23, 25),
    }.items()
    for day in days
)


@dataclass(frozen=True)
class ImportResult:
    """An imported model folder and what it contains."""

    model: Path  # the folder
    kind: str
    checkpoint: str  # name of the imported file
    n_parameters: int
    n_channels: int
    sessions: tuple[str, ...]
    ignored: tuple[str, ...]  # tensors that no computation uses
    metrics: dict[str, float]  # reported by the checkpoint, such as val_per

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the metrics of the checkpoint are top-level keys."""
        fields = asdict(self)
        metrics = fields.pop("metrics")
        return dict(to_json_value(fields | metrics))


class _Checkpoint(NamedTuple):
    """A converted checkpoint: model config and tensors under their names in `Model`."""

    config: ModelConfig
    weights: dict[str, Tensor]
    ignored: tuple[str, ...]
    metrics: dict[str, float]


def import_checkpoint(
    path: str | Path, out: str | Path, kind: str, sessions: Sequence[str] | None = None
) -> ImportResult:
    """Convert an official checkpoint into a model folder; nothing in the checkpoint is executed.

    Args:
        path: Official PyTorch checkpoint, file or folder.
        out: Model folder to write.
        kind: nejm ('25) or cffan ('24).
        sessions: Session names in order, if the checkpoint does not store them.
    """
    path, out = Path(path), Path(out)
    _check_target(out)
    if kind not in ("nejm", "cffan"):
        raise UserError(f"unknown checkpoint kind {kind!r}; use nejm (Brain-to-Text '25) or cffan ('24)")
    if not path.exists():
        raise UserError(f"checkpoint {path} does not exist; check the path")
    try:
        config, weights, ignored, metrics = (_read_nejm if kind == "nejm" else _read_cffan)(path, sessions)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or error.title
        raise UserError(f"{path} describes a model that cannot be built ({where}: {first['msg']})") from error
    model = build_on_meta(config)
    for name, tensor in model.state_dict().items():
        found, expected = tuple(weights[name].shape), tuple(tensor.shape)
        if found != expected:
            raise UserError(f"{path}: the tensor for {name} has shape {found}, but the other tensors imply {expected}")
    model.load_state_dict(weights, assign=True)
    note = {"kind": kind, "checkpoint": path.name, "ignored": ignored, **metrics}
    with locked_folder(out) as temporary:
        _check_target(out)  # another process may have written it meanwhile
        save_model(temporary, model)
        (temporary / "import.json").write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    return ImportResult(
        model=out,
        kind=kind,
        checkpoint=path.name,
        n_parameters=sum(p.numel() for p in model.parameters()),
        n_channels=config.n_channels,
        sessions=config.sessions,
        ignored=ignored,
        metrics=metrics,
    )


def _check_target(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder; choose a new one")


def _read_nejm(path: Path, sessions: Sequence[str] | None = None) -> _Checkpoint:
    """Read a `best_checkpoint` of the '25 baseline, or a folder that contains it, with args.yaml beside it."""
    candidates = [path / "best_checkpoint", path / "checkpoint" / "best_checkpoint", path / "checkpoint"]
    file = _find_file(path, candidates)
    content = load_checkpoint(file)
    if not isinstance(content, dict) or not isinstance(content.get("model_state_dict"), dict):
        _raise_wrong_kind(file, content, "nejm")
    tensors = _Tensors(file, content["model_state_dict"])
    if "dayWeights" in tensors.remaining:
        _raise_wrong_kind(file, content["model_state_dict"], "nejm")
    args = _Args.read_yaml(file.parent / "args.yaml")
    n_sessions = sum(name.startswith("day_weights.") for name in tensors.remaining)
    n_channels = tensors.shape("day_weights.0", 2)[0]
    encoder, n_bins, gru = _read_gru(tensors, "gru.", n_channels, args.get("model.rnn_dropout", 0.0), has_h0=True)
    weights = {"encoder.h0": tensors.take("h0"), **gru}
    for i in range(n_sessions):
        weights[f"front_end.session_layer.weights.{i}"] = tensors.take(f"day_weights.{i}")
        weights[f"front_end.session_layer.biases.{i}"] = tensors.take(f"day_biases.{i}").reshape(-1)
    weights["head.weight"], weights["head.bias"] = tensors.take("out.weight"), tensors.take("out.bias")
    args.expect("model.n_input_features", n_channels)
    args.expect("model.n_units", encoder.width)
    args.expect("model.n_layers", encoder.depth)
    args.expect("dataset.n_classes", weights["head.weight"].shape[0])
    patched = args.get("model.patch_size", 0) > 0
    args.expect("model.patch_size", n_bins if patched else 0)
    transforms = "dataset.data_transforms."
    smoothing = SmoothingSettings(sd=0.0)
    if args.get(transforms + "smooth_data", True):
        sd = args.get(transforms + "smooth_kernel_std", 2.0)
        smoothing = SmoothingSettings(sd=sd, taps=_nejm_taps(sd, args.get(transforms + "smooth_kernel_size", 100)))
    front_end = FrontEndSettings(
        normalise="none",
        smoothing=smoothing,
        session_layer=SessionLayerSettings(dropout=args.get("model.input_network.input_layer_dropout", 0.0)),
        patch=Patch(bins=n_bins, stride=args.get("model.patch_stride") if patched else 1),
    )
    settings = ModelSettings(front_end=front_end, encoder=encoder, output_init="xavier")
    names = sessions if sessions is not None else args.find("dataset.sessions")
    config = _make_config(file, settings, n_channels, names, n_sessions, len(weights["head.bias"]))
    metrics = {name.lower(): _number(content[name]) for name in ("val_PER", "val_loss") if name in content}
    return _Checkpoint(config, weights, tensors.finish(()), metrics)


def _read_cffan(path: Path, sessions: Sequence[str] | None = None) -> _Checkpoint:
    """Read a `modelWeights` file of the '24 baseline, or its folder, with `args` beside it."""
    file = _find_file(path, [path / "modelWeights"])
    content = load_checkpoint(file)
    if not isinstance(content, dict) or "model_state_dict" in content:
        _raise_wrong_kind(file, content, "cffan")
    tensors = _Tensors(file, content)
    if "dayWeights" not in tensors.remaining:
        _raise_wrong_kind(file, content, "cffan")
    args_file = _require_file(file.parent / "args")
    args = _Args(args_file, load_pickle(args_file))
    n_sessions, n_channels, _ = tensors.shape("dayWeights", 3)
    encoder, n_bins, weights = _read_gru(tensors, "gru_decoder.", n_channels, args.get("dropout", 0.0), has_h0=False)
    for name in ("weight_ih_l0", "weight_ih_l0_reverse"):  # channel-major there, time-major here
        if (w := weights.get(f"encoder.gru.{name}")) is not None:
            w = w.unflatten(1, (n_channels, n_bins)).transpose(1, 2).flatten(1).contiguous()
            weights[f"encoder.gru.{name}"] = w
    weights_by_session = tensors.take("dayWeights")
    biases_by_session = tensors.take("dayBias").reshape(n_sessions, -1)
    for i in range(n_sessions):
        weights[f"front_end.session_layer.weights.{i}"] = weights_by_session[i].clone()
        weights[f"front_end.session_layer.biases.{i}"] = biases_by_session[i].clone()
    layer_norm = "ln.weight" in tensors.remaining  # in the fork, after the activation of the session layer
    for name in ("weight", "bias") if layer_norm else ():
        weights[f"front_end.session_layer.layer_norm.{name}"] = tensors.take(f"ln.{name}")
    args.expect("use_layer_norm", layer_norm)
    weights["head.weight"] = tensors.take("fc_decoder_out.weight")
    weights["head.bias"] = tensors.take("fc_decoder_out.bias")
    args.expect("nInputFeatures", n_channels)
    args.expect("nUnits", encoder.width)
    args.expect("nLayers", encoder.depth)
    args.expect("bidirectional", encoder.bidirectional)
    args.expect("nClasses", weights["head.weight"].shape[0] - 1)
    args.expect("kernelLen", n_bins)
    tensors.shape("gaussianSmoother.weight", 3)
    kernel = tensors.take("gaussianSmoother.weight")[0, 0].tolist()
    smoothing = SmoothingSettings(sd=args.get("gaussianSmoothWidth"), taps=len(kernel))
    if not np.allclose(kernel, gaussian_kernel(smoothing), atol=1e-5):
        raise UserError(f"{file}: gaussianSmoother.weight is not a Gaussian kernel with gaussianSmoothWidth of args")
    patch = Patch(bins=n_bins, stride=args.get("strideLen"))
    session_layer = SessionLayerSettings(layer_norm=layer_norm, dropout=args.get("input_dropout", 0.0))
    front_end = FrontEndSettings(normalise="block", smoothing=smoothing, session_layer=session_layer, patch=patch)
    settings = ModelSettings(front_end=front_end, encoder=encoder, output_init="default")
    default = T12_SESSIONS if n_sessions == len(T12_SESSIONS) else [f"session-{i:02d}" for i in range(n_sessions)]
    names = sessions or default
    config = _make_config(file, settings, n_channels, names, n_sessions, len(weights["head.bias"]))
    return _Checkpoint(config, weights, tensors.finish(("inpLayer",)), {})


def _read_gru(
    tensors: "_Tensors", prefix: str, n_channels: int, dropout: float, has_h0: bool
) -> tuple[GRUSettings, int, dict[str, Tensor]]:
    """Encoder settings implied by the recurrent tensors, bins per patch, and the tensors under their new names."""
    names = [name for name in tensors.remaining if name.startswith(prefix)]
    depth = sum(name.startswith(prefix + "weight_hh_") and not name.endswith("_reverse") for name in names)
    width = tensors.shape(prefix + "weight_hh_l0", 2)[1]
    n_bins, rest = divmod(tensors.shape(prefix + "weight_ih_l0", 2)[1], n_channels)
    if rest or not n_bins:
        raise UserError(f"{tensors.file}: the width of {prefix}weight_ih_l0 is not a multiple of {n_channels} channels")
    bidirectional = any(name.endswith("_reverse") for name in names)
    encoder = GRUSettings(
        width=width, depth=depth, dropout=dropout, bidirectional=bidirectional, learned_initial_state=has_h0
    )
    weights = {}
    for layer in range(depth):
        for suffix in (f"l{layer}", f"l{layer}_reverse")[: 1 + bidirectional]:
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                weights[f"encoder.gru.{name}_{suffix}"] = tensors.take(f"{prefix}{name}_{suffix}")
    return encoder, n_bins, weights


def _nejm_taps(sd: float, size: int) -> int:
    """Kernel length of the '25 baseline: weights above 0.01 of a Gaussian cut at four standard deviations."""
    if not 0 < 4 * sd + 0.5 < size / 2:
        raise UserError(f"smoothing with standard deviation {sd} in a kernel of {size} bins cannot be imported")
    radius = int(4 * sd + 0.5)
    raw = [math.exp(-0.5 * (i / sd) ** 2) for i in range(-radius, radius + 1)]
    return sum(weight / sum(raw) > 0.01 for weight in raw)


def _make_config(
    file: Path, settings: ModelSettings, n_channels: int, sessions: Any, n_sessions: int, n_classes: int
) -> ModelConfig:
    if not isinstance(sessions, Sequence) or not all(isinstance(name, str) for name in sessions):
        raise UserError(f"{file.parent / 'args.yaml'} does not list dataset.sessions; list them with --sessions")
    if n_classes != N_CLASSES:
        raise UserError(f"{file} has {n_classes} classes; expected the {N_CLASSES} of the Brain-to-Text benchmarks")
    if len(sessions) != n_sessions or len(set(sessions)) != n_sessions:
        raise UserError(
            f"{file} has {n_sessions} session layers, but {len(set(sessions))} distinct session names were given;"
            " list all of them in order"
        )
    return ModelConfig(settings=settings, n_channels=n_channels, sessions=tuple(sessions), classes=CLASSES)


def _find_file(path: Path, candidates: Sequence[Path]) -> Path:
    for candidate in (path, *candidates):
        if candidate.is_file():
            return candidate
    raise UserError(f"{path} contains no checkpoint; expected {', '.join(c.name for c in candidates)}")


def _raise_wrong_kind(file: Path, content: Any, kind: Kind) -> NoReturn:
    other = "cffan" if kind == "nejm" else "nejm"
    names = " ".join(map(str, content)) if isinstance(content, Mapping) else ""
    if ("dayWeights" in names) if kind == "nejm" else ("model_state_dict" in names or "day_weights." in names):
        raise UserError(f"{file} is a checkpoint of kind {other}; import it with --kind {other}")
    raise UserError(f"{file} is not a checkpoint of kind {kind}; pass the file written by its training")


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


class _Tensors:
    """Tensors of a state dict, without wrapper prefixes; each is taken once."""

    def __init__(self, file: Path, state: Mapping[Any, Any]) -> None:
        self.file = file
        self.remaining: dict[str, Tensor] = {}
        size = file.stat().st_size
        for key, tensor in state.items():
            name = ".".join(part for part in str(key).split(".") if part not in ("module", "_orig_mod"))
            plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
            if not plain or not tensor.is_floating_point() or tensor.numel() > size:
                raise UserError(f"{file}: {key} is not a dense floating-point tensor")
            if name in self.remaining:
                raise UserError(f"{file}: {name} occurs twice under different prefixes")
            self.remaining[name] = tensor

    def shape(self, name: str, n_axes: int) -> tuple[int, ...]:
        shape = tuple(self._find(name).shape)
        if len(shape) != n_axes:
            raise UserError(f"{self.file}: {name} has {len(shape)} axes instead of {n_axes}")
        return shape

    def _find(self, name: str) -> Tensor:
        if name not in self.remaining:
            raise UserError(f"{self.file} has no tensor {name}; it is not a complete checkpoint of this kind")
        return self.remaining[name]

    def take(self, name: str) -> Tensor:
        tensor = self._find(name).detach().float().contiguous().clone()
        del self.remaining[name]
        if not bool(tensor.isfinite().all()):
            raise UserError(f"{self.file}: {name} contains non-finite values; the training diverged")
        return tensor

    def finish(self, unused: tuple[str, ...]) -> tuple[str, ...]:
        """Names of the remaining tensors, all of which must start with one of the `unused` prefixes."""
        for name in self.remaining:
            if not name.startswith(unused or ("\0",)):
                raise UserError(f"{self.file} contains {name}, which the official model does not have")
        return tuple(self.remaining)


class _Args:
    """Training settings stored beside a checkpoint."""

    def __init__(self, file: Path, tree: Any) -> None:
        if not isinstance(tree, Mapping):
            raise UserError(f"{file} is not a mapping of training settings; copy the file written by the training")
        self.file, self.tree = file, tree

    @staticmethod
    def read_yaml(file: Path) -> "_Args":
        return _Args(file, read_yaml(_require_file(file)))

    def find(self, path: str) -> Any:
        node: Any = self.tree
        for key in path.split("."):
            node = node.get(key) if isinstance(node, Mapping) else None
        return node

    def get(self, path: str, default: _Value | None = None) -> Any:
        """Number at a dotted path; required unless a default is given."""
        value = self.find(path)
        value = default if value is None else value
        if isinstance(value, np.generic):
            value = value.item()
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"{self.file}: {path} is {value!r}, expected a number; correct the file")
        return value

    def expect(self, path: str, found: int) -> None:
        """Check a size in the settings, if present, against the size of the tensors."""
        stated = self.find(path)
        if stated is not None and stated != found:
            raise UserError(f"{self.file}: {path} is {stated}, but the weights imply {found}; pass matching files")


def _require_file(file: Path) -> Path:
    if not file.is_file():
        raise UserError(f"{file} is missing; copy it from the training folder to the checkpoint")
    return file
