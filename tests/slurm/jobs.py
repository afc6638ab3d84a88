"""Jobs on the emulated cluster as tests need them: submit, watch with a deadline, signal, requeue. No daemons here."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .minislurm import MiniSlurm, marked, tail, wait_until

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")
JOB_MARK = "MINISLURM_JOB"


@dataclass(frozen=True)
class Job:
    """One submitted job."""

    slurm: MiniSlurm
    id: str
    mark: str
    """What the environment of each of its processes holds, also of those that left it with setsid."""

    def fields(self) -> dict[str, str]:
        """All that `scontrol show job` says: JobState, Restarts, ExitCode, NodeList, StdOut, ..."""
        text = self.slurm.run("scontrol", "show", "job", "-o", self.id)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    @property
    def state(self) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, ..."""
        return self.fields()["JobState"]

    @property
    def restarts(self) -> int:
        """How often it was requeued."""
        return int(self.fields()["Restarts"])

    def output(self) -> str:
        """What the batch script printed so far."""
        path = Path(self.fields()["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Poll until `condition()` is true; fail after the deadline, or when the job ends first."""

        def met() -> bool:
            ended = self.state in ENDED  # asked first: what the job did last counts
            if condition():
                return True
            assert not ended, f"the job ended before {what}\n{self.describe()}"
            return False

        wait_until(met, timeout_s, what, self.describe)

    def wait_for_state(self, *states: str, timeout_s: float) -> str:
        """Wait until the job is in one of the states; which one it is."""
        seen = ""

        def met() -> bool:
            nonlocal seen
            seen = self.state
            return seen in states

        wanted = " or ".join(states)
        wait_until(lambda: met() or seen in ENDED, timeout_s, f"job {self.id} to be {wanted}", self.describe)
        assert seen in states, f"job {self.id} is {seen} instead of {wanted}\n{self.describe()}"
        return seen

    def wait_for_end(self, *, timeout_s: float) -> str:
        """Wait until the job has ended, in whatever way; its last state."""
        return self.wait_for_state(*ENDED, timeout_s=timeout_s)

    def wait_for_text(self, path: Path, pattern: str, *, timeout_s: float) -> re.Match[str]:
        """Wait until a file exists and holds a match of the regular expression."""
        found: list[re.Match[str]] = []

        def met() -> bool:
            text = path.read_text(errors="replace") if path.exists() else ""
            found.extend([match] if (match := re.search(pattern, text, re.M)) else [])
            return bool(found)

        self.wait_for(met, timeout_s, f"{pattern!r} in {path}")
        return found[0]

    def signal(self, name: str, *, batch: bool = False, step: str = "") -> None:
        """`scancel --signal`: to the job's steps, to its batch shell alone, or to one step."""
        target = f"{self.id}.{step}" if step else self.id
        self.slurm.run("scancel", f"--signal={name}", *(["--batch"] if batch else []), target)

    def cancel(self) -> None:
        """`scancel`: TERM, and KILL after KillWait."""
        self.slurm.run("scancel", self.id)

    def requeue(self) -> None:
        """`scontrol requeue`, as an administrator would."""
        self.slurm.run("scontrol", "requeue", self.id)

    def wait_for_restart(self, restarts: int = 1, *, timeout_s: float) -> None:
        """Wait until the job has started again, without the two minutes that Slurm lets a requeued job wait.

        Not without any: a node refuses a job that starts in the very second in which it was killed there.
        """
        hastened = False

        def started() -> bool:
            nonlocal hastened
            fields = self.fields()
            requeued = int(fields["Restarts"]) >= restarts
            if requeued and not hastened and fields["JobState"] == "PENDING":
                self.slurm.run("scontrol", "update", f"jobid={self.id}", "starttime=now+2")
                hastened = True
            return requeued and fields["JobState"] in ("RUNNING", *ENDED)

        wait_until(started, timeout_s, f"restart {restarts} of job {self.id}", self.describe)

    def steps(self) -> dict[str, str]:
        """Names of the running steps -> their ids within the job."""
        lines = self.slurm.run("squeue", "-h", "-s", "-j", self.id, "-o", "%j %i").split("\n")
        pairs = [line.rsplit(maxsplit=1) for line in lines if line.strip()]
        return {name: step.partition(".")[2] for name, step in pairs}

    def processes(self, command: str = "") -> list[int]:
        """Ids of its living processes on this machine, those that contain `command` in their command line."""
        return [pid for pid in marked(self.mark) if command in _command_line(pid)]

    def describe(self) -> str:
        """The job's fields, the end of its output, and the cluster, for a message."""
        fields = self.fields()
        shown = " ".join(
            f"{name}={fields.get(name)}" for name in ("JobState", "Reason", "ExitCode", "Restarts", "NodeList")
        )
        return f"job {self.id}: {shown}\n{tail(Path(fields['StdOut']), 40)}\n{self.slurm.describe()}"


def submit(
    slurm: MiniSlurm,
    script: Path,
    *arguments: str,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    directory: Path,
) -> Job:
    """`sbatch` a script from `directory`, where its output goes unless the script says otherwise."""
    mark = uuid.uuid4().hex
    command = ["sbatch", "--parsable", f"--chdir={directory}", *options, str(script), *arguments]
    job = slurm.run(*command, env={**(env or {}), JOB_MARK: mark}).strip()
    return Job(slurm, job, f"{JOB_MARK}={mark}")


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
