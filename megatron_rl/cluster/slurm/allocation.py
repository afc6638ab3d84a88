"""What Slurm says about this job and its nodes, and the few things asked of it. Nothing is decided here."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from megatron_rl.config import ConfigError

from .placement import NodeShape

log = logging.getLogger(__name__)
ASK_TIMEOUT_S, PATIENCE_S = 60.0, 300.0
UNUSABLE = re.compile(r"DOWN|DRAIN|FAIL|NOT_RESPONDING|NO_RESPOND|\*")
"""In a node's state: it is not to be used, or has not been heard of."""


class SlurmError(RuntimeError):
    """Slurm refused or did not answer; the message holds the command and what it said."""


class Unreachable(SlurmError):
    """Slurm's controller did not answer: it may be restarting."""


@retry(
    retry=retry_if_exception_type(Unreachable),
    stop=stop_after_delay(PATIENCE_S),
    wait=wait_fixed(5.0),
    before_sleep=lambda state: log.warning("%s; asking again", state.outcome and state.outcome.exception()),
    reraise=True,
)
def ask(*command: str) -> str:
    """What a client command printed; asked again for a while when the controller does not answer. Raises SlurmError."""
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise Unreachable(f"{shown}: no answer within {ASK_TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise SlurmError(f"{shown}: {error}") from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        unreachable = re.search("contact slurm controller|Socket timed out|Connection refused", said)
        raise (Unreachable if unreachable else SlurmError)(f"{shown}: exit {done.returncode}: {said}")
    return done.stdout


@dataclass(frozen=True)
class Allocation:
    """The job that this process is the batch script of."""

    job: str
    shape: NodeShape

    @classmethod
    def of(cls, env: Mapping[str, str] = os.environ) -> Allocation:
        """Raises ConfigError outside a batch script."""
        if "SLURM_JOB_ID" not in env:
            raise ConfigError(
                "not inside a Slurm job: submit with `sbatch --nodes=N launch/train.sbatch CONFIG.yaml`; for a plan "
                "before that, add --dry-run, and --cpus and --gpus of the nodes you will ask for"
            )
        gpus = env.get("SLURM_GPUS_ON_NODE", "0")
        return cls(
            env["SLURM_JOB_ID"],
            NodeShape(
                least(env.get("SLURM_JOB_CPUS_PER_NODE", env.get("SLURM_CPUS_ON_NODE", "1"))),
                int(gpus) if gpus.isdigit() else 0,
            ),
        )

    def fields(self) -> dict[str, str]:
        """`scontrol show job`, field by field."""
        return dict(re.findall(r"(\S+?)=(\S*)", ask("scontrol", "show", "job", "-o", self.job)))

    def nodes(self) -> list[str]:
        """Nodes that Slurm still counts to the job, in its order: one that failed is taken out (--no-kill)."""
        return ask("scontrol", "show", "hostnames", self.fields()["NodeList"]).split()

    def usable(self, nodes: Sequence[str]) -> list[str]:
        """Those of `nodes` that are up and not drained."""
        lines = ask("scontrol", "show", "node", "-o", ",".join(nodes)).splitlines() if nodes else []
        states = dict(re.findall(r"NodeName=(\S+).*? State=(\S+)", "\n".join(lines)))
        bad = {name: state for name, state in states.items() if UNUSABLE.search(state)}
        for name, state in bad.items():
            log.warning("node %s is %s: left out", name, state)
        return [node for node in nodes if node not in bad]

    def is_running(self) -> bool:
        """False once the job was cancelled, ran out of time, or is being requeued."""
        return self.fields()["JobState"] == "RUNNING"

    def requeue(self) -> None:
        """Back into the queue under the same id; Slurm then ends this process. Raises SlurmError if it may not."""
        ask("scontrol", "requeue", self.job)

    def kill_step(self, name: str) -> None:
        """KILL to all tasks of the job's steps with this name."""
        for line in ask("squeue", "-h", "-s", "-j", self.job, "-o", "%i %j").splitlines():
            step, _, found = line.strip().partition(" ")
            if found == name:
                ask("scancel", "--signal=KILL", step)


def least(counts: str) -> int:
    """The smallest number in Slurm's compact form.

    >>> least("72(x2),36")
    36
    """
    return min(int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", counts))
