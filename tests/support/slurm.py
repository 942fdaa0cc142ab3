"""A Slurm cluster of one node with two cores, in a folder of its own: munged, slurmctld and slurmd of Debian.

Jobs of the partition `urgent` preempt those of `main`, with a grace time of a minute.
"""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")

CONFIG = """\
ClusterName=miniature
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=2 PreemptMode=OFF
"""
# SchedulerParameters: a job that waits for its time is looked at every second instead of every minute.
# cred_expire: a job that is put back into the queue waits this long before it starts again; 120 s unless set.


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]


def free_ports(n: int) -> list[int]:
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@contextmanager
def miniature(folder: Path) -> Iterator[dict[str, str]]:
    """Start the cluster; yields the environment variables of its users."""
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    config = CONFIG.format(host=host, user=getpass.getuser(), folder=folder, ports=free_ports(2))
    (folder / "slurm.conf").write_text(config)
    files = {"key": "key", "socket": "socket", "pid": "pid", "log": "log", "seed": "seed"}
    names = {"key": "key-file", "socket": "socket", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}
    options = [f"--{names[n]}={folder}/munge.{ending}" for n, ending in files.items()]
    daemons = [["munged", "--force", "--foreground", *options], ["slurmctld", "-D", "-c"], ["slurmd", "-D", "-c"]]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in daemons:
            with (folder / f"{command[0]}.out").open("wb") as out:
                running.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
            if command[0] == "munged":
                wait_for(lambda: (folder / "munge.socket").exists(), 120, "munged", folder)
        wait_for(lambda: "idle" in ask(environment, "sinfo", "-h", "-o", "%T"), 120, "an idle node", folder)
        yield environment
    finally:
        subprocess.run(["scancel", "--user", getpass.getuser()], env=environment, capture_output=True, timeout=30)
        for daemon in reversed(running):
            daemon.terminate()
        for daemon in running:
            try:
                daemon.wait(timeout=15)
            except subprocess.TimeoutExpired:
                daemon.kill()


def ask(environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout


def wait_for(condition: object, seconds: float, what: str, folder: Path) -> None:
    limit = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > limit:
            logs = {p.name: p.read_text(errors="replace")[-2000:] for p in folder.glob("*.[lo][ou][gt]")}
            raise AssertionError(f"{what} did not come within {seconds} s: {logs}")
        time.sleep(0.1)


def state_of(environment: dict[str, str], job: str) -> dict[str, str]:
    """The entries that `scontrol show job` prints, such as JobState and Restarts."""
    words = ask(environment, "scontrol", "show", "job", job).split()
    return dict(word.split("=", 1) for word in words if "=" in word)
