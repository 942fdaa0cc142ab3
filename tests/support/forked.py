"""Stands for `python -m arcuate` where a test starts it: see `forking.py`. Imports only what starts quickly."""

import json
import os
import resource
import signal
import socket
import sys

SOCKET = "ARCUATE_TESTS_FORKING"
LIMITS = ("RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_CPU", "RLIMIT_CORE")
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def send_message(connection: socket.socket, job: dict) -> None:
    text = json.dumps(job).encode()
    socket.send_fds(connection, [len(text).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(text)


def read_message(connection: socket.socket) -> tuple[dict, list[int]]:
    size, handles, _, _ = socket.recv_fds(connection, 8, 3)
    text = b""
    while len(text) < int.from_bytes(size, "big"):
        text += connection.recv(1 << 16)
    return json.loads(text), list(handles)


def main() -> None:
    umask = os.umask(0)
    os.umask(umask)
    job = {
        "arguments": sys.argv[1:],
        "cwd": os.getcwd(),
        "umask": umask,
        "environment": dict(os.environ),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
    }
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[SOCKET])
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    send_message(connection, job)
    answers = connection.makefile("r")
    pid = int(answers.readline())
    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda n, _: os.kill(pid, n))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    code = int(answers.readline())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
