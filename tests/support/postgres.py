"""A PostgreSQL server in a folder of its own, run by an unprivileged user, with one role that has a password."""

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.slurm import free_ports

PASSWORD = "s3cret-w0rd"


def find_programs() -> Path | None:
    """The folder with initdb, which Debian does not put on the search path; the latest version."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: float(p.parts[-3]))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).parent if on_path else None


def owner() -> dict[str, Any]:
    """Arguments of `subprocess` for the user who runs the server: it refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    entry = pwd.getpwnam("postgres")
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


@contextmanager
def server(programs: Path) -> Iterator[str]:
    """Start a server; yields the URL of an empty database, with a password.

    Its folder is not one of pytest, which closes those of root to every other user.
    """
    with tempfile.TemporaryDirectory(prefix="arcuate-postgres-") as name:
        yield from _serve(Path(name), programs)


def _serve(folder: Path, programs: Path) -> Iterator[str]:
    data, (port,) = folder / "data", free_ports(1)
    if os.geteuid() == 0:
        os.chown(folder, owner()["user"], owner()["group"])
    password_file = folder / "password"
    password_file.write_text(PASSWORD)
    if os.geteuid() == 0:
        os.chown(password_file, owner()["user"], owner()["group"])
    made = subprocess.run(
        [programs / "initdb", "-D", data, "-U", "arcuate", "-A", "scram-sha-256", f"--pwfile={password_file}", "-N"],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
        **owner(),
    )
    assert made.returncode == 0, made.stderr
    options = ["-h", "127.0.0.1", "-p", str(port), "-k", str(folder), "-F"]  # -F: no fsync, the data are thrown away
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [programs / "postgres", "-D", data, *options], stdout=log, stderr=log, cwd=folder, **owner()
        )
    try:
        limit = time.monotonic() + 60
        ready = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
        while subprocess.run(ready, check=False).returncode != 0:
            assert time.monotonic() < limit and process.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
        yield f"postgresql://arcuate:{PASSWORD}@127.0.0.1:{port}/postgres"
    finally:
        process.terminate()  # ends when its clients have; a fast shutdown follows
        process.send_signal(2)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
