"""Official PyTorch checkpoints into model folders: the same numbers under our names.

`nejm` is the Brain-to-Text '25 baseline, `cffan` the '24 one. Sizes come from the tensors and are checked
against the settings beside them; what the model has no use for is named in import.json.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import yaml
from pydantic import ValidationError
from torch import Tensor

from arcuate.data.alphabet import CLASSES, N_CLASSES
from arcuate.data.unpickle import load_checkpoint, load_pickle
from arcuate.errors import UserError
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
Value = TypeVar("Value", int, float, bool)

# The sessions of the '24 release in the order of its preparation, which keeps no names.
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
class Foreign:
    """A checkpoint read and understood: the config it amounts to and its tensors under our names."""

    config: ModelConfig
    weights: dict[str, Tensor]
    ignored: tuple[str, ...]
    facts: dict[str, float]


def import_checkpoint(path: Path, out: Path, kind: str, sessions: Sequence[str] | None = None) -> Path:
    """Convert an official checkpoint into the model folder `out`; `sessions` names its session layers."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder; choose a new one.")
    if kind not in ("nejm", "cffan"):
        raise UserError(f"There is no checkpoint kind {kind!r}; use nejm (Brain-to-Text '25) or cffan ('24).")
    if not path.exists():
        raise UserError(f"There is no checkpoint at {path}; check the path.")
    try:
        foreign = read_nejm(path, sessions) if kind == "nejm" else read_cffan(path, sessions)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or error.title
        raise UserError(
            f"{path} describes a model that cannot be built ({where}: {first['msg']})."
        ) from error
    model = build_on_meta(foreign.config)
    for name, tensor in model.state_dict().items():
        if foreign.weights[name].shape != tensor.shape:
            found, wanted = tuple(foreign.weights[name].shape), tuple(tensor.shape)
            raise UserError(
                f"{path}: the tensor for {name} has shape {found} where the others imply {wanted}."
            )
    model.load_state_dict(foreign.weights, assign=True)
    save_model(out, model)
    note = {"kind": kind, "checkpoint": path.name, "ignored": foreign.ignored, **foreign.facts}
    (out / "import.json").write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    return out


def read_nejm(path: Path, sessions: Sequence[str] | None = None) -> Foreign:
    """A `best_checkpoint` of the '25 baseline, or a folder around it; args.yaml lies beside it."""
    candidates = [path / "best_checkpoint", path / "checkpoint" / "best_checkpoint", path / "checkpoint"]
    file = _find(path, candidates)
    content = load_checkpoint(file)
    if not isinstance(content, dict) or not isinstance(content.get("model_state_dict"), dict):
        _refuse_kind(file, content, "nejm")
    tensors = _Tensors(file, content["model_state_dict"])
    if "dayWeights" in tensors.left:
        _refuse_kind(file, content["model_state_dict"], "nejm")
    args = _Args.read_yaml(file.parent / "args.yaml")
    n_sessions = sum(name.startswith("day_weights.") for name in tensors.left)
    n_channels = tensors.shape("day_weights.0", 2)[0]
    encoder, n_bins, gru = _read_gru(tensors, "gru.", n_channels, args.get("model.rnn_dropout", 0.0))
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
        smoothing = SmoothingSettings(
            sd=sd, taps=_nejm_taps(sd, args.get(transforms + "smooth_kernel_size", 100))
        )
    front_end = FrontEndSettings(
        normalise="none",
        smoothing=smoothing,
        session_layer=SessionLayerSettings(dropout=args.get("model.input_network.input_layer_dropout", 0.0)),
        patch=Patch(bins=n_bins, stride=args.get("model.patch_stride") if patched else 1),
    )
    settings = ModelSettings(front_end=front_end, encoder=encoder, output_init="xavier")
    names = sessions if sessions is not None else args.find("dataset.sessions")
    config = _make_config(file, settings, n_channels, names, n_sessions, len(weights["head.bias"]))
    facts = {name.lower(): _number(content[name]) for name in ("val_PER", "val_loss") if name in content}
    return Foreign(config, weights, tensors.leave(()), facts)


def read_cffan(path: Path, sessions: Sequence[str] | None = None) -> Foreign:
    """A `modelWeights` of the '24 baseline, or its folder; `args` lies beside it."""
    file = _find(path, [path / "modelWeights"])
    content = load_checkpoint(file)
    if not isinstance(content, dict) or "model_state_dict" in content:
        _refuse_kind(file, content, "cffan")
    tensors = _Tensors(file, content)
    if "dayWeights" not in tensors.left:
        _refuse_kind(file, content, "cffan")
    args = _Args.read_pickle(file.parent / "args")
    n_sessions, n_channels, _ = tensors.shape("dayWeights", 3)
    encoder, n_bins, gru = _read_gru(
        tensors, "gru_decoder.", n_channels, args.get("dropout", 0.0), learned=False
    )
    weights = dict(gru)
    for name in ("weight_ih_l0", "weight_ih_l0_reverse"):  # channel after channel there, bin after bin here
        if (w := weights.get(f"encoder.gru.{name}")) is not None:
            w = w.unflatten(1, (n_channels, n_bins)).transpose(1, 2).flatten(1).contiguous()
            weights[f"encoder.gru.{name}"] = w
    maps, shifts = tensors.take("dayWeights"), tensors.take("dayBias").reshape(n_sessions, -1)
    for i in range(n_sessions):
        weights[f"front_end.session_layer.weights.{i}"] = maps[i].clone()
        weights[f"front_end.session_layer.biases.{i}"] = shifts[i].clone()
    weights["head.weight"] = tensors.take("fc_decoder_out.weight")
    weights["head.bias"] = tensors.take("fc_decoder_out.bias")
    args.expect("nInputFeatures", n_channels)
    args.expect("nUnits", encoder.width)
    args.expect("nLayers", encoder.depth)
    args.expect("bidirectional", encoder.bidirectional)
    args.expect("nClasses", weights["head.weight"].shape[0] - 1)
    args.expect("kernelLen", n_bins)
    smoothing = SmoothingSettings(
        sd=args.get("gaussianSmoothWidth"), taps=tensors.shape("gaussianSmoother.weight", 3)[2]
    )
    theirs = tensors.take("gaussianSmoother.weight")[0, 0].tolist()
    if not np.allclose(theirs, gaussian_kernel(smoothing), atol=1e-5):
        raise UserError(
            f"{file}: gaussianSmoother.weight is not the kernel that gaussianSmoothWidth in args gives."
        )
    front_end = FrontEndSettings(
        normalise="block", smoothing=smoothing, patch=Patch(bins=n_bins, stride=args.get("strideLen"))
    )
    settings = ModelSettings(front_end=front_end, encoder=encoder, output_init="default")
    names = sessions or (
        T12_SESSIONS if n_sessions == len(T12_SESSIONS) else [f"session-{i:02d}" for i in range(n_sessions)]
    )
    config = _make_config(file, settings, n_channels, names, n_sessions, len(weights["head.bias"]))
    return Foreign(config, weights, tensors.leave(("inpLayer",)), {})


def _read_gru(
    tensors: "_Tensors", prefix: str, n_channels: int, dropout: float, learned: bool = True
) -> tuple[GRUSettings, int, dict[str, Tensor]]:
    """The encoder the recurrent tensors amount to, its bins per patch, and the tensors under our names."""
    names = [name for name in tensors.left if name.startswith(prefix)]
    depth = sum(name.startswith(prefix + "weight_hh_") and not name.endswith("_reverse") for name in names)
    width = tensors.shape(prefix + "weight_hh_l0", 2)[1]
    n_bins, rest = divmod(tensors.shape(prefix + "weight_ih_l0", 2)[1], n_channels)
    if rest or not n_bins:
        raise UserError(
            f"{tensors.file}: {prefix}weight_ih_l0 does not read whole bins of {n_channels} channels."
        )
    bidirectional = any(name.endswith("_reverse") for name in names)
    encoder = GRUSettings(
        width=width, depth=depth, dropout=dropout, bidirectional=bidirectional, learned_initial_state=learned
    )
    weights = {}
    for layer in range(depth):
        for suffix in (f"l{layer}", f"l{layer}_reverse")[: 1 + bidirectional]:
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                weights[f"encoder.gru.{name}_{suffix}"] = tensors.take(f"{prefix}{name}_{suffix}")
    return encoder, n_bins, weights


def _nejm_taps(sd: float, size: int) -> int:
    """How many weights of their Gaussian, four deviations to each side, exceed 0.01 and are kept."""
    if not 0 < 4 * sd + 0.5 < size / 2:
        raise UserError(f"A smoothing of deviation {sd} within {size} bins cannot be imported.")
    radius = int(4 * sd + 0.5)
    raw = [math.exp(-0.5 * (i / sd) ** 2) for i in range(-radius, radius + 1)]
    return sum(weight / sum(raw) > 0.01 for weight in raw)


def _make_config(
    file: Path, settings: ModelSettings, n_channels: int, sessions: Any, n_sessions: int, n_classes: int
) -> ModelConfig:
    if not isinstance(sessions, Sequence) or not all(isinstance(name, str) for name in sessions):
        raise UserError(
            f"{file.parent / 'args.yaml'} does not list dataset.sessions; name the sessions yourself."
        )
    if n_classes != N_CLASSES:
        raise UserError(
            f"{file} tells {n_classes} classes apart; only the {N_CLASSES} of this benchmark are known."
        )
    if len(sessions) != n_sessions or len(set(sessions)) != n_sessions:
        raise UserError(
            f"{file} has {n_sessions} session layers but {len(set(sessions))} distinct sessions are named; "
            "name them all, in order."
        )
    return ModelConfig(settings=settings, n_channels=n_channels, sessions=tuple(sessions), classes=CLASSES)


def _find(path: Path, candidates: Sequence[Path]) -> Path:
    if path.is_file():
        return path
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise UserError(f"{path} holds no checkpoint; looked for {', '.join(c.name for c in candidates)}.")


def _refuse_kind(file: Path, content: Any, kind: Kind) -> None:
    other = "cffan" if kind == "nejm" else "nejm"
    names = " ".join(map(str, content)) if isinstance(content, Mapping) else ""
    if (
        ("dayWeights" in names)
        if kind == "nejm"
        else ("model_state_dict" in names or "day_weights." in names)
    ):
        raise UserError(f"{file} is a checkpoint of the other kind; import it with --kind {other}.")
    raise UserError(f"{file} is not a checkpoint of kind {kind}; give the file that its training wrote.")


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


class _Tensors:
    """The tensors of a state dict, each taken once; wrapping prefixes are gone."""

    def __init__(self, file: Path, state: Mapping[Any, Any]) -> None:
        self.file = file
        self.left: dict[str, Tensor] = {}
        size = file.stat().st_size
        for key, tensor in state.items():
            name = ".".join(part for part in str(key).split(".") if part not in ("module", "_orig_mod"))
            plain = (
                isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
            )
            if not plain or not tensor.is_floating_point() or tensor.numel() > size:
                raise UserError(f"{file}: {key} is not a plain tensor of weights.")
            if name in self.left:
                raise UserError(f"{file}: {name} is there twice under different prefixes.")
            self.left[name] = tensor

    def shape(self, name: str, n_axes: int) -> tuple[int, ...]:
        if name not in self.left:
            raise UserError(f"{self.file} lacks {name}; it is not a complete checkpoint of this kind.")
        if self.left[name].ndim != n_axes:
            raise UserError(f"{self.file}: {name} has {self.left[name].ndim} axes instead of {n_axes}.")
        return tuple(self.left[name].shape)

    def take(self, name: str) -> Tensor:
        if name not in self.left:
            raise UserError(f"{self.file} lacks {name}; it is not a complete checkpoint of this kind.")
        tensor = self.left.pop(name).detach().float().contiguous().clone()
        if not bool(tensor.isfinite().all()):
            raise UserError(f"{self.file}: {name} holds values that are not finite; the model diverged.")
        return tensor

    def leave(self, unused: tuple[str, ...]) -> tuple[str, ...]:
        """Names nobody took; all of them must be known to be unused."""
        for name in self.left:
            if not name.startswith(unused or ("\0",)):
                raise UserError(f"{self.file} holds {name}, which the official model does not have.")
        return tuple(self.left)


class _Args:
    """The settings a training left beside its checkpoint."""

    def __init__(self, file: Path, tree: Any) -> None:
        if not isinstance(tree, Mapping):
            raise UserError(f"{file} is not a table of training settings; copy the one the training wrote.")
        self.file, self.tree = file, tree

    @staticmethod
    def read_yaml(file: Path) -> "_Args":
        _need(file)
        try:
            return _Args(file, yaml.safe_load(file.read_text(encoding="utf-8")))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise UserError(f"{file} cannot be read as YAML; copy it again from its training.") from error

    @staticmethod
    def read_pickle(file: Path) -> "_Args":
        _need(file)
        return _Args(file, load_pickle(file))

    def find(self, path: str) -> Any:
        node: Any = self.tree
        for key in path.split("."):
            node = node.get(key) if isinstance(node, Mapping) else None
        return node

    def get(self, path: str, default: Value | None = None) -> Any:
        """A number at a dotted path; without a default it must be there."""
        value = self.find(path)
        value = default if value is None else value
        if isinstance(value, np.generic):
            value = value.item()
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"{self.file}: {path} should be a number but is {value!r}; correct it there.")
        return value

    def expect(self, path: str, found: int) -> None:
        """Where the settings speak of a size, it must be the size of the tensors."""
        stated = self.find(path)
        if stated is not None and stated != found:
            raise UserError(
                f"{self.file} says {path} is {stated} but the weights say {found}; they do not belong."
            )


def _need(file: Path) -> None:
    if not file.is_file():
        raise UserError(f"{file} is missing; copy it from the training beside the checkpoint.")
