"""A model on disk: `model.json` is its config, `model.safetensors` its weights; loading needs nothing else."""

import errno
import hashlib
import json
import os
import re
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from arcuate.errors import UserError
from arcuate.models.config import ModelConfig
from arcuate.models.model import Model, build_on_meta

CONFIG_FILE = "model.json"
WEIGHTS_FILE = "model.safetensors"
STATE_FILE = "state.json"  # of a checkpoint, beside the two
MAX_CARD_BYTES = 4_000_000
DTYPES = {"F64", "F32", "F16", "BF16"}


def save_model(folder: Path, model: Model) -> None:
    """Both files, each in place only once it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    partial = folder / f"{WEIGHTS_FILE}.partial"
    save_tensors(weights, partial)
    os.replace(partial, folder / WEIGHTS_FILE)
    partial = folder / f"{CONFIG_FILE}.partial"
    partial.write_text(json.dumps(model.config.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
    os.replace(partial, folder / CONFIG_FILE)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """A safetensors file; a disk that is full is an OSError like any other."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found.group(1)) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error


def load_model(folder: Path) -> Model:
    """The model of a folder, ready to read trials; nothing in the files is trusted before it is checked."""
    config = load_model_config(folder)
    check_checksums(folder)
    model = build_on_meta(config)
    weights = _load_weights(
        folder / WEIGHTS_FILE, {name: tuple(t.shape) for name, t in model.state_dict().items()}
    )
    model.load_state_dict(weights, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.eval()


def check_checksums(folder: Path) -> None:
    """Where a checkpoint's state says what its files were when they were saved, they must still be that."""
    try:
        state = json.loads((folder / STATE_FILE).read_bytes())
        files = state["files"]
        expected = {name: files[name] for name in (CONFIG_FILE, WEIGHTS_FILE)}
    except FileNotFoundError:
        return  # an imported model, or one saved by hand
    except (ValueError, RecursionError, TypeError, KeyError):
        raise UserError(
            f"{folder / STATE_FILE} is damaged; evaluate another checkpoint, or train again"
        ) from None
    for name, digest in expected.items():
        if checksum(folder / name) != digest:
            raise UserError(
                f"{folder / name} is damaged: its checksum is not the one it was saved with; use another checkpoint"
            )


def checksum(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=20)
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def load_model_config(folder: Path) -> ModelConfig:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(
            f"{folder} holds no model ({CONFIG_FILE} is missing); give a run, checkpoint or imported folder."
        )
    try:
        if path.stat().st_size > MAX_CARD_BYTES:
            raise UserError(f"{path} is too large to be a model config; restore the file from its source.")
        return ModelConfig.model_validate_json(path.read_bytes(), context={"migrate": True})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(
            f"{path} is not a model config ({where}: {first['msg']}); restore the file from its source."
        ) from error


def _load_weights(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"{path} is missing; copy it beside {CONFIG_FILE} or import the model again.")
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            if wrong := sorted(found.keys() ^ shapes.keys()):
                raise UserError(
                    f"{path} does not hold the weights of its config ({wrong[0]} is "
                    f"{'unknown' if wrong[0] in found else 'missing'}); import or train the model again."
                )
            for name, shape in shapes.items():
                kind, size = found[name].get_dtype(), tuple(found[name].get_shape())
                if size != shape or kind not in DTYPES:
                    raise UserError(
                        f"{path}: {name} is {kind} {size} where its config says floats {shape}; import or "
                        "train the model again."
                    )
            weights = {name: file.get_tensor(name).float() for name in shapes}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore the file from its source.") from error
    if bad := [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]:
        raise UserError(f"{path}: {bad[0]} is not finite, the model diverged; use an earlier checkpoint.")
    return weights
