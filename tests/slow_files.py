"""Runs the slow tests of the areas that recent commits touched, as many as fit into a time; no test is defined here.

    python -m tests.slow_files --budget-s 1200 [-- pytest arguments]     what CI does after the first tier
    python -m tests.slow_files --list                                    which files, and why
    python -m tests.slow_files --measure [FILE ...]                      refresh tests/slow_seconds.json

A file that was never measured, which it is by passing once, is left out. Any other is begun only if what it took then
still fits; the measured times are stretched by how much slower than then the first tier was. A file that has not ended
when the time is up is stopped, which is no failure: what was left out, and why, is the last thing printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COSTS = ROOT / "tests" / "slow_seconds.json"
FIRST_TIER = "first tier"
COMMITS = 30
NOTHING_COLLECTED = 5
"""pytest's exit code when a selection holds no test."""

_STATE = tuple(f"megatron_rl/policy/{name}.py" for name in ("checkpoint", "manifest", "digest", "sharded_state"))
_LOOP = ("megatron_rl/train.py", "megatron_rl/session.py", "megatron_rl/feed.py", "megatron_rl/bring_up.py")
AREAS: dict[str, tuple[str, ...]] = {
    "tests/e2e/test_kill.py": (
        *_STATE,
        *_LOOP,
        "megatron_rl/audit.py",
        "megatron_rl/cluster/",
        "megatron_rl/files.py",
        "megatron_rl/preflight.py",
        "megatron_rl/rewards/",
        "megatron_rl/rollout/",
    ),
    "tests/e2e/test_preflight_parity.py": ("megatron_rl/cli.py", "megatron_rl/cluster/local.py", "megatron_rl/parity"),
    "tests/parallel/test_parity.py": (
        "megatron_rl/engines/embedded/",
        "megatron_rl/parity",
        "megatron_rl/policy/",
        "megatron_rl/rollout/control.py",
        "megatron_rl/rollout/protocol.py",
    ),
    "tests/e2e/test_modes.py": (
        *_LOOP,
        "megatron_rl/algorithms/staleness.py",
        "megatron_rl/config/rollout.py",
        "megatron_rl/publisher.py",
        "megatron_rl/rollout/",
    ),
    "tests/e2e/test_chaos.py": (
        *_LOOP,
        "megatron_rl/cluster/",
        "megatron_rl/engines/embedded/",
        "megatron_rl/publisher.py",
        "megatron_rl/rollout/",
        "megatron_rl/weights/transports/",
    ),
    "tests/e2e/test_colocated.py": (
        *_LOOP,
        "megatron_rl/cluster/turn.py",
        "megatron_rl/colocation.py",
        "megatron_rl/policy/offload.py",
        "megatron_rl/publisher.py",
        "megatron_rl/weights/transports/ipc.py",
    ),
    "tests/e2e/test_layouts.py": (
        *_LOOP,
        "megatron_rl/config/parallel.py",
        "megatron_rl/policy/",
        "megatron_rl/weights/",
    ),
    "tests/parallel/test_layouts.py": ("megatron_rl/algorithms/", "megatron_rl/kernels/", "megatron_rl/policy/"),
    "tests/parallel/test_checkpoint_layouts.py": (*_STATE, "megatron_rl/policy/optimizer.py"),
    "tests/parallel/test_replay.py": (
        "megatron_rl/config/moe",
        "megatron_rl/policy/",
        "megatron_rl/routes/",
    ),
    "tests/parallel/test_moe_shards.py": (
        "configs/",
        "megatron_rl/config/",
        "megatron_rl/policy/",
        "tools/plan_model.py",
    ),
    "tests/parallel/test_weight_transports.py": ("megatron_rl/engines/", "megatron_rl/weights/"),
    "tests/e2e/test_tiny_moe.py": (
        *_LOOP,
        "configs/tiny_moe",
        "megatron_rl/engines/embedded/",
        "megatron_rl/policy/",
        "megatron_rl/rollout/route",
        "megatron_rl/routes/",
        "tools/study_moe_ratio.py",
    ),
    "tests/e2e/test_report_page.py": ("megatron_rl/monitor/",),
    "tests/e2e/test_benchmarks.py": ("tools/bench_",),
    "tests/e2e/test_rollout_benchmarks.py": (
        "megatron_rl/rollout/",
        "tools/bench_client.py",
        "tools/bench_common.py",
        "tools/bench_partial.py",
        "tools/bench_routes.py",
    ),
    "tests/e2e/test_tools.py": (
        "megatron_rl/config/",
        "megatron_rl/weights/transports/",
        "tools/bench_common.py",
        "tools/bench_transport.py",
        "tools/loss_bytes.py",
        "tools/plan_model.py",
    ),
    "tests/contract/test_restart.py": ("megatron_rl/cluster/engine_", "megatron_rl/engines/", "tests/contract/"),
    "tests/contract/test_routes.py": ("megatron_rl/engines/", "megatron_rl/rollout/", "tests/contract/"),
    "tests/e2e/test_routes_kept.py": ("megatron_rl/rollout/", "megatron_rl/routes/"),
    "tests/e2e/test_smollm2.py": ("configs/smollm2", "megatron_rl/weights/", "tools/fetch_smollm2.py"),
    "tests/e2e/test_convert_launchers.py": ("megatron_rl/cluster/bootstrap.py", "megatron_rl/weights/convert/"),
    "tests/unit/test_convert_plans.py": ("megatron_rl/weights/convert/",),
    "tests/e2e/test_convert_smollm2.py": ("megatron_rl/weights/", "megatron_rl/verify.py", "tools/fetch_smollm2.py"),
    "tests/e2e/test_fresh_clone.py": ("constraints-cpu.txt", "launch/", "setup.py"),
    "tests/e2e/test_presets.py": ("megatron_rl/algorithms/", "megatron_rl/config/algorithm.py"),
    "tests/e2e/test_sglang.py": (
        "megatron_rl/cluster/engine_",
        "megatron_rl/colocation.py",
        "megatron_rl/engines/",
        "megatron_rl/publisher.py",
    ),
    "tests/e2e/test_staging.py": (
        "megatron_rl/cluster/engine_",
        "megatron_rl/cluster/stag",
        "megatron_rl/engines/serve.py",
        "megatron_rl/pins.py",
        "megatron_rl/publisher.py",
        "megatron_rl/weights/current.py",
    ),
    "tests/slurm/": ("launch/", "megatron_rl/cluster/"),
    "tests/unit/test_triton_mutants.py": ("megatron_rl/kernels/",),
}
"""File (or folder) of slow tests -> beginnings of the paths that it guards. Its own folder's helpers count anyway."""

FETCHES = (
    "tests/e2e/test_benchmarks.py",
    "tests/e2e/test_convert_smollm2.py",
    "tests/e2e/test_fresh_clone.py",
    "tests/e2e/test_smollm2.py",
)
"""Run with --fetching only: they install packages or fetch a model, and CI must not fail when an index does."""


@dataclass(frozen=True)
class Choice:
    """One file of slow tests, and why it runs, or why it does not."""

    file: str
    seconds: float
    runs: bool
    reason: str


def slow_files() -> list[str]:
    """Every test file with a test that is marked slow."""
    marked = re.compile(r"(^(@|    |pytestmark = .*)|marks=)pytest\.mark\.slow\b", re.MULTILINE)
    found = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if marked.search(path.read_text())]
    return [path.relative_to(ROOT).as_posix() for path in found]


def choose(
    files: Iterable[str], touched: set[str] | None, seconds: dict[str, float], fetching: bool = False
) -> list[Choice]:
    """What to run, cheap files first; `touched` None: the history is not known, so everything."""
    choices = []
    for file in files:
        runs, reason = _verdict(file, touched)
        if file not in seconds:
            runs, reason = False, "was never measured; run `python -m tests.slow_files --measure` on it"
        elif file in FETCHES and not fetching:
            runs, reason = False, "fetches packages or a model; run it with --fetching"
        choices.append(Choice(file, seconds.get(file, 0.0), runs, reason))
    return sorted(choices, key=lambda choice: (choice.seconds, choice.file))


def _verdict(file: str, touched: set[str] | None) -> tuple[bool, str]:
    if touched is None:
        return True, "the history is not here"
    guarded = [start for key, starts in AREAS.items() if file.startswith(key) for start in starts]
    folder = file.rpartition("/")[0]
    for path in sorted(touched):
        helper = path.rpartition("/")[0] == folder and not path.rpartition("/")[2].startswith("test_")
        if path == file or helper or path.startswith(tuple(guarded)):
            return True, f"{path} was touched"
    return False, f"nothing that it guards was touched in {COMMITS} commits"


def touched_paths() -> set[str] | None:
    """Paths in the last `COMMITS` commits; None without that much history."""
    log = _git("log", f"-{COMMITS}", "--name-only", "--format=%x00")
    if log is None or (log.count("\0") < COMMITS and _git("rev-parse", "--is-shallow-repository") != "false\n"):
        return None
    return {line for line in log.replace("\0", "\n").splitlines() if line}


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


# ------------------------------------------------------------------------------------------------------------ running


def run_within(
    choices: list[Choice], budget_s: float, stretch: float, arguments: list[str]
) -> tuple[list[str], list[str]]:
    """Files that failed, and in words what was left out."""
    deadline = time.monotonic() + budget_s
    failed, left_out = [], []
    for choice in choices:
        left, expected = deadline - time.monotonic(), choice.seconds * stretch
        if not choice.runs:
            left_out.append(f"{choice.file}: {choice.reason}")
        elif expected > left:
            left_out.append(f"{choice.file}: takes about {expected:.0f} s, and {max(left, 0):.0f} s are left")
        else:
            print(f"\n-- {choice.file} ({choice.reason}): about {expected:.0f} s", flush=True)
            code = run_file(choice.file, left, arguments)
            if code is None:
                left_out.append(f"{choice.file}: stopped when the time was up, after {left:.0f} s")
            elif code not in (0, NOTHING_COLLECTED):
                failed.append(choice.file)
    return failed, left_out


def run_file(file: str, timeout_s: float, arguments: list[str]) -> int | None:
    """pytest's exit code; None if it had to be stopped."""
    command = [sys.executable, "-m", "pytest", "-m", "slow and not gpu", file, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def measure(files: list[str], arguments: list[str]) -> list[str]:
    """Run every file to its end and write down what those took that passed. Returns the others."""
    failed = []
    for file in files:
        began = time.monotonic()
        if run_file(file, 3600, arguments) == 0:
            costs = known_costs() | {file: round(time.monotonic() - began)}
            COSTS.write_text(json.dumps(dict(sorted(costs.items())), indent=1) + "\n")
        else:
            failed.append(file)
    return failed


def known_costs() -> dict[str, float]:
    """Seconds by file, and of the first tier, as they were measured on two idle cores."""
    return dict(json.loads(COSTS.read_text()))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=3600.0, help="seconds for all of them together")
    parser.add_argument("--first-tier-s", type=float, help="what the first tier took just now")
    parser.add_argument("--list", action="store_true", help="show what would run, and run nothing")
    parser.add_argument("--measure", action="store_true", help="run the files to their end and write their times down")
    parser.add_argument("--fetching", action="store_true", help="those that install packages or fetch a model as well")
    parser.add_argument("files", nargs="*", metavar="FILE", help="only these; all files with slow tests by default")
    words, pytest_arguments = parser.parse_known_args(argv)
    files, costs = words.files or slow_files(), known_costs()
    if words.measure:
        failed, left_out = measure(files, pytest_arguments), []
    else:
        stretch = max(1.0, (words.first_tier_s or 0.0) / costs[FIRST_TIER])
        choices = choose(files, touched_paths(), costs, words.fetching)
        if words.list:
            for choice in choices:
                print(f"{choice.seconds:6.0f} s  {'' if choice.runs else 'not '}{choice.file}: {choice.reason}")
            return 0
        failed, left_out = run_within(choices, words.budget_s, stretch, pytest_arguments)
    for line in left_out:
        print(f"left out: {line}")
    for file in failed:
        print(f"FAILED: {file}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
