"""What all launches share: block sizes, and what differs under Triton's interpreter; no kernel is launched here."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

MOST_NEGATIVE = tl.constexpr(-1e20)
"""As in `vocab_statistics`: the maximum of an empty or all -inf slice, and what stands for log 0 where it is multiplied
by 0."""

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in Triton's interpreter; decided when they are defined."""

MAX_COLUMNS = 8192
"""Columns that a program holds in registers at once: 32 a thread, in loads of 128 bits. Tests make it small, so that
short rows take several blocks too."""

ROWS = 128
"""Rows of one program in kernels that touch a few numbers a row."""


def columns_block(columns: int) -> int:
    """Power of two, at least 16, that covers `columns` or is MAX_COLUMNS."""
    return int(min(MAX_COLUMNS, triton.next_power_of_2(max(columns, 16))))


def warps(block: int) -> int:
    """Warps for a block of columns: 32 columns a thread, 1 to 8 warps."""
    return max(1, min(8, block // 1024))


def emulates_rounding(dtype: torch.dtype) -> bool:
    """The interpreter truncates when it stores float32 as bfloat16; a GPU rounds to nearest even."""
    return bool(INTERPRETED.value) and dtype == torch.bfloat16


def or_any(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A pointer for an argument that the kernel does not read."""
    return stand_in if tensor is None else tensor


@triton.jit
def exp2(x):
    """2^x, one instruction on a GPU: libdevice's flushes denormals to 0, `tl.exp2` spends three more on them."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return libdevice.exp2(x)


@triton.jit
def rounded(x, EMULATE: tl.constexpr):
    """x float32, to be stored in a narrower type. EMULATE: round to nearest even on the bits, so that cutting off the
    low half, which is what the interpreter then does, gives the bfloat16 that a GPU stores."""
    if EMULATE:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x
