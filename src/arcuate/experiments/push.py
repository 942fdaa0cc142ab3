"""`push`: upload a model to the Hugging Face Hub (`arcuate export RUN hf:ORG/NAME`).

The upload contains weights and config of one checkpoint, recipe, training curve, summaries of results, and the model
card as README.md. It contains no recordings, decoded sentences, optimizer state or logs. Paths in settings are reduced
to their last part, and the record of the environment to versions and the description of the data. A file that still
contains a path below the home folder is refused.
"""

import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from arcuate.errors import UserError
from arcuate.evaluation.card import exported_card, run_card
from arcuate.exported.file import METADATA, is_export, open_archive
from arcuate.files import Result, read_json, write_json
from arcuate.hub import CARD_FILE, PREFIX, HubName, hub_client, parse_name
from arcuate.run import Run, RunLike, find_checkpoint, open_run

_VERSIONS = ("arcuate", "python", "torch", "numpy", "scipy", "h5py", "pydantic", "safetensors", "rapidfuzz")
_FACTS = (*_VERSIONS, "n_parameters", "selected_on", "precision", "lineage", "parent", "calibration")
_DATA = ("layout", "features", "n_channels", "classes", "simulated", "sessions", "hashes")
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/\\])(?:~|[A-Za-z]:)?(?:[/\\][\w.+@ -]+){2,}|(?<![\w.:/\\])~[/\\][\w.+@-]+")
_HOME = re.compile(r"[/\\](?:home|Users)[/\\]\w")


@dataclass(frozen=True)
class PushResult(Result):
    """A completed upload."""

    repository: str
    private: bool
    files: tuple[str, ...]
    n_bytes: int
    commit: str
    url: str

    def summary(self) -> str:
        kind = "private" if self.private else "public"
        uploaded = f"{len(self.files)} files, {self.n_bytes / 1e6:.1f} MB, to the {kind} repository {self.repository}"
        return f"{uploaded}\n{self.url}\nload it with: {PREFIX}{self.repository}@{self.commit}"


def push(
    run: RunLike, repository: str, *, checkpoint: str = "best", public: bool = False, licence: str | None = None
) -> PushResult:
    """Upload the model of a run, or an exported model (.arcx), to a repository ORG/NAME; it is created if missing.

    The repository is private unless `public`. The token is the one of `hf auth login` or HF_TOKEN.
    """
    name = parse_name(repository)
    if name.revision is not None:
        raise UserError(f"{repository!r:.100} names a revision, but an upload makes a new one; leave it out")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if is_export(run if isinstance(run, str) else Path(run)):
            _copy_export(Path(run), folder)
        else:
            _copy_run(open_run(run), folder, name, checkpoint, licence)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for file in files:
            _check_private_paths(file, file.relative_to(folder))
        with hub_client(name) as client:
            done = _upload(client, name, folder, public)
        names = tuple(str(file.relative_to(folder)) for file in files)
        n_bytes = sum(file.stat().st_size for file in files)
    return PushResult(name.repository, not public, names, n_bytes, done.oid, done.commit_url)


def _upload(client: Any, name: HubName, folder: Path, public: bool) -> Any:
    client.create_repo(name.repository, private=not public, exist_ok=True)
    if not public and not client.model_info(name.repository).private:
        raise UserError(f"{name.repository} exists and is public; make it private on its page, or add --public")
    message = "Upload a model with arcuate"
    try:
        return client.upload_folder(repo_id=name.repository, folder_path=folder, commit_message=message)
    except ValueError as error:
        if "Invalid metadata" not in str(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the hub does not accept the model card ({reason}); correct its metadata") from None


def _copy_export(path: Path, folder: Path) -> None:
    card = exported_card(path)
    assert card is not None
    shutil.copy(path, folder / path.name)
    (folder / CARD_FILE).write_text(card, "utf-8")


def _copy_run(run: Run, folder: Path, name: HubName, checkpoint: str, licence: str | None) -> None:
    source = find_checkpoint(run, checkpoint)
    for part in (source / "model.json", source / "model.safetensors", source / "state.json", run.metrics_file):
        if part.is_file() and part.stat().st_size:
            shutil.copy(part, folder / part.name)
    if run.recipe_file.is_file():
        recipe = yaml.safe_dump(_publishable(run.recipe_tree()), sort_keys=False, allow_unicode=True, width=100)
        (folder / "recipe.yaml").write_text(recipe, "utf-8")
    if run.environment_file.is_file():
        environment = run.environment()
        facts = {key: environment[key] for key in _FACTS if key in environment}
        facts["data"] = {key: value for key, value in run.data().items() if key in _DATA}
        write_json(folder / "environment.json", _publishable(facts))
    if run.calibration_file.is_file():
        write_json(folder / "calibration.json", _publishable(read_json(run.calibration_file)))
    for summary in (run.path / "results").glob("*.json"):
        values = {key: value for key, value in read_json(summary).items() if key != "out"}
        (folder / "results").mkdir(exist_ok=True)
        write_json(folder / "results" / summary.name, _publishable(values))
    (folder / CARD_FILE).write_text(run_card(run, checkpoint, licence, address=str(name)), "utf-8")


def _publishable(value: Any) -> Any:
    """Plain values with absolute paths reduced to their last part."""
    if isinstance(value, Mapping):
        return {key: _publishable(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_publishable(own) for own in value]
    if isinstance(value, str):
        return _ABSOLUTE_PATH.sub(lambda found: re.split(r"[/\\]", found.group())[-1], value)
    return value


def _check_private_paths(file: Path, name: Path) -> None:
    """Refuse a text that contains a path below a home folder."""
    if is_export(file):
        content = open_archive(file).bytes(METADATA)
    elif file.suffix == ".safetensors":
        with file.open("rb") as stream:  # its header is text
            content = stream.read(min(int.from_bytes(stream.read(8), "little"), 2**26))
    else:
        content = file.read_bytes()
    text, home = content.decode("utf-8", "replace"), str(Path.home())
    found = _HOME.search(text)
    if found is not None or (len(home) > 1 and f"{home}/" in text):
        part = text[found.start() : found.start() + 60].split()[0] if found else home
        raise UserError(f"{name} contains the path {part!r:.60}, which would be published; remove it and push again")
