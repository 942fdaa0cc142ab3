"""Storage of the Optuna study of a sweep, and detection of trials whose worker has died.

- a journal in the sweep folder (the default): workers share the folder, and a trial belongs to the worker that holds
  its lock file;
- a database, `postgresql://…` or `sqlite:///…`: a trial belongs to a worker as long as it sends heartbeats, so the
  workers need not share a file system;
- an Optuna gRPC proxy in front of a database, `grpc://HOST:PORT`: workers share the folder, as with a journal.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import optuna
from optuna.exceptions import ExperimentalWarning, OptunaError, StorageInternalError
from optuna.storages import GrpcStorageProxy, JournalStorage, RDBStorage, fail_stale_trials
from optuna.trial import FrozenTrial, TrialState

from arcuate.errors import UserError, without_password
from arcuate.experiments.journal import Journal, explain_damage
from arcuate.files import LockHeld, exclusive_lock
from arcuate.progress import logger

JOURNAL_FILE = "study.journal"
REASON = "reason"  # user attribute of a trial, set when a worker has claimed it and again when it ends
INTERRUPTED = "interrupted"
_FORMS = "postgresql://USER@HOST/DATABASE, sqlite:///FILE or grpc://HOST:PORT"
_N_MISSED = 4  # missed heartbeats after which a worker counts as dead


class StudyStorage(Protocol):
    """Storage of a study, with locks that coordinate its workers."""

    @property
    def storage(self) -> Any:
        """The Optuna storage."""

    def lock(self) -> AbstractContextManager[None]:
        """Exclusive lock on the shared study; held while a worker selects or ends trials."""

    def claim(self, number: int, trial_id: int) -> AbstractContextManager[None]:
        """Assign a trial to this worker for the duration of the context."""

    def fail_abandoned(self, study: Any) -> None:
        """Fail the running trials whose worker is dead; to be called with the lock held."""


def open_storage(
    url: str | None, out: Path, study_name: str, heartbeat_s: int = 30, create: bool = True
) -> StudyStorage:
    """Open the storage of a study; None is the journal in the sweep folder. Without `create` nothing is written."""
    if url is None:
        journal = Journal(out / JOURNAL_FILE, out / "locks" / "journal", create)
        with explain_damage(out / JOURNAL_FILE):
            return _FolderStorage(JournalStorage(journal), out / "locks")
    kind = url.partition("://")[0].partition("+")[0]
    if kind == "grpc":
        return _FolderStorage(_connect_proxy(url), out / "locks")
    if kind not in ("postgresql", "postgres", "sqlite"):
        raise UserError(f"--storage {without_password(url)!r:.60}: expected {_FORMS}")
    return _connect_database(url, study_name, heartbeat_s, create)


@contextmanager
def _experimental() -> Iterator[None]:
    """Suppress Optuna's warnings that heartbeats and the proxy are experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


def _connect_proxy(url: str) -> Any:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port is None:
        raise UserError(f"--storage {without_password(url)}: expected grpc://HOST:PORT")
    try:
        with _experimental():
            proxy = GrpcStorageProxy(host=host, port=port)
        proxy.wait_server_ready(timeout=10)
    except ImportError:
        raise UserError("grpc:// needs the package grpcio: pip install 'arcuate[database]'") from None
    except ConnectionError:
        raise UserError(f"no Optuna gRPC proxy found at {host}:{port}; start it there or check the address") from None
    return proxy


def _connect_database(url: str, study_name: str, heartbeat_s: int, create: bool) -> "_DatabaseStorage":
    from sqlalchemy import exc, make_url

    shown = without_password(url)
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() in ("postgresql", "postgres"):
            parsed = parsed.set(drivername="postgresql+psycopg")
            options: dict[str, Any] = {"pool_pre_ping": True, "connect_args": {"connect_timeout": 20}}
        else:
            if parsed.database in (None, "", ":memory:"):
                raise UserError(f"--storage {shown}: expected sqlite:///FILE, which the workers share")
            options = {"connect_args": {"timeout": 60}}  # seconds to wait for another writer
            if not create and not Path(parsed.database or "").is_file():
                raise UserError(f"--storage {shown}: no such file")
        with _experimental():
            storage = RDBStorage(
                parsed.render_as_string(hide_password=False),
                engine_kwargs=options,
                heartbeat_interval=heartbeat_s,
                grace_period=_N_MISSED * heartbeat_s,
                skip_table_creation=not create,
            )
    except ImportError:
        raise UserError("databases need the package psycopg: pip install 'arcuate[sweep,database]'") from None
    except (exc.ArgumentError, ValueError):
        raise UserError(f"--storage {shown}: expected {_FORMS}") from None
    except (exc.SQLAlchemyError, OptunaError) as error:
        raise UserError(f"--storage {shown} cannot be opened: {_reason(error)}") from None
    file = Path(parsed.database) if parsed.get_backend_name() == "sqlite" and parsed.database else None
    return _DatabaseStorage(storage, study_name, heartbeat_s, file)


@contextmanager
def explain_unreachable(url: str | None) -> Iterator[None]:
    """Turn the errors of a database or proxy that stops answering during a sweep into one sentence."""
    if url is None:
        yield
        return
    from sqlalchemy.exc import SQLAlchemyError

    unreachable: tuple[type[Exception], ...] = (SQLAlchemyError, StorageInternalError)
    if url.startswith("grpc:"):
        unreachable = (*unreachable, import_module("grpc").RpcError)
    try:
        yield
    except unreachable as error:
        raise UserError(
            f"--storage {without_password(url)} no longer answers: {_reason(error)}; once it does, the same command"
            " continues the sweep"
        ) from None


def _reason(error: Exception) -> str:
    """One-line error message of the database, without the statement and its parameters."""
    cause = error.__cause__ or error.__context__ if isinstance(error, OptunaError) else error
    lines = str(getattr(cause, "orig", None) or cause or error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


@dataclass(frozen=True)
class _FolderStorage:
    """Locks are files in the sweep folder, which the kernel releases when a worker is killed."""

    storage: Any
    locks: Path

    def lock(self) -> AbstractContextManager[None]:
        return exclusive_lock(self.locks / "study", "the study is in use", wait=True)

    def claim(self, number: int, trial_id: int) -> AbstractContextManager[None]:
        return exclusive_lock(self._lock_file(number), f"trial {number} is in use")

    def fail_abandoned(self, study: Any) -> None:
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            with suppress(LockHeld), exclusive_lock(self._lock_file(trial.number), "in use"):
                _fail(study, self.storage, trial)

    def _lock_file(self, number: int) -> Path:
        return self.locks / f"trial-{number:04d}"


@dataclass(frozen=True)
class _DatabaseStorage:
    """Heartbeats in the database, and an advisory lock in PostgreSQL or a lock file beside that of SQLite."""

    storage: Any  # optuna.storages.RDBStorage
    study_name: str
    heartbeat_s: int
    file: Path | None  # database file of SQLite; None for PostgreSQL

    @contextmanager
    def lock(self) -> Iterator[None]:
        if self.file is not None:
            with exclusive_lock(self.file.with_name(f"{self.file.name}.lock"), "the study is in use", wait=True):
                yield
            return
        from sqlalchemy import text

        # A session-level lock ends with its connection, so the lock of a killed worker is released. With these
        # keepalive settings the server detects a lost machine after about a minute.
        with self.storage.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for setting, value in (("idle", 30), ("interval", 10), ("count", 3)):
                connection.execute(text(f"SET tcp_keepalives_{setting} = {value}"))
            name = {"name": f"arcuate sweep {self.study_name}"}
            connection.execute(text("SELECT pg_advisory_lock(hashtextextended(:name, 0))"), name)
            try:
                yield
            finally:
                connection.execute(text("SELECT pg_advisory_unlock(hashtextextended(:name, 0))"), name)

    @contextmanager
    def claim(self, number: int, trial_id: int) -> Iterator[None]:
        """Send heartbeats from a thread; the first one is sent before this returns."""
        from sqlalchemy.exc import SQLAlchemyError

        ended = threading.Event()
        self.storage.record_heartbeat(trial_id)

        def send() -> None:
            while not ended.wait(self.heartbeat_s):
                try:
                    self.storage.record_heartbeat(trial_id)
                except (SQLAlchemyError, OptunaError) as error:
                    logger.warning(f"trial {number}: no heartbeat could be sent ({_reason(error)}); trying again")

        thread = threading.Thread(target=send, name=f"heartbeat of trial {number}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def fail_abandoned(self, study: Any) -> None:
        with _experimental():
            fail_stale_trials(study)
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if REASON not in trial.user_attrs:  # its worker died before it could claim the trial
                _fail(study, self.storage, trial)


def _fail(study: optuna.Study, storage: Any, trial: FrozenTrial) -> None:
    if REASON not in trial.user_attrs:
        storage.set_trial_user_attr(trial._trial_id, REASON, INTERRUPTED)
    study.tell(trial.number, state=TrialState.FAIL)
