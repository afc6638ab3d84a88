"""The mutants of the Triton kernels: that they fit the source, and that none survives the tests."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tools.kernel_mutants import KERNELS, Kernel, Mutant
from tools.mutate_kernels import BROKEN, FAILED, PASSED, Task, mutated, verdict

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", KERNELS)
def test_every_mutant_is_a_change_of_the_kernel_as_it_stands(name: str) -> None:
    kernel = KERNELS[name]
    source = (ROOT / kernel.file).read_text("utf-8")
    changed = [mutated(kernel, mutant, source) for mutant in kernel.mutants]
    assert len({ast.dump(ast.parse(text)) for text in [source, *changed]}) == 1 + len(changed)


def test_a_mutant_that_no_longer_fits_is_named() -> None:
    with pytest.raises(ValueError, match="does not hold 'gone'"):
        mutated(Kernel("kernel.py", (), ()), Mutant("a change", "gone", "new"), "source")


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "rounding"])
def test_every_kernel_is_broken_in_a_dozen_ways(name: str) -> None:
    assert len(KERNELS[name].mutants) >= 12


@pytest.mark.parametrize(
    ("number", "code", "wanted"),
    [
        (None, PASSED, "passed"),
        (None, FAILED, "BROKEN"),
        (0, PASSED, "SURVIVED"),
        (0, FAILED, "killed"),
        (0, -11, "killed"),
        (0, BROKEN, "BROKEN"),
        (0, -14, "BROKEN"),  # the alarm
    ],
)
def test_only_a_failed_check_or_a_signal_kills(number: int | None, code: int, wanted: str) -> None:
    assert verdict(Task("gradient", number, compiled=False), code) == wanted


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_mutant_survives() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.mutate_kernels"], cwd=ROOT, capture_output=True, text=True, timeout=3500
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
