"""Models on the Hugging Face Hub: names `hf:ORG/NAME[@REVISION]`, and their download.

A name is accepted wherever a run folder is. Only the files that a run or an exported model consists of are downloaded;
anything else in a repository, such as a pickle or Python code, is ignored. The contents are untrusted: they are
checked like those of any other run folder when they are read. A branch or tag is resolved to its commit, which hub.json
records.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import responses
from pathlib import Path
from typing import Any

from arcuate.errors import UserError, without_password
from arcuate.files import exclusive_lock, locked_folder, write_json
from arcuate.progress import logger

PREFIX = "hf:"
RECORD = "hub.json"  # repository and commit that a folder was downloaded from
CARD_FILE = "README.md"  # name of the model card in a repository
_NAME = r"(?!\w*-{2})[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"
_REPOSITORY = re.compile(rf"{_NAME}/{_NAME}")
_REVISION = re.compile(r"[A-Za-z0-9_][\w./-]{0,199}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_RUN_FILES = re.compile(
    r"(model|state|environment|calibration)\.json|model\.safetensors|recipe\.yaml|metrics\.jsonl|README\.md"
    r"|results/[a-z]{1,20}(\.[\w-]{1,80})?\.json"
)
_EXPORT = re.compile(r"[A-Za-z0-9][\w.-]{0,95}\.arcx")
_MAX_BYTES = 2**36  # of all files together


@dataclass(frozen=True)
class HubName:
    """A repository and, optionally, a branch, tag or commit of it."""

    repository: str  # ORG/NAME
    revision: str | None = None

    def __str__(self) -> str:
        return f"{PREFIX}{self.repository}" + (f"@{self.revision}" if self.revision else "")


def is_hub_name(path: object) -> bool:
    """Whether a path is the name of a model on the hub."""
    return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(PREFIX)


def parse_name(text: str) -> HubName:
    """Parse [hf:]ORG/NAME[@REVISION]."""
    repository, at, revision = text.removeprefix(PREFIX).partition("@")
    if not _REPOSITORY.fullmatch(repository) or ".." in repository or repository.endswith((".git", "-", ".")):
        raise UserError(f"{text!r:.100} is not the name of a repository; expected ORG/NAME, such as my-lab/t15-gru")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise UserError(f"{revision!r:.60} is not a revision; expected a branch, a tag or a commit of 40 hex digits")
    return HubName(repository, revision or None)


def local_path(path: str | os.PathLike[str]) -> Path:
    """A path as it is; the folder or exported file to which hf:ORG/NAME[@REVISION] was downloaded."""
    if not isinstance(path, (str, os.PathLike)):
        raise UserError(f"expected a path, a run or a result of training, got {type(path).__name__} {path!r:.60}")
    if not is_hub_name(path):
        return Path(path)
    folder = download(parse_name(os.fspath(path)))
    return next(iter(sorted(folder.glob("*.arcx"))), folder)


def download(name: HubName) -> Path:
    """Download a model to a folder in the cache, where a commit is downloaded once."""
    if name.revision and _COMMIT.fullmatch(name.revision) and (_folder(name, name.revision) / RECORD).is_file():
        return _folder(name, name.revision)
    with hub_client(name) as client:
        info = client.model_info(name.repository, revision=name.revision, files_metadata=True)
        files = _model_files(name, info)
        folder = _folder(name, info.sha)
        lock = folder.with_name(f".{folder.name}.hub.lock")
        with exclusive_lock(lock, f"another process is downloading to {folder}", wait=True, remove=True):
            if not (folder / RECORD).is_file():  # another process may have downloaded it meanwhile
                with locked_folder(folder) as temporary:
                    client.snapshot_download(
                        name.repository, revision=info.sha, local_dir=temporary, allow_patterns=files
                    )
                    shutil.rmtree(temporary / ".cache", ignore_errors=True)  # records of the client
                    if (card := temporary / CARD_FILE).is_file():
                        card.replace(temporary / "MODEL_CARD.md")
                    record = {"repository": name.repository, "revision": name.revision, "commit": info.sha}
                    write_json(temporary / RECORD, record)
    logger.info(f"{PREFIX}{name.repository}@{info.sha} is in {folder}")
    return folder


def _folder(name: HubName, commit: str) -> Path:
    """Folder in the cache; it has the name of the repository, because its name is the name of the run."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "arcuate" / "hub"
    return (base / name.repository.replace("/", "--") / commit).resolve() / name.repository.split("/")[1]


def _model_files(name: HubName, info: Any) -> list[str]:
    """Names of the files to download, from the answer of the hub; none of them has a wildcard or leaves the folder."""
    sizes = {file.rfilename: file.size for file in info.siblings or ()}
    exports = [file for file in sizes if _EXPORT.fullmatch(file)]
    is_run = {"model.json", "model.safetensors"} <= set(sizes)
    if not _COMMIT.fullmatch(str(info.sha)) or not (is_run or len(exports) == 1):
        raise UserError(
            f"{name} is not a model of arcuate: it has neither model.json with model.safetensors nor one .arcx file"
        )
    files = [file for file in sizes if _RUN_FILES.fullmatch(file)] if is_run else [*exports, CARD_FILE]
    n_bytes = sum(sizes.get(file) or 0 for file in files)
    if n_bytes > _MAX_BYTES:
        raise UserError(f"{name} has {n_bytes:,} bytes; at most {_MAX_BYTES:,} are downloaded")
    return files


@contextmanager
def hub_client(name: HubName) -> Iterator[Any]:
    """The client of huggingface_hub, with its errors as user errors.

    The token is the one that it finds itself. Responses are not quoted, because they could contain the token.
    """
    try:
        from huggingface_hub import HfApi, constants
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RevisionNotFoundError,
        )
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise UserError(
            "models on the Hugging Face Hub need huggingface_hub; install with: pip install 'arcuate[hub]'"
        ) from None
    disable_progress_bars()
    host, login = without_password(constants.ENDPOINT), "log in with `hf auth login` or set HF_TOKEN"
    transport: Any = HfHubHTTPError.__mro__[1]  # base class of all errors of the HTTP client in use
    try:
        yield HfApi(library_name="arcuate")
    except GatedRepoError:
        raise UserError(f"{host} gives no access to {name}; request access on its page, and {login}") from None
    except RevisionNotFoundError:
        raise UserError(f"{PREFIX}{name.repository} has no revision {name.revision!r:.60}; check the name") from None
    except HfHubHTTPError as error:
        code = getattr(getattr(error, "response", None), "status_code", None)
        reason = f"{code} {responses.get(code or 0, 'no status')}"
        remedies = {404: f"check the name, or, for a private one, {login}", 401: login, 403: login}
        remedy = remedies.get(code or 0, "try again later")
        raise UserError(f"{host} refused the request for {name}: {reason}; {remedy}") from None
    except (transport, LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
        raise UserError(
            f"cannot reach {host} for {name} ({type(error).__name__}); check the network, HF_ENDPOINT and"
            " HF_HUB_OFFLINE; a commit that was downloaded before works offline: hf:ORG/NAME@COMMIT"
        ) from None
    except OSError as error:
        if error.errno is not None:  # of this machine, such as a full disk
            raise
        raise UserError(f"the download of {name} is incomplete ({type(error).__name__}); try again") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{host} returned an invalid response for {name} ({type(error).__name__}); check HF_ENDPOINT"
        ) from None
