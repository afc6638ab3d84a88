"""Machine code of the Triton kernels, made without a GPU, against what is agreed in tools/compile_kernels.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.machine_code import parse, width

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_kernel_compiles_to_what_is_agreed(arch: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tools.compile_kernels", "--arch", str(arch)],
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr


DUMP = """
 Function kernel:
  REG:40 STACK:16 SHARED:0 LOCAL:0
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/               @P0 LDG.E.128 R8, desc[UR4][R2.64+0x10] ;
        /*0030*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0040*/                   MUFU.EX2 R9, R9 ;
        /*0050*/              @!P1 STG.E.U16 desc[UR4][R2.64], R4 ;
        /*0060*/               @P2 BRA 0x10 ;
        /*0070*/                   STL [R1], R4 ;
        /*0080*/                   EXIT ;
        /*0090*/                   BRA 0x90;
"""


def test_loops_and_widths_are_read_from_the_instructions() -> None:
    code = parse(DUMP)
    assert (code.registers, code.stack) == (40, 16)
    assert (code.widest("LDG"), code.widest("STG"), code.count("STL")) == (128, 16, 1)
    (loop,) = code.loops
    assert (loop.bytes_of("LDG"), loop.bytes_of("STG"), loop.count("BAR.SYNC"), len(loop.opcodes)) == (32, 2, 1, 6)


@pytest.mark.parametrize(
    ("opcode", "bits"),
    [("LDG.E", 32), ("LDG.E.64", 64), ("STG.E.U16", 16), ("LDG.E.U8", 8), ("LDGSTS.E.BYPASS.128", 128)],
)
def test_the_width_of_an_access_stands_in_its_name(opcode: str, bits: int) -> None:
    assert width(opcode) == bits
