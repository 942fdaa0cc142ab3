"""Models on the Hugging Face Hub: names `hf:ORG/NAME[@REVISION]`, and their download.

A name is accepted wherever a run folder is. Only the files that a run or an exported model consists of are downloaded
(safetensors, JSON, YAML, .arcx), each within a size limit and compared with the hash that the hub states; anything else
in a repository, such as a pickle or Python code, is ignored. The contents are untrusted: they are checked like those of
any other run folder when they are read. A branch or tag is resolved to its commit, which is recorded in hub.json.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import responses
from pathlib import Path
from typing import Any

from arcuate.errors import UserError, without_password
from arcuate.files import exclusive_lock, locked_folder, temporary_folder, write_json
from arcuate.progress import Progress, logger

PREFIX = "hf:"
RECORD = "hub.json"  # repository and commit that a folder was downloaded from
CARD_FILE = "README.md"  # name of the model card in a repository
INSTALL = "models on the Hugging Face Hub need huggingface_hub; install with: pip install 'arcuate[hub]'"
_NAME = r"(?!\w*-{2})[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"
_REPOSITORY = re.compile(rf"{_NAME}/{_NAME}")
_REVISION = re.compile(r"[A-Za-z0-9_][\w./-]{0,199}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SMALL, _LARGE = 4 * 2**20, 2**36
_MODEL_FILES = {  # files of a run, and their largest sizes
    "model.json": _SMALL,
    "model.safetensors": _LARGE,
    "state.json": 2**26,
    "recipe.yaml": _SMALL,
    "environment.json": _SMALL,
    "metrics.jsonl": 2**28,
    "calibration.json": _SMALL,
    CARD_FILE: 2 * 10**6,
}
_RESULTS = re.compile(r"results/[a-z]{1,20}(\.[\w-]{1,80})?\.json")
_EXPORT = re.compile(r"[A-Za-z0-9][\w.-]{0,95}\.arcx")
_MAX_FILES = 100_000


@dataclass(frozen=True)
class HubName:
    """A repository and, optionally, a branch, tag or commit of it."""

    repository: str  # ORG/NAME
    revision: str | None = None

    def __str__(self) -> str:
        return f"{PREFIX}{self.repository}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class Download:
    """A downloaded model."""

    path: Path  # run folder, or exported model in its folder
    repository: str
    revision: str | None  # as requested
    commit: str
    n_bytes: int

    def summary(self) -> str:
        return f"{self.path}: {PREFIX}{self.repository}@{self.commit}, {self.n_bytes / 1e6:.1f} MB"

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "path": str(self.path)}


@dataclass(frozen=True)
class _RemoteFile:
    name: str
    size: int
    sha256: str | None  # of a large file
    blob_id: str | None  # git hash of a small one


def is_hub_name(path: object) -> bool:
    """Whether a path is the name of a model on the hub."""
    return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(PREFIX)


def parse_name(text: str, revision: str | None = None) -> HubName:
    """Parse [hf:]ORG/NAME[@REVISION]; `revision` is a separately given one."""
    repository, at, own = text.removeprefix(PREFIX).partition("@")
    if at and revision is not None and own != revision:
        raise UserError(f"{text!r:.100} and --revision {revision!r:.60} name different revisions; give one of them")
    chosen = own if at else revision
    if not _REPOSITORY.fullmatch(repository) or ".." in repository or repository.endswith((".git", "-", ".")):
        raise UserError(f"{text!r:.100} is not the name of a repository; expected ORG/NAME, such as my-lab/t15-gru")
    if chosen is not None and (not _REVISION.fullmatch(chosen) or ".." in chosen):
        raise UserError(f"{chosen!r:.60} is not a revision; expected a branch, a tag or a commit of 40 hex digits")
    return HubName(repository, chosen)


def local_path(path: str | os.PathLike[str], revision: str | None = None) -> Path:
    """A path as it is; the folder or exported file to which hf:ORG/NAME[@REVISION] was downloaded."""
    if not isinstance(path, (str, os.PathLike)):
        raise UserError(f"expected a path, a run or a result of training, got {type(path).__name__} {path!r:.60}")
    if not is_hub_name(path):
        if revision is not None:
            raise UserError(f"--revision {revision!r:.60} applies to names such as hf:ORG/NAME, not to {path}")
        return Path(path)
    name = parse_name(os.fspath(path), revision)
    found = download(name)
    logger.info(f"{PREFIX}{name.repository}@{found.commit} is in {found.path}")
    return found.path


def download(
    name: HubName | str,
    *,
    revision: str | None = None,
    to: str | Path | None = None,
    progress: Progress | None = None,
) -> Download:
    """Download a model to a folder, by default in the cache, where a commit is downloaded once.

    `to` must be a new or empty folder.
    """
    name = parse_name(name, revision) if isinstance(name, str) else name
    _check_target(to)
    if to is None and name.revision and _COMMIT.fullmatch(name.revision):
        folder = _cache_folder(name.repository, name.revision)
        if (folder / RECORD).is_file():
            return _describe(folder, name, name.revision)
    with hub_client() as client:
        with explain_errors(name):
            info = client.model_info(name.repository, revision=name.revision, files_metadata=True)
        commit, files = _check_listing(name, info)
        folder = Path(to) if to is not None else _cache_folder(name.repository, commit)
        if to is None and (folder / RECORD).is_file():
            return _describe(folder, name, commit)
        place = folder.resolve()
        busy, lock = f"another process is downloading to {folder}", place.with_name(f".{place.name}.hub.lock")
        with exclusive_lock(lock, busy, wait=True, remove=True):
            _check_target(to)
            if to is not None or not (folder / RECORD).is_file():  # another process may have downloaded it meanwhile
                _fetch(client, name, commit, files, place, progress)
    return _describe(folder, name, commit)


def _check_target(to: str | Path | None) -> None:
    if to is not None and Path(to).exists() and (not Path(to).is_dir() or any(Path(to).iterdir())):
        raise UserError(f"{to} exists and is not empty; choose another folder")


def _fetch(
    client: Any, name: HubName, commit: str, files: Sequence[_RemoteFile], folder: Path, progress: Progress | None
) -> None:
    """Download and check the files in a temporary folder of a fixed name, so that one left by a kill is removed."""
    staging = folder.with_name(f".{folder.name}.hub.part")
    with temporary_folder(staging), locked_folder(folder) as temporary:
        staging.mkdir()
        for i, file in enumerate(files):
            if progress:
                progress(i, len(files), "downloading")
            with explain_errors(name):
                client.hf_hub_download(name.repository, file.name, revision=commit, local_dir=staging)
            _check_content(name, file, staging / file.name)
            target = temporary / ("MODEL_CARD.md" if file.name == CARD_FILE else file.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            (staging / file.name).replace(target)
        write_json(temporary / RECORD, {"repository": name.repository, "revision": name.revision, "commit": commit})


def _cache_folder(repository: str, commit: str) -> Path:
    """Folder in the cache; it has the name of the repository, because its name is the name of the run."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "arcuate" / "hub"
    return base / repository.replace("/", "--") / commit / repository.split("/")[1]


def _describe(folder: Path, name: HubName, commit: str) -> Download:
    exports = sorted(folder.glob("*.arcx"))
    path = exports[0] if exports else folder
    n_bytes = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    return Download(path, name.repository, name.revision, commit, n_bytes)


def _check_listing(name: HubName, info: Any) -> tuple[str, list[_RemoteFile]]:
    """Commit and files to download, from the answer of the hub."""
    commit, siblings = info.sha, info.siblings
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise UserError(f"the hub lists no commit for {name}; check HF_ENDPOINT")
    if not isinstance(siblings, list) or len(siblings) > _MAX_FILES:
        raise UserError(f"the hub lists no files of {name} or too many; choose another revision")
    listed = [_RemoteFile(s.rfilename, s.size, getattr(s.lfs, "sha256", None), s.blob_id) for s in siblings]
    names = [file.name for file in listed]
    if len(set(names)) != len(names):
        raise UserError(f"the hub lists a file of {name} twice; choose another revision")
    is_run = {"model.json", "model.safetensors"} <= set(names)
    exports = [n for n in names if _EXPORT.fullmatch(n)]
    if not is_run and len(exports) != 1:
        raise UserError(
            f"{name} is not a model of arcuate: it has neither model.json with model.safetensors nor one .arcx file"
        )
    wanted: list[_RemoteFile] = []
    for file in listed:
        limit = _MODEL_FILES.get(file.name, _SMALL if _RESULTS.fullmatch(file.name) else None)
        if not is_run:
            limit = 2**32 if file.name in exports else _MODEL_FILES[CARD_FILE] if file.name == CARD_FILE else None
        if limit is None:
            continue
        if type(file.size) is not int or not 0 <= file.size <= limit:
            raise UserError(f"{file.name} of {name} has {file.size!s:.30} bytes, at most {limit:,} are expected")
        wanted.append(file)
    return commit, sorted(wanted, key=lambda file: file.name)


def _check_content(name: HubName, file: _RemoteFile, path: Path) -> None:
    """Compare a downloaded file with the size and the hash that the hub stated."""
    with path.open("rb") as stream:
        matches = path.stat().st_size == file.size
        if file.sha256 is not None:
            matches &= hashlib.file_digest(stream, "sha256").hexdigest() == file.sha256
        elif file.blob_id is not None:  # the hash that git gives to a file
            matches &= hashlib.sha1(b"blob %d\0" % file.size + stream.read()).hexdigest() == file.blob_id
    if not matches:
        raise UserError(f"{file.name} of {name} differs from the hash that the hub states; download it again")


# --- the client --------------------------------------------------------------------------------------------------


@contextmanager
def hub_client() -> Iterator[Any]:
    """The client of huggingface_hub, without its progress bars; the token is the one that it finds itself."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    except ImportError:
        raise UserError(INSTALL) from None
    shown = not are_progress_bars_disabled()
    if shown:
        disable_progress_bars()
    try:
        yield HfApi(library_name="arcuate")
    finally:
        if shown:
            enable_progress_bars()


@contextmanager
def explain_errors(name: HubName) -> Iterator[None]:
    """Convert errors of the client to user errors. Responses are not quoted, because they could contain the token."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    host = without_password(constants.ENDPOINT)
    transport: Any = HfHubHTTPError.__mro__[1]  # base class of all errors of the HTTP client in use
    login = "log in with `hf auth login` or set HF_TOKEN"
    try:
        yield
    except GatedRepoError:
        raise UserError(f"{host} gives no access to {name}; request access on its page, and {login}") from None
    except RepositoryNotFoundError:
        raise UserError(f"{host} has no repository {name}, or it is private; check the name, or {login}") from None
    except RevisionNotFoundError:
        raise UserError(f"{PREFIX}{name.repository} has no revision {name.revision!r:.60}; check the name") from None
    except OfflineModeIsEnabled:
        raise UserError(f"{name} cannot be reached because HF_HUB_OFFLINE is set; unset it") from None
    except HfHubHTTPError as error:
        code = getattr(getattr(error, "response", None), "status_code", None)
        reason = responses.get(code or 0, "no status")
        remedy = login if code in (401, 403) else "try again later"
        raise UserError(f"{host} refused the request for {name}: {code} {reason}; {remedy}") from None
    except (transport, LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
        raise UserError(
            f"cannot reach {host} for {name} ({type(error).__name__}); check the network and HF_ENDPOINT; a commit that"
            " was downloaded before works offline: hf:ORG/NAME@COMMIT"
        ) from None
    except OSError as error:
        if error.errno is not None:  # of this machine, such as a full disk
            raise
        raise UserError(f"the download of {name} is incomplete ({type(error).__name__}); try again") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{host} returned an invalid response for {name} ({type(error).__name__}); check HF_ENDPOINT"
        ) from None
