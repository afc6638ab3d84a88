"""A real Slurm on one machine: munged, slurmctld and one slurmd per emulated node, in one directory, ended together.

Holds the daemons alone; jobs are in `jobs.py`. To try a script by hand, `python -m tests.slurm.minislurm` starts a
cluster, prints what a shell needs to use it, and ends it with Ctrl-C.

Every node has its own host name, its own /etc/hosts that knows all nodes (127.0.0.11, 127.0.0.12, ...), and its own
/tmp and /dev/shm, by mount and UTS namespaces, which an ordinary user makes inside a user namespace. GPUs are character
devices without a driver. Two clusters on one machine share nothing: directory, munge key, sockets and ports are their
own.

Everything started carries `MINISLURM_DIR=<its directory>` in its environment, by which the end finds what a daemon or a
job left behind. A janitor process does that too when the one that made the cluster is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .settings import reserve_ports, write_settings

MARK = "MINISLURM_DIR"
HELP = (
    "Start a Slurm of four emulated nodes on this machine, print the line that a second shell needs to use it "
    "(export SLURM_CONF=... MINISLURM_DIR=...), and wait; Ctrl-C ends the nodes and all jobs on them."
)
PACKAGES = "slurm-wlm munge libpmix-dev"
START_S = 60.0
"""How long the nodes may take to answer; they need one second on an idle machine."""
NODE = """
hostname "$1"; mount --bind "$2/hosts" /etc/hosts; tmp=$2/tmp-$1; shared=$3; shift 3
mkdir -p -m 1777 "$tmp"
while IFS= read -r path; do mkdir -p "$tmp${path#/tmp}"; mount --bind "$path" "$tmp${path#/tmp}"; done <"$shared"
mount --rbind "$tmp" /tmp; mount -t tmpfs tmpfs /dev/shm
exec "$@"
"""
"""From the machine to a node, in shell: what becomes private to it before its slurmd starts."""


class SlurmError(RuntimeError):
    """A daemon or a client command of Slurm failed; the message holds what it said."""


def why_not() -> str | None:
    """Why no cluster can run on this machine, and what to do; None where one can."""
    missing = [name for name in ("munged", "slurmctld", "slurmd") if not _which(name)]
    if missing:
        return f"needs Slurm ({missing[0]} not found): tests/run.sh --install-system, or apt-get install {PACKAGES}"
    if subprocess.run([*_namespaces(), "true"], capture_output=True).returncode:
        return "needs mount and UTS namespaces, which this container forbids: give it CAP_SYS_ADMIN"
    return None


def wait_until(condition: Callable[[], object], timeout_s: float, what: str, detail: Callable[[], str] = str) -> None:
    """Poll until `condition()` is true; SlurmError with `what` was waited for and `detail()` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise SlurmError(f"waited {timeout_s:.0f} s in vain for {what}\n{detail()}")
        time.sleep(0.1)


@dataclass
class MiniSlurm:
    """The daemons of one cluster, from `start` to `stop`. Its nodes are called node1 ... nodeN."""

    directory: Path
    """Short (it holds unix sockets), and the same on every node although it lies in /tmp."""
    shared: Sequence[Path] = ()
    """More directories that the nodes have in common; what else lies in /tmp is each node's own."""
    nodes: int = 4
    cpus: int = 16
    gpus: int = 8
    grace_s: int = 120
    """How long a preempted job of the partition `low` may live on after TERM."""
    node_timeout_s: int = 15
    """Silence after which a node counts as down."""
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        """The environment in which Slurm's commands talk to this cluster."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return inherited | {"SLURM_CONF": f"{self.directory}/slurm.conf", MARK: str(self.directory)}

    @property
    def node_names(self) -> list[str]:
        """node1 ... nodeN."""
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    def start(self) -> None:
        """Start all daemons and wait until every node is idle."""
        self._janitor = subprocess.Popen(
            [sys.executable, "-m", "tests.slurm.minislurm", "--janitor", str(self.directory)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        for folder in ("log", "run", "state", "munge"):
            (self.directory / folder).mkdir(mode=0o755)
        (self.directory / "munge").chmod(0o700)
        self.directory.chmod(0o755)
        (self.directory / "shared").write_text("".join(f"{path}\n" for path in self._shared_below_tmp()))
        self._ports, port = reserve_ports()
        write_settings(
            self.directory,
            port,
            self.node_names,
            cpus=self.cpus,
            gpus=self.gpus,
            grace_s=self.grace_s,
            node_timeout_s=self.node_timeout_s,
        )
        self._start_munged()
        self._daemon("slurmctld", "slurmctld", "-D", "-f", self.env["SLURM_CONF"])
        for node in self.node_names:
            self.start_node(node)
        for node in self.node_names:
            self.wait_for_node(node, "IDLE")

    def stop(self) -> None:
        """Cancel all jobs, end the daemons and whatever they left, and delete the directory."""
        if "slurmctld" in self.daemons:
            self.end_jobs()
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
        self._janitor.wait()
        for daemon in self.daemons.values():
            daemon.wait()
        self._ports.close()

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node; does not wait until slurmctld has heard of it."""
        inside = [*_namespaces(), "sh", "-ec", NODE, "-", node, str(self.directory), f"{self.directory}/shared"]
        self._daemon(f"slurmd-{node}", *inside, _which("slurmd"), "-D", "-f", self.env["SLURM_CONF"], "-N", node)

    def kill_slurmd(self, node: str) -> None:
        """SIGKILL to a node's slurmd; the job steps there live on, as they do on a real node."""
        daemon = self.daemons.pop(f"slurmd-{node}")
        daemon.kill()
        daemon.wait()

    def drain(self, node: str) -> None:
        """No new job starts on the node."""
        self.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")

    def resume(self, node: str) -> None:
        """The node may be used again."""
        self.run("scontrol", "update", f"nodename={node}", "state=resume")

    def node_state(self, node: str) -> str:
        """As `scontrol show node` says it, such as IDLE, ALLOCATED+DRAIN or DOWN*."""
        words = self.run("scontrol", "show", "node", node, "-o").split()
        return next(word for word in words if word.startswith("State=")).removeprefix("State=")

    def wait_for_node(self, node: str, state: str, timeout_s: float = START_S) -> None:
        """Wait until the node's state holds `state`."""
        wait_until(lambda: state in self.node_state(node), timeout_s, f"{node} to be {state}", self.describe)

    def run(self, *command: str, timeout_s: float = 60.0, env: Mapping[str, str] | None = None) -> str:
        """What a client command (sbatch, scontrol, ...) printed. Raises SlurmError when it fails."""
        done = subprocess.run(
            command,
            env=self.env | dict(env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode:
            raise SlurmError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def describe(self) -> str:
        """Nodes, jobs and the ends of the daemons' logs, for a message."""
        parts = []
        for command in (["sinfo", "-N", "-l"], ["squeue", "-l"]):
            done = subprocess.run(command, env=self.env, capture_output=True, text=True)
            parts.append(done.stdout + done.stderr)
        logs = sorted((self.directory / "log").glob("*.log"))
        return "\n".join(parts + [f"== {log.name}\n{tail(log)}" for log in logs])

    def end_jobs(self) -> None:
        """Cancel every job and wait for the end of them."""
        with contextlib.suppress(SlurmError):
            self.run("scancel", "--user", getpass.getuser())
            wait_until(lambda: not self.run("squeue", "-h"), 30.0, "the end of all jobs")

    def _start_munged(self) -> None:
        key = self.directory / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = {
            "key-file": key,
            "seed-file": self.directory / "munge" / "seed",
            "log-file": self.directory / "munge" / "munged.log",
            "pid-file": self.directory / "run" / "munged.pid",
            "socket": self.directory / "run" / "munge.sock",
        }
        options = [f"--{name}={path}" for name, path in files.items()]
        self._daemon("munged", "munged", "--foreground", "--force", "--num-threads=2", *options)
        wait_until(files["socket"].exists, START_S, "munged", lambda: tail(files["log-file"]))

    def _daemon(self, name: str, program: str, *arguments: str) -> None:
        with open(self.directory / "log" / f"{name}.out", "ab") as output:
            self.daemons[name] = subprocess.Popen(
                [_which(program), *arguments],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _shared_below_tmp(self) -> list[Path]:
        everywhere = [self.directory, *self.shared, Path(__file__).parents[2], Path(sys.prefix)]
        return [path for path in everywhere if Path("/tmp") in path.parents]


@contextlib.contextmanager
def cluster(**settings: object) -> Iterator[MiniSlurm]:
    """A running cluster in a directory of its own, ended and deleted at the end of the block."""
    made = MiniSlurm(Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp")), **settings)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def marked(text: str) -> list[int]:
    """Ids of the processes of this machine whose environment holds `text` (NAME=value), ours excepted."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if text.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a file, or that it does not exist."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return f"({path} does not exist)"


def _which(name: str) -> str:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or ""


def _namespaces() -> list[str]:
    """The command that runs another one with a host name and mounts of its own."""
    as_user = [] if os.getuid() == 0 else ["--map-current-user", "--keep-caps"]
    return ["unshare", *as_user, "--mount", "--uts"]


def _clean_up(directory: Path) -> None:
    """TERM, then KILL, to all that carries the directory's mark; then delete it."""
    mark = f"{MARK}={directory}"
    for number, patience_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        with contextlib.suppress(SlurmError):
            wait_until(lambda: not marked(mark), patience_s, "the end")
            break
    shutil.rmtree(directory)


def _main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--janitor"]:
        sys.stdin.read()
        _clean_up(Path(arguments[1]))
        return
    argparse.ArgumentParser(prog="python -m tests.slurm.minislurm", description=HELP).parse_args(arguments)
    reason = why_not()
    if reason:
        sys.exit(reason)
    with cluster() as slurm, contextlib.suppress(KeyboardInterrupt):
        print(f"export SLURM_CONF={slurm.env['SLURM_CONF']} {MARK}={slurm.directory}", flush=True)
        print(f"# {len(slurm.node_names)} nodes are up; a second shell takes that line; Ctrl-C ends them", flush=True)
        signal.pause()


if __name__ == "__main__":
    _main(sys.argv[1:])
