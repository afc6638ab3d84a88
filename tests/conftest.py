"""Switches and reports that every kind of test shares; fixtures of one kind live in that kind's own conftest.

What it adds to pytest:

- a closing table with the duration of every test (set-up, body and tear-down together), slowest first;
- `gpu` tests are skipped where there is no CUDA device;
- every test begins with the same states of Python's, numpy's and torch's random generators;
- with `--strict-skips` (CI), a test that skips for a reason other than `EXPECTED_SKIPS` counts as failed, so that a
  missing package can never turn the suite green;
- with MEGATRON_RL_SYSTEM_INSTALLED (`tests/run.sh --install-system`), a skip of `SYSTEM_SKIPS` is a failure as well.
"""

from __future__ import annotations

import operator
import os
import random
import sys
from collections import defaultdict
from collections.abc import Generator

import pytest

# Before torch is imported anywhere: tests start several processes on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SYSTEM_SKIPS = ("needs Slurm", "needs Open MPI", "needs mount and UTS namespaces")
"""For want of what `tests/run.sh --install-system` installs."""
EXPECTED_SKIPS = (
    *SYSTEM_SKIPS,
    "needs a CUDA device",
    "needs Transformer Engine",
    "needs chromium and chromedriver",
    "needs SGLang: launch/install_sglang.sh installs it",
    "this server ignores sampling_seed",
)
"""How the reason of a skip may begin on a machine that runs these tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strict-skips", action="store_true", help="a skip whose reason tests/conftest.py does not list is a failure"
    )


@pytest.fixture(autouse=True)
def _same_draws_in_every_run() -> None:
    """A test that draws numbers without a generator of its own must not pass today and fail tomorrow."""
    random.seed(0)
    for name, seed in (("numpy", "random.seed"), ("torch", "manual_seed")):
        if name in sys.modules:  # the light rooms' tests do not load them
            operator.attrgetter(seed)(sys.modules[name])(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("gpu") for item in items) and not _has_cuda():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not hasattr(report, "wasxfail"):
        _refuse_unexpected_skip(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_unexpected_skip(report, collector.config)
    return report


def _refuse_unexpected_skip(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    if not report.skipped:
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    unexpected = config.getoption("--strict-skips") and not reason.startswith(EXPECTED_SKIPS)
    lacking = "MEGATRON_RL_SYSTEM_INSTALLED" in os.environ and reason.startswith(SYSTEM_SKIPS)
    if unexpected or lacking:
        report.outcome = "failed"
        report.longrepr = f"skipped for a reason that tests/conftest.py does not expect: {reason or '(none given)'}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration
    if seconds:
        terminalreporter.section(f"seconds per test ({len(seconds)} tests, {sum(seconds.values()):.1f} s)")
        for name, duration in sorted(seconds.items(), key=lambda pair: -pair[1]):
            terminalreporter.write_line(f"{duration:9.3f}  {name}")
