"""Model folders: `model.json` holds the config, `model.safetensors` the weights; loading needs nothing else."""

import errno
import hashlib
import json
import os
import re
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from arcuate.errors import UserError, check_regular, check_resources
from arcuate.files import write_text
from arcuate.models.config import ModelConfig
from arcuate.models.model import Model, build_on_meta

CONFIG_FILE = "model.json"
WEIGHTS_FILE = "model.safetensors"
STATE_FILE = "state.json"  # state of a training checkpoint, in the same folder
_MAX_CONFIG_BYTES = 4_000_000
_MAX_STATE_BYTES = 2**28
_FLOAT_DTYPES = {"F64", "F32", "F16", "BF16"}


def save_model(folder: Path, model: Model) -> None:
    """Write both files. Programs that need the folder to be complete write it with `atomic_folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_tensors(weights, folder / WEIGHTS_FILE)
    write_text(folder / CONFIG_FILE, json.dumps(model.config.model_dump(mode="json"), indent=1) + "\n")


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file; its I/O errors, such as a full disk, are raised as `OSError`."""
    check_path_text(path)
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found.group(1)) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; raises `SafetensorError`, `OSError` or `RuntimeError`."""
    check_regular(path)
    return load_file(path)


def check_path_text(path: Path) -> None:
    """Raise UserError for a path that is not UTF-8 text, which the safetensors library cannot open."""
    if any("\ud800" <= c <= "\udfff" for c in str(path)):
        raise UserError(f"the path {path} is not UTF-8 text, so weights cannot be stored there; rename the folder")


def load_model(folder: str | Path) -> Model:
    """Load the model of a folder in evaluation mode; every file is validated before use."""
    folder = Path(folder)
    config = load_model_config(folder)
    check_checksums(folder)
    model = build_on_meta(config)
    weights = _load_weights(folder / WEIGHTS_FILE, {name: tuple(t.shape) for name, t in model.state_dict().items()})
    model.load_state_dict(weights, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.eval()


def check_checksums(folder: Path) -> None:
    """Compare the files of a training checkpoint with the checksums in its state."""
    try:
        if (folder / STATE_FILE).exists():
            check_regular(folder / STATE_FILE, _MAX_STATE_BYTES)
        state = json.loads((folder / STATE_FILE).read_bytes())
        files = state["files"]
        expected = {name: files[name] for name in (CONFIG_FILE, WEIGHTS_FILE)}
    except FileNotFoundError:
        return  # an imported model, or one saved by `save_model` alone
    except (ValueError, RecursionError, TypeError, KeyError):
        raise UserError(f"{folder / STATE_FILE} is damaged; evaluate another checkpoint, or train again") from None
    for name, digest in expected.items():
        if checksum(folder / name) != digest:
            raise UserError(
                f"{folder / name} is damaged: its checksum differs from the saved one; use another checkpoint"
            )


def checksum(path: Path) -> str:
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


def load_model_config(folder: Path) -> ModelConfig:
    """Read and validate `model.json`."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{folder}: {CONFIG_FILE} is missing; pass the folder of a run, checkpoint or imported model")
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise UserError(f"{path} is too large to be a model config; restore the file")
        return ModelConfig.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(f"{path} is not a model config ({where}: {first['msg']}); restore the file") from error


def _load_weights(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Tensors of exactly these names and shapes as float32; anything else is a `UserError`."""
    check_path_text(path)
    if not path.is_file():
        raise UserError(f"{path} is missing; copy it beside {CONFIG_FILE}, or import the model again")
    try:
        with safe_open(path, framework="pt") as file:
            stored = set(file.keys())
            if wrong := sorted(stored ^ shapes.keys()):
                raise UserError(
                    f"{path} does not match {CONFIG_FILE} ({wrong[0]} is"
                    f" {'unexpected' if wrong[0] in stored else 'missing'}); import or train the model again"
                )
            for name, shape in shapes.items():
                tensor = file.get_slice(name)
                dtype, found = tensor.get_dtype(), tuple(tensor.get_shape())
                if found != shape or dtype not in _FLOAT_DTYPES:
                    raise UserError(
                        f"{path}: {name} is {dtype} {found}, but {CONFIG_FILE} implies floats {shape}; import or"
                        " train the model again"
                    )
            # Copies: tensors in a mapped file start at any multiple of 4 bytes, and BLAS rounding depends on alignment.
            weights = {name: file.get_tensor(name).to(torch.float32, copy=True) for name in shapes}
    except (SafetensorError, OSError, RuntimeError) as error:  # torch raises RuntimeError when it cannot map a file
        check_resources(error, path)
        raise UserError(f"{path} cannot be read ({error}); restore the file") from error
    if bad := [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]:
        raise UserError(f"{path}: {bad[0]} contains non-finite values, training diverged; use an earlier checkpoint")
    return weights
