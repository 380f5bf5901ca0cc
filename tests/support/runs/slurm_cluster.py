"""A SLURM of two nodes on this host, with its own folder, key, ports and daemons.

    with slurm_cluster() as cluster:
        job = cluster.submit(["--nodes=2", script, "--config=..."], folder)
        cluster.wait(job, "COMPLETED")

The standard library is enough for it: `.ci/run` installs SLURM through it before there is anything else.
"""

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from support.project import system_packages
from support.project.system_packages import find

PROGRAMS = ("sbatch", "scancel", "scontrol", "sinfo", "slurmctld", "slurmd", "squeue", "srun", "munged")
Found = TypeVar("Found")
NODES = ("n1", "n2")
# Of a job that starts in some 30 seconds on two idle cores: other tests run beside it, and machines differ.
WAIT_SECONDS = 600
# Nodes of one core each. A requeued job waits for as long as a credential lives, and then for the scheduler. Jobs in
# `urgent` pre-empt the others.
CONFIG = """\
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=graceful Nodes=n1,n2 Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=at_once Nodes=n1,n2 State=UP PriorityTier=1 GraceTime=0
PartitionName=urgent Nodes=n1,n2 State=UP PriorityTier=2
"""


def missing() -> str | None:
    """Return the reason why SLURM cannot run here, or None; `.ci/run` installs it."""
    return system_packages.missing(PROGRAMS, ("slurm-wlm", "munge"))


class Cluster:
    """The commands of a user; output that a failure needs is in the error."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        # As after `source venv/bin/activate`. The names of the nodes are in no host table.
        path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))
        self.environment = outside | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": path,
            "MASTER_ADDR": "127.0.0.1",
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            "OMP_NUM_THREADS": "1",
            "LOCAL_RANK": "0",  # of a shell that another training has left, which `sbatch` hands on to all processes
        }

    def run(self, *words: object, folder: Path | None = None) -> str:
        command = [find(str(words[0])) or "", *map(str, words[1:])]
        done = subprocess.run(
            command, cwd=folder, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, words: Sequence[object], folder: Path) -> int:
        """`sbatch`; the job's output goes to `slurm-<job>.out` in the folder."""
        self.environment["MASTER_PORT"] = str(_free_ports(1)[0])
        return int(self.run("sbatch", "--parsable", *words, folder=folder))

    def show(self, job: int) -> dict[str, str]:
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_file(self, path: Path, job: int) -> None:
        """Wait until a running job has written a file; a timeout's error has the job's report."""
        try:
            wait_for(path.exists)
        except TimeoutError as error:
            error.add_note(self.report(job))
            raise

    def report(self, job: int) -> str:
        """Return what is known of a job: its state, the queue, and its log."""
        shown = self.show(job)
        log = Path(shown["StdOut"])
        return "\n".join((str(shown), self.run("squeue"), log.read_text() if log.exists() else "It has no log."))

    def cancel_all(self) -> None:
        """Cancel every job, and wait until the queue is empty."""
        self.run("scancel", "--user", pwd.getpwuid(os.getuid()).pw_name)
        wait_for(lambda: not self.run("squeue", "--noheader"), 60)

    def wait(self, job: int, state: str, seconds: float = WAIT_SECONDS) -> dict[str, str]:
        """Until the job is in a state; one that ends otherwise is an error at once."""

        def reached() -> dict[str, str] | None:
            shown = self.show(job)
            if shown["JobState"] == state:
                return shown
            ended = shown["JobState"] in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETED")
            assert not ended, self.report(job)
            return None

        return wait_for(reached, seconds)


def wait_for(look: Callable[[], Found | None], seconds: float = WAIT_SECONDS) -> Found:
    """Wait until `look` returns a value, and return it.

    Raises:
        TimeoutError: If `look` returns nothing in time.
    """
    end = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > end:
            raise TimeoutError(f"{look.__qualname__}: nothing after {seconds} seconds")
        time.sleep(0.05)
    return found


@contextlib.contextmanager
def slurm_cluster() -> Iterator[Cluster]:
    """Yield a running cluster, whose jobs, daemons and folder are removed at the end."""
    # A socket's path holds 107 characters, and pytest's folders are deep.
    folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))
    folder.chmod(0o755)  # munged requires a folder that others can enter and not write
    for name in ("state", "spool"):
        (folder / name).mkdir()
    values = {
        "name": folder.name,
        "host": socket.gethostname().partition(".")[0],
        "user": pwd.getpwuid(os.getuid()).pw_name,
        "ports": _free_ports(1 + len(NODES)),
        "folder": folder,
    }
    (folder / "slurm.conf").write_text(CONFIG.format(**values))
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    cluster = Cluster(folder)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        files = {"socket": "sock", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = [f"--{option}={folder}/munge.{end}" for option, end in files.items()]
        # --force: munged does not run as root otherwise.
        for daemon in (["munged", "--foreground", "--force", *munge], ["slurmctld", "-D"]):
            stack.enter_context(_running(daemon, cluster))
            if daemon[0] == "munged":
                wait_for((folder / "munge.sock").exists, 30)
        for node in NODES:
            stack.enter_context(_running(["slurmd", "-D", "-N", node], cluster))
        stack.callback(cluster.cancel_all)  # a step's processes outlive the daemons
        try:
            wait_for(lambda: _is_up(cluster), 60)
        except TimeoutError as error:
            error.add_note("".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log"))))
            raise
        yield cluster


@contextlib.contextmanager
def _running(command: list[str], cluster: Cluster) -> Iterator[None]:
    with (cluster.folder / "daemons.txt").open("a") as output:
        process = subprocess.Popen(
            [find(command[0]) or "", *command[1:]],
            env=cluster.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_up(cluster: Cluster) -> bool:
    with contextlib.suppress(AssertionError):  # the controller does not answer yet
        return set(cluster.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()) == {
            f"{node} idle" for node in NODES
        }
    return False


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
