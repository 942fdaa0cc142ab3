"""SIGTERM and Ctrl-C: finish the step, save, leave. A second Ctrl-C leaves at once."""

import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from arcuate.errors import UserError
from arcuate.run import Run


class Stop:
    """Request to end training within one step, by a signal or by `request()`."""

    def __init__(self) -> None:
        self.requested = False
        self.signal: signal.Signals | None = None
        self.patient = False  # ignore a second SIGINT

    def request(self) -> None:
        """Stop with a checkpoint. Callable from a callback or another thread."""
        self.requested = True

    @property
    def exit_code(self) -> int:
        return 0 if self.signal is None else 128 + self.signal

    def ask(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT and not self.patient:
            raise KeyboardInterrupt
        self.requested, self.signal = True, signal.Signals(number)


@contextmanager
def listening(stop: Stop | None = None, patient: bool = False) -> Iterator[Stop]:
    """Handle SIGINT and SIGTERM by requesting a stop; the previous handlers are restored afterwards.

    Python handles signals in the main thread only: in any other thread nothing is changed. With `patient`, a second
    SIGINT is ignored: launchers such as torchrun forward the Ctrl-C that the terminal has sent to every process.
    """
    stop = stop or Stop()
    stop.patient = patient
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    old = {s: signal.signal(s, stop.ask) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


# One writer per run folder: a lock that the system frees when its holder dies, however it dies.

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
held: set[int] = set()  # open lock files of this process


def let_go_in_child() -> None:
    """Workers that outlive a killed training must not go on holding its lock."""
    for handle in held:
        os.close(handle)
    held.clear()


os.register_at_fork(after_in_child=let_go_in_child)


@contextmanager
def sole_writer(run: Run, say: Callable[[str], None]) -> Iterator[None]:
    """Nobody else trains into this run folder as long as the context lasts."""
    is_new = not run.path.exists()
    run.path.mkdir(parents=True, exist_ok=True)
    handle = os.open(run.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    held.add(handle)
    try:
        take(handle, run, say)
        try:
            yield
        finally:
            leave_nothing(run, is_new)
    finally:
        held.discard(handle)
        os.close(handle)


def leave_nothing(run: Run, is_new: bool) -> None:
    """Where training was refused before it wrote anything, the lock is not left behind either."""
    if [p.name for p in run.path.iterdir()] == [run.lock_file.name]:
        run.lock_file.unlink()
        if is_new:
            run.path.rmdir()


def take(handle: int, run: Run, say: Callable[[str], None]) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"another process is training into {run.path}; wait until it has ended, or choose another --run"
        ) from None
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        say(f"the file system of {run.path} has no locks: take care that no other process trains into it")
