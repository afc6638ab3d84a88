"""Compiles every Triton kernel to machine code, without a GPU, and fails where the result is worse than what is agreed.

    python -m tools.compile_kernels                        # sm_80, sm_90 and sm_100
    python -m tools.compile_kernels --arch 90 --only gradient

For each kernel as it is launched for a vocabulary of 151643: registers, stack, the widest load and store, and for
kernels that walk over rows of logits, counted in the instructions of their loop: bytes read and written per column,
exponentials and instructions per column. A kernel fails when it spills, uses more registers than agreed in CASES, moves
less than 128 bits at once, moves other bytes per column than stated, or lacks a barrier that it needs. How fast it
runs is not known here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
from torch import Tensor

from megatron_rl.algorithms.losses import Sequences
from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.kernels import triton as kernels
from megatron_rl.kernels.vocab_rows import Rows
from tools.machine_code import Loop, MachineCode, compile_launch, recorded

ARCHS = (80, 90, 100)
"""Ampere, Hopper, Blackwell."""
TOKENS, LIVE, HIDDEN, PADDED = 4096, 4000, 5120, 152064
VOCABULARY = 151643
"""No multiple of anything, so that a mask by it cannot be vectorised."""
SCALARS = 10
"""Narrow accesses that a program makes for the numbers of its row."""


@dataclass(frozen=True)
class Case:
    """One way in which a kernel is launched, and what is agreed about its machine code."""

    launch: Callable[[], Any]
    registers: tuple[int, int, int]
    """At most, on each of ARCHS."""
    read: float = 0.0
    """Bytes per column that the row loop loads; 0: the kernel does not walk over rows of logits."""
    written: float = 0.0
    """Bytes per column that the row loop stores."""
    barrier: bool = False
    """Whether a barrier must stand in the row loop."""
    stack: int = 0
    """Bytes at most."""
    product: bool = False
    """Whether tensor cores must be used and tiles loaded 128 bits at a time."""


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _rows(dtype: torch.dtype) -> Rows:
    index = _meta(LIVE, dtype=torch.int64)
    return Rows(_meta(TOKENS, PADDED, dtype=dtype), index, index, _meta(LIVE, 1), VOCABULARY)


def _statistics(dtype: torch.dtype, with_entropy: bool = True) -> Callable[[], Any]:
    return lambda: kernels.vocab_statistics(_rows(dtype), with_entropy)


def _gradient(dtype: torch.dtype, out: torch.dtype, with_entropy: bool = True) -> Callable[[], Any]:
    def launch() -> None:
        rows, row = _rows(dtype), _meta(LIVE)
        kernels.logits_gradient(
            rows,
            maximum=row,
            log_norm=row,
            grad=row,
            entropy=row,
            entropy_grad=row if with_entropy else None,
            out=rows.logits if out == dtype else rows.logits.view(out)[:, :PADDED],
        )

    return launch


def _token_loss(kind: str, estimator: str = "k3") -> Callable[[], Any]:
    def launch() -> None:
        row = _meta(LIVE)
        kernels.token_loss(
            row,
            LossSpec(
                kind=kind,
                dual_clip=3.0 if kind == "ppo" else None,
                kl_coef=0.1,
                kl_estimator=estimator,
                entropy_coef=0.1,
                correction="tis",
            ),
            weights=row,
            old_log_probs=row,
            advantages=row,
            behaviour_log_probs=row,
            reference_log_probs=row,
            entropy=row,
            sequences=Sequences(_meta(LIVE, dtype=torch.int64), _meta(8, dtype=torch.float64)),
        )

    return launch


def _linear() -> Any:
    index, half = _meta(LIVE, dtype=torch.int64), torch.bfloat16
    hidden, weight = _meta(TOKENS, HIDDEN, dtype=half), _meta(PADDED, HIDDEN, dtype=half)
    return kernels.linear_statistics(hidden, weight, index, index, _meta(LIVE, 1), VOCABULARY, True)


HALF, WIDE = torch.bfloat16, torch.float32
CASES = {
    "statistics bf16": Case(_statistics(HALF), registers=(72, 64, 72), read=2),
    "statistics bf16, no entropy": Case(_statistics(HALF, with_entropy=False), registers=(64, 64, 64), read=2),
    "statistics fp32": Case(_statistics(WIDE), registers=(88, 96, 88), read=4),
    "gradient bf16, in place": Case(_gradient(HALF, HALF), registers=(128, 72, 72), read=2, written=2),
    "gradient bf16, no entropy": Case(
        _gradient(HALF, HALF, with_entropy=False), registers=(128, 96, 96), read=2, written=2
    ),
    "gradient bf16 over fp32": Case(_gradient(WIDE, HALF), registers=(128, 72, 72), read=4, written=2, barrier=True),
    "gradient fp32, in place": Case(_gradient(WIDE, WIDE), registers=(128, 72, 72), read=4, written=4),
    "combine": Case(lambda: kernels.combine(_meta(8, 4, LIVE), 3), registers=(40, 40, 40)),
    "merge": Case(lambda: kernels.merge(_meta(8, 4, LIVE), True), registers=(40, 40, 40)),
    "token_loss ppo": Case(_token_loss("ppo"), registers=(48, 48, 48)),
    "token_loss gspo": Case(_token_loss("gspo"), registers=(48, 48, 48)),
    "token_loss cispo, k2": Case(_token_loss("cispo", "k2"), registers=(48, 48, 48)),
    "token_loss nll": Case(_token_loss("nll"), registers=(48, 48, 48)),
    "linear_statistics bf16": Case(_linear, registers=(255, 255, 255), stack=8, product=True),
}


@dataclass(frozen=True)
class Report:
    """A kernel's row of the table, and what is wrong with it."""

    name: str
    arch: int
    cells: tuple[str, ...]
    faults: tuple[str, ...]


def report(name: str, arch: int) -> Report:
    """Compile one case for one architecture and compare it with what is agreed."""
    case = CASES[name]
    launch = recorded(case.launch)[0]
    code = compile_launch(launch, arch)
    per_column = launch.threads / launch.arguments["BLOCK"] if case.read else 0.0
    loop = code.row_loop
    cells = (
        str(code.registers),
        str(code.stack),
        str(max(code.widest("LDG"), code.widest("LDGSTS"))),
        str(code.widest("STG")),
        *_per_column(loop, per_column),
    )
    return Report(name, arch, cells, tuple(_faults(case, arch, code, loop, per_column)))


def _per_column(loop: Loop, share: float) -> list[str]:
    if not share:
        return ["", "", "", ""]
    counts = (loop.bytes_of("LDG"), loop.bytes_of("STG"), loop.count("MUFU.EX2"), len(loop.opcodes))
    return [f"{count * share:.3g}" for count in counts]


def _faults(case: Case, arch: int, code: MachineCode, loop: Loop, per_column: float) -> list[str]:
    spills = code.count("LDL") + code.count("STL")
    found = []
    agreed = case.registers[ARCHS.index(arch)]
    if code.registers > agreed:
        found.append(f"{code.registers} registers, at most {agreed} agreed")
    if code.stack > case.stack or (spills and not case.stack):
        found.append(f"spills: {code.stack} bytes of stack, {spills} LDL and STL")
    if case.read:
        moved = (loop.bytes_of("LDG") * per_column, loop.bytes_of("STG") * per_column)
        if moved != (case.read, case.written):
            found.append(f"{moved} bytes read and written per column, {(case.read, case.written)} agreed")
        narrow = _narrow(code.opcodes)
        if _narrow(loop.opcodes) or len(narrow) > SCALARS:
            found.append(f"accesses of less than 128 bits: {dict(Counter(narrow))}")
    if case.barrier and not loop.count("BAR.SYNC"):
        found.append("no barrier between the loads and the stores of a block")
    if case.product:
        if not any(code.count(name) for name in ("HMMA", "HGMMA", "UTCHMMA")):
            found.append("no tensor core instruction")
        if max(code.widest("LDG"), code.widest("LDGSTS")) < 128:
            found.append("tiles are loaded less than 128 bits at a time")
    return found


def _narrow(opcodes: Sequence[str]) -> list[str]:
    return [name for name in opcodes if name.startswith(("LDG", "STG")) and ".128" not in name]


def reports(names: Sequence[str], archs: Sequence[int], processes: int) -> list[Report]:
    """All combinations, in order."""
    pairs = [(name, arch) for name in names for arch in archs]
    if processes == 1:
        return [report(*pair) for pair in pairs]
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(report, *zip(*pairs, strict=True)))


HEAD = ("registers", "stack", "load bits", "store bits", "B read/col", "B written/col", "ex2/col", "instr/col")


def table(found: Sequence[Report]) -> str:
    """A Markdown table."""
    rows = [("kernel", "sm", *HEAD), ("---",) * (len(HEAD) + 2)]
    rows += [(one.name, str(one.arch), *one.cells) for one in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    )


def main() -> int:
    """Print the table; 1 when a kernel is not as agreed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, action="append", choices=ARCHS, help="compute capability; default: all")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    names = [name for name in CASES if arguments.only in name]
    if not names:
        parser.error(f"--only {arguments.only!r}: no kernel is called so; there are {', '.join(CASES)}")
    found = reports(names, arguments.arch or ARCHS, arguments.processes)
    print(table(found))
    faults = [f"{one.name}, sm_{one.arch}: {fault}" for one in found for fault in one.faults]
    for fault in faults:
        print(f"compile_kernels: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
