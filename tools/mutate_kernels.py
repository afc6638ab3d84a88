"""Breaks every Triton kernel in many ways, one at a time, and says whether the tests notice.

    python -m tools.mutate_kernels [--only gradient] [--what barrier] [--processes 2]

Each mutant of `kernel_mutants` is one small change of a kernel's source. It is killed when the checks of its kernel
fail in Triton's interpreter (or the process dies of touching forbidden memory), or, for faults that the interpreter
cannot see, when the compile check refuses it. A survivor is a missing test. Exit code 1 when one survives, or when the
unbroken kernels do not pass.

Two servers, one with and one without TRITON_INTERPRET=1, import torch and Triton once and fork a process per mutant,
which sees a copy of the repository with the change in it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from tools.kernel_mutants import KERNELS, Kernel, Mutant

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("megatron_rl", "tools", "tests/__init__.py", "tests/conftest.py", "tests/unit/__init__.py", "pyproject.toml")
CHECKS = "tests/unit/interpreted"
LIMIT_S = 1200
"""For one mutant. Whoever gives no answer by then has neither passed nor failed."""
PASSED, FAILED, BROKEN = 0, 1, 2


@dataclass(frozen=True)
class Task:
    """A mutant, or with None the kernel as it is."""

    kernel: str
    number: int | None
    compiled: bool

    @property
    def mutant(self) -> Mutant | None:
        """What is changed."""
        return None if self.number is None else KERNELS[self.kernel].mutants[self.number]


def tasks(names: Sequence[str], what: str, compiled: bool) -> list[Task]:
    """The mutants that one of the two servers tries, after the kernels as they are."""
    found = []
    for name in names:
        mutants = KERNELS[name].mutants
        numbers = [i for i, one in enumerate(mutants) if one.compiled == compiled and what in one.what]
        found += [Task(name, number, compiled) for number in ([None, *numbers] if numbers else [])]
    return found


def mutated(kernel: Kernel, mutant: Mutant, source: str) -> str:
    """The kernel's source with the change in it.

    Raises:
        ValueError: the source does not hold what is to be changed.
    """
    if mutant.old not in source or mutant.old == mutant.new:
        raise ValueError(f"{kernel.file} does not hold {mutant.old!r} ({mutant.what}); adapt tools/kernel_mutants.py")
    return source.replace(mutant.old, mutant.new, 1)


def _copy(folder: Path, task: Task) -> None:
    for name in (*COPIED, CHECKS):
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    if task.mutant is not None:
        kernel = KERNELS[task.kernel]
        path = folder / kernel.file
        path.write_text(mutated(kernel, task.mutant, path.read_text("utf-8")), "utf-8")


def _check(task: Task, folder: Path) -> int:
    """In the forked process, with the copy in front of everything importable."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("megatron_rl", "tools", "tests")]:
        del sys.modules[name]
    if not task.compiled:
        import pytest

        files = [f"{CHECKS}/{name}" for name in KERNELS[task.kernel].checks]
        found = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *files]))
        return found if found in (PASSED, FAILED) else BROKEN
    os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
    from tools.compile_kernels import CASES, reports

    cases = [name for name in CASES if name.startswith(task.kernel)]
    return FAILED if any(report.faults for report in reports(cases, [90], 1)) else PASSED


def _fork(task: Task, log: Path) -> int:
    """The process id of a child that checks the task."""
    pid = os.fork()
    if pid:
        return pid
    code = BROKEN
    try:
        signal.alarm(LIMIT_S)
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            with tempfile.TemporaryDirectory(prefix="mutant-") as name, redirect_stdout(file):
                _copy(Path(name), task)
                code = _check(task, Path(name))
    finally:
        os._exit(code)


def serve(names: Sequence[str], what: str, compiled: bool, processes: int) -> None:
    """Run the tasks of one server; a JSON line for each."""
    for name in ("torch", "pytest", "hypothesis", "triton.runtime.interpreter"):
        importlib.import_module(name)  # once, for all children
    waiting = tasks(names, what, compiled)
    running: dict[int, tuple[Task, Path, float]] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        while waiting or running:
            while waiting and len(running) < processes:
                task, log = waiting.pop(0), Path(folder) / str(len(waiting))
                running[_fork(task, log)] = (task, log, time.monotonic())
            pid, status = os.wait()
            task, log, since = running.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            seconds = round(time.monotonic() - since, 1)
            output = log.read_text("utf-8", "replace") if code == BROKEN else ""
            line = {"kernel": task.kernel, "number": task.number, "code": code, "seconds": seconds, "output": output}
            print(json.dumps(line), flush=True)


def _results(names: Sequence[str], what: str, processes: int) -> Iterator[tuple[Task, int, str]]:
    """Of both servers, as they come."""
    for compiled in (False, True):
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        if not compiled:
            environment["TRITON_INTERPRET"] = "1"
        command = [
            sys.executable,
            "-m",
            "tools.mutate_kernels",
            f"--processes={processes}",
            f"--what={what}",
            "--serve",
        ]
        command += ["compiler" if compiled else "interpreter", *(f"--only={name}" for name in names)]
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            for line in server.stdout:
                found = json.loads(line)
                yield Task(found["kernel"], found["number"], compiled), found["code"], found["output"]
        if server.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {server.returncode}")


def verdict(task: Task, code: int) -> str:
    """passed, killed (a signal kills too), SURVIVED, or BROKEN when nothing was learned, be it for want of time."""
    if code in (BROKEN, -signal.SIGALRM) or (task.mutant is None and code != PASSED):
        return "BROKEN"
    if task.mutant is None:
        return "passed"
    return "SURVIVED" if code == PASSED else "killed"


def main() -> int:
    """Print a line per mutant and the score of each kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(KERNELS), help="a kernel; default: all")
    parser.add_argument("--what", default="", help="mutants whose description contains this")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--serve", choices=["interpreter", "compiler"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.only or list(KERNELS)
    if arguments.serve:
        serve(names, arguments.what, arguments.serve == "compiler", arguments.processes)
        return 0
    found: dict[str, list[str]] = {name: [] for name in names}
    for task, code, output in _results(names, arguments.what, arguments.processes):
        result = verdict(task, code)
        print(f"{result:9} {task.kernel}: {task.mutant.what if task.mutant else 'as it is'}", flush=True)
        if output:
            print(output)
        found[task.kernel].append(result)
    for name, results in found.items():
        print(f"{name}: {results.count('killed')} of {len(results) - results.count('passed')} mutants killed")
    return 1 if any(result in ("SURVIVED", "BROKEN") for results in found.values() for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
