"""What machine code Triton makes of a kernel launch, without a GPU: compiling and counting; judging is elsewhere.

A launch is taken from the launcher itself, run on tensors without memory, so that what is compiled has the very types,
constants, alignment hints and options that a GPU would be given.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"

TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int8: "i8",
}

WARP = 32


@dataclass(frozen=True)
class Launch:
    """What a launcher asked Triton to run."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def threads(self) -> int:
        """Threads of one program."""
        return WARP * int(self.options.get("num_warps", 4))

    def source(self) -> ASTSource:
        """As Triton specialises it: types, constants, and which numbers are multiples of 16 (tensors always are)."""
        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        hints: dict[tuple[int], list[list[Any]]] = {}
        for place, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr:
                constants[(place,)] = value
                signature[parameter.name] = "constexpr"
                continue
            signature[parameter.name] = parameter.annotation_type or _type(value)
            if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                hints[(place,)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature=signature, constexprs=constants, attrs=hints)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def recorded(launcher: Callable[[], Any]) -> list[Launch]:
    """The launches that `launcher` makes; none of them runs."""
    launches: list[Launch] = []

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [parameter.name for parameter in kernel.params]
        arguments = dict(zip(names, args, strict=False)) | {name: kwargs.pop(name) for name in names if name in kwargs}
        launches.append(Launch(kernel, arguments, kwargs))

    run, JITFunction.run = JITFunction.run, record
    try:
        launcher()
    finally:
        JITFunction.run = run
    return launches


@dataclass(frozen=True)
class Loop:
    """Instructions between a backward branch and its target."""

    opcodes: tuple[str, ...]

    def bytes_of(self, access: str) -> int:
        """Bytes that one thread moves in one turn with LDG (loads) or STG (stores)."""
        return sum(width(opcode) for opcode in self.opcodes if opcode.startswith(access)) // 8

    def count(self, prefix: str) -> int:
        """Instructions whose name begins so."""
        return sum(opcode.startswith(prefix) for opcode in self.opcodes)


@dataclass(frozen=True)
class MachineCode:
    """What was found in a cubin."""

    registers: int
    stack: int
    opcodes: tuple[str, ...]
    loops: tuple[Loop, ...]

    def count(self, prefix: str) -> int:
        """Instructions whose name begins so."""
        return sum(opcode.startswith(prefix) for opcode in self.opcodes)

    def widest(self, access: str) -> int:
        """Bits of the widest access: LDG (loads to registers), STG (stores), LDGSTS (loads to shared memory)."""
        return max((width(opcode) for opcode in self.opcodes if opcode.split(".")[0] == access), default=0)

    @property
    def row_loop(self) -> Loop:
        """The first of the loops with the most exponentials: the one over whole blocks of columns."""
        loops = sorted(self.loops, key=lambda loop: loop.count("MUFU.EX2"), reverse=True)
        return loops[0] if loops else Loop(())


def compile_launch(launch: Launch, arch: int) -> MachineCode:
    """Compile for compute capability `arch` (90 is Hopper) and take the result apart.

    Raises:
        RuntimeError: kernels were defined in the interpreter (TRITON_INTERPRET=1), which has no machine code.
    """
    if not isinstance(launch.kernel, JITFunction):
        raise RuntimeError("TRITON_INTERPRET=1 is set, so there is nothing to compile; unset it")
    made = triton.compile(launch.source(), target=GPUTarget("cuda", arch, WARP), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        dump = subprocess.run(
            [CUOBJDUMP, "-res-usage", "-sass", file.name], capture_output=True, text=True, check=True, timeout=300
        )
    return parse(dump.stdout)


def parse(dump: str) -> MachineCode:
    """The output of `cuobjdump -res-usage -sass` of one kernel."""
    usage = re.search(r"REG:(\d+) STACK:(\d+)", dump)
    assert usage, dump[:500]
    lines = [(int(address, 16), text) for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/ +([A-Z@!][^;]*);", dump)]
    opcodes = {address: re.sub(r"^@!?U?P\w+ +", "", text).split()[0] for address, text in lines}
    loops = []
    for address, text in lines:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < address:
            inside = tuple(opcode for at, opcode in opcodes.items() if int(target[1], 16) <= at <= address)
            loops.append(Loop(inside))
    return MachineCode(int(usage[1]), int(usage[2]), tuple(opcodes.values()), tuple(loops))


def width(opcode: str) -> int:
    """Bits that a load or store moves: LDG.E.128 moves 128, LDG.E.U16 16, LDG.E 32."""
    named = re.search(r"\.[US]?(8|16|64|128|256)\b", opcode)
    return int(named[1]) if named else 32
