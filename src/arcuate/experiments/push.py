"""`push`: upload a model to the Hugging Face Hub (`arcuate push`).

The upload contains weights and config of one checkpoint, recipe, training curve, summaries of results, and the model
card as README.md. It contains no recordings, decoded sentences, optimizer state or logs. Paths in settings are reduced
to their last part, and the record of the environment to versions and the description of the data. A file that still
contains a path below the home folder is refused.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from arcuate.errors import UserError
from arcuate.evaluation.card import card_metadata, describe_run, exported_card, is_generated, read_card
from arcuate.exported.archive import METADATA, is_export, open_archive
from arcuate.files import read_json
from arcuate.hub import CARD_FILE, PREFIX, HubName, hub_client, parse_name
from arcuate.run import Run, RunLike, find_checkpoint, open_run

_VERSIONS = ("arcuate", "python", "torch", "numpy", "scipy", "h5py", "pydantic", "safetensors", "rapidfuzz")
_FACTS = (*_VERSIONS, "n_parameters", "selected_on", "precision", "lineage", "parent", "calibration")
_DATA = ("layout", "features", "n_channels", "classes", "simulated", "sessions", "hashes")
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/\\])(?:~|[A-Za-z]:)?(?:[/\\][\w.+@ -]+){2,}|(?<![\w.:/\\])~[/\\][\w.+@-]+")
_HOME = re.compile(r"[/\\](?:home|Users)[/\\]\w")


@dataclass(frozen=True)
class PushedFile:
    """A file of an upload: its name in the repository, and where its bytes are."""

    name: str
    content: bytes | Path

    @property
    def n_bytes(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size


@dataclass(frozen=True)
class PushPlan:
    """A planned upload."""

    repository: str
    private: bool
    files: tuple[PushedFile, ...]

    @property
    def n_bytes(self) -> int:
        return sum(file.n_bytes for file in self.files)

    def summary(self) -> str:
        kind = "private" if self.private else "public"
        return f"{len(self.files)} files, {self.n_bytes / 1e6:.1f} MB, to the {kind} repository {self.repository}"

    def to_dict(self) -> dict[str, Any]:
        files = [{"name": file.name, "n_bytes": file.n_bytes} for file in self.files]
        return {"repository": self.repository, "private": self.private, "files": files, "n_bytes": self.n_bytes}


@dataclass(frozen=True)
class PushResult:
    """A completed upload or, with `dry_run`, a planned one."""

    plan: PushPlan
    commit: str | None  # None: dry run
    url: str | None

    @property
    def dry_run(self) -> bool:
        return self.commit is None

    def summary(self) -> str:
        if self.dry_run:
            return "dry run: nothing was uploaded"
        return f"{self.plan.summary()}\n{self.url}\nload it with: {PREFIX}{self.plan.repository}@{self.commit}"

    def to_dict(self) -> dict[str, Any]:
        return {**self.plan.to_dict(), "dry_run": self.dry_run, "commit": self.commit, "url": self.url}


def push(
    run: RunLike,
    repository: str,
    *,
    checkpoint: str = "best",
    private: bool = False,
    licence: str | None = None,
    dry_run: bool = False,
) -> PushResult:
    """Upload the model of a run, or an exported model (.arcx), to a repository ORG/NAME; it is created if missing.

    `dry_run` lists the files and uploads nothing. The token is the one of `hf auth login` or HF_TOKEN.
    """
    return upload(plan_push(run, repository, checkpoint=checkpoint, private=private, licence=licence), dry_run=dry_run)


def plan_push(
    run: RunLike, repository: str, *, checkpoint: str = "best", private: bool = False, licence: str | None = None
) -> PushPlan:
    """The files that `push` would upload, checked."""
    name = parse_name(repository)
    if name.revision is not None:
        raise UserError(f"{repository!r:.100} names a revision, but a push makes a new one; leave @{name.revision} out")
    if is_export(run if isinstance(run, str) else Path(run)):
        files = _export_files(Path(run), licence)
    else:
        files = _run_files(open_run(run), name, checkpoint, licence)
    for file in files:
        _check_private_paths(file)
    return PushPlan(name.repository, private, tuple(files))


def upload(plan: PushPlan, *, dry_run: bool = False) -> PushResult:
    """Upload a plan as one commit. An existing public repository is refused if a private one was requested."""
    if dry_run:
        return PushResult(plan, None, None)
    name = HubName(plan.repository)
    with hub_client(name) as client:
        from huggingface_hub import CommitOperationAdd

        client.create_repo(plan.repository, private=True if plan.private else None, exist_ok=True)
        if plan.private and not client.model_info(plan.repository).private:
            raise UserError(f"{plan.repository} exists and is public; make it private on its page, or omit --private")
        operations = [CommitOperationAdd(file.name, _payload(file)) for file in plan.files]
        try:
            done = client.create_commit(plan.repository, operations, commit_message="Upload a model with arcuate")
        except ValueError as error:
            if "Invalid metadata" not in str(error):
                raise
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"the hub does not accept the model card ({reason}); correct its metadata") from None
    return PushResult(plan, done.oid, done.commit_url)


def _payload(file: PushedFile) -> bytes | str:
    return file.content if isinstance(file.content, bytes) else str(file.content)


def _export_files(path: Path, licence: str | None) -> list[PushedFile]:
    if licence is not None:
        raise UserError(
            "the licence of an exported model is that of its run; set it with: arcuate card RUN --license …"
        )
    card = exported_card(path)
    assert card is not None
    return [PushedFile(path.name, path), PushedFile(CARD_FILE, card.encode())]


def _run_files(run: Run, name: HubName, checkpoint: str, licence: str | None) -> list[PushedFile]:
    folder = find_checkpoint(run, checkpoint)
    files = [PushedFile(part, folder / part) for part in ("model.json", "model.safetensors", "state.json")]
    files = [file for file in files if isinstance(file.content, Path) and file.content.is_file()]
    if run.recipe_file.is_file():
        tree = run.recipe_tree()
        recipe = yaml.safe_dump(_publishable(tree), sort_keys=False, allow_unicode=True, width=100)
        files.append(PushedFile("recipe.yaml", recipe.encode()))
    if run.environment_file.is_file():
        environment = run.environment()
        facts = {key: environment[key] for key in _FACTS if key in environment}
        facts["data"] = {key: value for key, value in run.data().items() if key in _DATA}
        files.append(_json_file("environment.json", facts))
    if run.metrics_file.is_file() and run.metrics_file.stat().st_size:
        files.append(PushedFile("metrics.jsonl", run.metrics_file))
    if run.calibration_file.is_file():
        files.append(_json_file("calibration.json", read_json(run.calibration_file)))
    for summary in sorted((run.path / "results").glob("*.json")):
        values = {key: value for key, value in read_json(summary).items() if key != "out"}
        files.append(_json_file(f"results/{summary.name}", values))
    files.append(PushedFile(CARD_FILE, _card(run, name, checkpoint, licence).encode()))
    return sorted(files, key=lambda file: file.name)


def _card(run: Run, name: HubName, checkpoint: str, licence: str | None) -> str:
    """The card with the address of the repository; one that the user wrote is uploaded as it is."""
    if run.card_file.exists() and not is_generated(text := read_card(run.card_file)):
        card_metadata(text, str(run.card_file))
        return text
    return describe_run(run, checkpoint, licence, address=str(name)).markdown()


def _json_file(name: str, values: Mapping[str, Any]) -> PushedFile:
    return PushedFile(name, json.dumps(_publishable(values), indent=1).encode())


def _publishable(value: Any) -> Any:
    """Plain values with absolute paths reduced to their last part."""
    if isinstance(value, Mapping):
        return {key: _publishable(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_publishable(own) for own in value]
    if isinstance(value, str):
        return _ABSOLUTE_PATH.sub(lambda found: re.split(r"[/\\]", found.group())[-1], value)
    return value


def _check_private_paths(file: PushedFile) -> None:
    """Refuse a text that contains a path below a home folder."""
    content = file.content
    if isinstance(content, Path):
        if is_export(content):
            content = open_archive(content).bytes(METADATA)
        elif content.suffix == ".safetensors":
            with content.open("rb") as stream:  # its header is text
                n_header = int.from_bytes(stream.read(8), "little")
                content = stream.read(min(n_header, 2**26))
        else:
            content = content.read_bytes()
    text, home = content.decode("utf-8", "replace"), str(Path.home())
    found = _HOME.search(text)
    if found is not None or (len(home) > 1 and f"{home}/" in text):
        part = text[found.start() : found.start() + 60].split()[0] if found else home
        raise UserError(
            f"{file.name} contains the path {part!r:.60}, which would be published; remove it and push again"
        )
