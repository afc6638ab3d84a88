"""One role as a step of the allocation: its srun command, what srun says of its tasks, and its end.

srun reports every task that ended badly on its standard error, at once and over Slurm's own network; the codes are
taken from there, since a shared file system may show a file of another node half a minute late.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.cluster.processes import EXIT_RESUMABLE, decode_exit, tail

from .allocation import Allocation, SlurmError

log = logging.getLogger(__name__)
OVERRIDDEN = re.compile(
    r"(SLURM|SRUN)_(CPUS_PER_TASK|TRES_PER_TASK|NTASKS.*|NPROCS|NNODES|GPUS_PER_.*|CPU_BIND.*|DISTRIBUTION|EXACT)"
)
"""What the options of sbatch leave in the environment for srun, and every step says for itself."""
TASK = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (.+)")
NODE_LOST = re.compile(r"srun: error: (?:Node failure on (\S+)|.*launch.*failed on node (\S+?):.*)")
WORDS = {"Killed": 137, "Terminated": 143, "Out Of Memory": 137, "Segmentation fault": 139, "Aborted": 134}


@dataclass(frozen=True)
class Ended:
    """A task that ended badly, or a node that was lost under the step (code None)."""

    node: str
    task: str
    code: int | None
    words: str

    @property
    def may_be_resumed(self) -> bool:
        """It obeyed a signal: it saved itself, or had nothing to save yet."""
        return self.code in (EXIT_RESUMABLE, 128 + signal.SIGTERM, 128 + signal.SIGUSR2)


def parse(line: str) -> Ended | None:
    """What one line of srun's standard error says about a task or a node.

    >>> parse("srun: error: node2: tasks 4-5: Exited with exit code 75")
    Ended(node='node2', task='4-5', code=75, words='saved itself and can be resumed (exit 75)')
    """
    if match := NODE_LOST.search(line):
        return Ended(match[1] or match[2], "", None, "was lost")
    match = TASK.search(line)
    if match is None:
        return None
    code = re.search(r"exit code (\d+)", match[3])
    number = int(code[1]) if code else next((n for words, n in WORDS.items() if words in match[3]), 1)
    words = "was ended by SIGKILL: out of memory" if "Out Of Memory" in match[3] else decode_exit(number)
    return Ended(match[1], match[2], number, words)


@dataclass
class Step:
    """A running step."""

    name: str
    process: subprocess.Popen[str]
    folder: Path
    """Of its logs."""
    ended: list[Ended] = field(default_factory=list)
    """In the order in which srun reported them."""
    reader: threading.Thread | None = None

    @property
    def code(self) -> int | None:
        """srun's exit code, the highest of its tasks; None while it runs."""
        code = self.process.poll()
        if code is not None and self.reader:
            self.reader.join(5.0)
        return code

    @property
    def first_end(self) -> Ended | None:
        """A node that failed, whatever srun's exit code says, else the task that ended badly first."""
        return next((ended for ended in self.ended if ended.code is None), self.ended[0] if self.ended else None)

    @property
    def bad_nodes(self) -> tuple[str, ...]:
        """Where that was."""
        first = self.first_end
        return () if first is None else (first.node,)

    def signal(self, number: signal.Signals) -> None:
        """srun passes USR1 and USR2 on to its tasks; with TERM it kills them."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def describe_end(self) -> str:
        """The first bad end, what it means, and the end of that task's log."""
        first = self.first_end
        if first is None:
            return f"{self.name}: the step {decode_exit(self.process.poll())}"
        if first.code is None:
            return f"{self.name}: node {first.node} {first.words}"
        log_file = self.log_file(first)
        return f"{self.name}-{first.node}-{first.task} {first.words}; log {log_file}\n{tail(log_file)}"

    def log_file(self, ended: Ended) -> Path:
        """The log of a task (the first one, when several ended together)."""
        task = re.split("[,-]", ended.task)[0]
        return self.folder / f"{self.name}-{ended.node}-{task}.log"

    def read(self, report: Path) -> None:
        """Collect what srun says, in a thread, until it ends."""
        self.reader = threading.Thread(target=self._read, args=(report,), daemon=True)
        self.reader.start()

    def _read(self, report: Path) -> None:
        assert self.process.stderr is not None
        with open(report, "a") as file:
            for line in self.process.stderr:
                file.write(line)
                file.flush()
                found = parse(line)
                if found:
                    self.ended.append(found)


@dataclass(frozen=True)
class Layout:
    """Where one step runs: its nodes, its tasks, the CPUs of each; `gpus` of every node, 0 = none."""

    nodes: Sequence[str]
    tasks: int
    tasks_per_node: int
    cpus_per_task: int
    gpus: int


def srun(name: str, layout: Layout, command: Sequence[str], folder: Path, wait_s: float, more: Sequence[str]) -> Step:
    """Start `command` as step `name`; logs go to FOLDER/NAME-NODE-TASK.log, srun's own words to FOLDER/NAME.srun.log.

    When a task ends, the others have `wait_s` seconds to end as well: a rank that has saved itself leaves before those
    that still write.

    --no-kill=off: without a node the step is over, although the job goes on. --exact: only the CPUs that are asked for,
    free ones first. --overlap: Slurm loses count of the free ones when a node leaves the job, and a step that insists
    on them is never created; that steps do not get in each other's way is up to `placement.py`.
    """
    argv = [
        "srun",
        f"--job-name={name}",
        f"--nodes={len(layout.nodes)}",
        f"--nodelist={','.join(layout.nodes)}",
        f"--ntasks={layout.tasks}",
        f"--ntasks-per-node={layout.tasks_per_node}",
        f"--cpus-per-task={layout.cpus_per_task}",
        *([f"--gpus-per-node={layout.gpus}"] if layout.gpus else ["--gres=none"]),
        "--exact",
        "--overlap",
        "--no-kill=off",
        "--kill-on-bad-exit=0",
        f"--wait={max(1, round(wait_s))}",
        "--mpi=none",
        "--input=none",
        "--open-mode=append",
        f"--output={str(folder).replace('%', '%%')}/{name}-%N-%t.log",
        *more,
        *command,
    ]
    env = {name: value for name, value in os.environ.items() if not OVERRIDDEN.fullmatch(name)}
    process = subprocess.Popen(
        argv,
        env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **env, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a signal to the batch script's group is passed on by us alone
    )
    step = Step(name, process, folder)
    step.read(folder / f"{name}.srun.log")
    return step


def end(steps: Sequence[Step], allocation: Allocation, patience_s: float, *, gently: bool) -> None:
    """End all that still run: gently by USR1 (see `cluster.keeper`), then by TERM to srun, then by KILL."""
    ways = [signal.SIGUSR1, signal.SIGTERM] if gently else [signal.SIGTERM]
    for number in ways:
        for step in steps:
            step.signal(number)
        if _wait(steps, patience_s):
            return
    for step in steps:
        if step.code is None:
            log.warning("step %s does not end; killing it", step.name)
            try:
                allocation.kill_step(step.name)
            except SlurmError as error:
                log.warning("%s", error)
    if not _wait(steps, patience_s):
        for step in steps:
            step.signal(signal.SIGKILL)
            step.process.wait()


def _wait(steps: Sequence[Step], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(step.code is None for step in steps):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def python(*words: str) -> list[str]:
    """A command of this interpreter."""
    return [sys.executable, *words]
