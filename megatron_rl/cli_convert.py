"""The verbs `megatron-rl convert ...`: what they take and print; what they do is in `weights.convert` and `verify`.

Nothing heavy is imported before a verb runs.
"""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from megatron_rl.cli_convert_run import describe, execute, progress
from megatron_rl.config import ConfigError
from megatron_rl.weights.convert.hub import local_path

if TYPE_CHECKING:
    from megatron_rl.weights.convert.actions import Conversion

app = typer.Typer(
    help="Convert and compare checkpoints on a CPU, in bounded memory: Hugging Face and Megatron's torch_dist.",
    no_args_is_help=True,
)
_out = Console(markup=False, highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)


def _absent(name: str) -> Path:
    from megatron_rl.weights.convert.journal import check_out

    check_out(Path(name))
    return Path(name)


Source = Annotated[
    Path,
    typer.Argument(
        help="Hugging Face directory or hf://ORGANISATION/MODEL[@REVISION], or Megatron checkpoint.",
        metavar="SRC",
        parser=local_path,
    ),
]
# Eager: looked at before a source is fetched or opened.
Target = Annotated[
    Path,
    typer.Argument(help="Directory to write; it must not exist.", metavar="DST", parser=_absent, is_eager=True),
]
HfDir = Annotated[
    Path | None,
    typer.Option(
        "--hf",
        help="config.json and tokenizer of a Megatron checkpoint that has none beside it.",
        parser=local_path,
        metavar="DIR",
    ),
]
Memory = Annotated[str, typer.Option("--max-memory", help="Memory for tensors, such as 512MiB or 8GiB.")]
AllowNan = Annotated[bool, typer.Option("--allow-nan", help="Go on past NaN and infinity; the tensors are listed.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be written and how long it takes; write nothing.")
]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="With --dry-run: share the work among so many ranks.")]
Speed = Annotated[
    float | None,
    typer.Option(
        "--gb-per-s", min=1e-3, max=1e6, help="With --dry-run: of each rank; default: measured with a small part."
    ),
]
ShardSize = Annotated[str, typer.Option("--shard-size", help="Largest safetensors file.")]
OutDtype = Annotated[
    str | None,
    typer.Option("--dtype", help="float32, bfloat16 or float16 (fp32, bf16, fp16); default: as they are."),
]
Tp = Annotated[int, typer.Option("--tp", min=1, help="Cut for so many tensor-parallel ranks.")]
Pp = Annotated[int, typer.Option("--pp", min=1, help="One file at least for each of so many pipeline stages.")]
Vpp = Annotated[int | None, typer.Option("--vpp", min=2, help="Model chunks of each pipeline stage (interleaved).")]
First = Annotated[int | None, typer.Option("--first-stage-layers", min=1, help="Default: as many as other stages.")]
Last = Annotated[int | None, typer.Option("--last-stage-layers", min=1, help="Default: as many as other stages.")]
Ep = Annotated[int, typer.Option("--ep", min=1, help="Files for so many expert-parallel ranks.")]
Etp = Annotated[int, typer.Option("--etp", min=1, help="Cut experts for so many expert-tensor-parallel ranks.")]


@app.command("hf-to-megatron")
def hf_to_megatron(
    source: Source,
    out: Target,
    tp: Tp = 1,
    pp: Pp = 1,
    vpp: Vpp = None,
    first: First = None,
    last: Last = None,
    ep: Ep = 1,
    etp: Etp = 1,
    vocab_multiple: Annotated[
        int, typer.Option("--make-vocab-size-divisible-by", min=1, help="As in Megatron; times --tp.")
    ] = 128,
    dtype: OutDtype = None,
    max_memory: Memory = "8GiB",
    allow_nan: AllowNan = False,
    dry_run: DryRun = False,
    ranks: Ranks = 1,
    gb_per_s: Speed = None,
) -> None:
    """Write a Hugging Face model as a Megatron checkpoint (torch_dist), which any layout can load.

    Example: megatron-rl convert hf-to-megatron models/Qwen3-4B megatron/Qwen3-4B --tp 2
    """
    from megatron_rl.weights.convert import actions
    from megatron_rl.weights.convert.cuts import TargetLayout
    from megatron_rl.weights.convert.opened import open_checkpoint

    opened = open_checkpoint(source, weights_may_be_absent=dry_run)
    layout = TargetLayout(tp, pp, vocab_multiple, vpp, first, last, ep, etp)
    plan = actions.hf_to_megatron(opened, out, layout, _dtype(dtype))
    _do(plan, max_memory, allow_nan, dry_run, ranks, gb_per_s)


@app.command("megatron-to-hf")
def megatron_to_hf(
    source: Source,
    out: Target,
    hf: HfDir = None,
    dtype: OutDtype = None,
    shard_size: ShardSize = "5GB",
    max_memory: Memory = "8GiB",
    allow_nan: AllowNan = False,
    dry_run: DryRun = False,
    ranks: Ranks = 1,
    gb_per_s: Speed = None,
) -> None:
    """Write the weights of a Megatron checkpoint, of a run or converted, as a Hugging Face directory.

    Example: megatron-rl convert megatron-to-hf RUN/checkpoints/step-000020 out/hf --hf models/Qwen3-4B
    """
    from megatron_rl.weights.convert import actions
    from megatron_rl.weights.convert.opened import open_checkpoint

    plan = actions.megatron_to_hf(open_checkpoint(source, hf), out, _dtype(dtype), _bytes(shard_size, "--shard-size"))
    _do(plan, max_memory, allow_nan, dry_run, ranks, gb_per_s)


@app.command()
def cast(
    source: Source,
    out: Target,
    dtype: Annotated[
        str,
        typer.Option("--dtype", help="float32, bfloat16, float16 (fp32, bf16, fp16), or fp8: in blocks with scales."),
    ],
    shard_size: ShardSize = "5GB",
    max_memory: Memory = "8GiB",
    allow_nan: AllowNan = False,
    dry_run: DryRun = False,
    ranks: Ranks = 1,
    gb_per_s: Speed = None,
) -> None:
    """Write the same checkpoint in another number format; an optimizer's state keeps its own.

    With fp8, matrices of layers are written in blocks of 128 x 128 with scales, as DeepSeek-V3's are.

    Example: megatron-rl convert cast models/DeepSeek-V3 models/DeepSeek-V3-bf16 --dtype bf16
    """
    from megatron_rl.weights.convert import actions
    from megatron_rl.weights.convert.opened import open_checkpoint

    wanted = _dtype(dtype, fp8_too=True)
    assert wanted is not None
    plan = actions.cast(open_checkpoint(source), out, wanted, _bytes(shard_size, "--shard-size"))
    _do(plan, max_memory, allow_nan, dry_run, ranks, gb_per_s)


@app.command()
def average(
    sources: Annotated[
        list[Path], typer.Argument(help="Checkpoints of one model, of either format.", metavar="SRC...")
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", help="Hugging Face directory to write; it must not exist.", parser=_absent, is_eager=True
        ),
    ],
    weights: Annotated[
        list[float] | None, typer.Option("--weight", help="One for each SRC, in order; default: all equal.")
    ] = None,
    hf: HfDir = None,
    shard_size: ShardSize = "5GB",
    max_memory: Memory = "8GiB",
    allow_nan: AllowNan = False,
    dry_run: DryRun = False,
    ranks: Ranks = 1,
    gb_per_s: Speed = None,
) -> None:
    """Write the weighted mean of several checkpoints as a Hugging Face directory.

    Example: megatron-rl convert average run/step-000100 run/step-000110 --hf models/Qwen3-4B --out out/mean
    """
    from megatron_rl.weights.convert import actions
    from megatron_rl.weights.convert.opened import open_checkpoint

    opened = [open_checkpoint(source, hf) for source in sources]
    shares = weights or [1.0] * len(opened)
    plan = actions.average(opened, shares, out, _bytes(shard_size, "--shard-size"))
    _do(plan, max_memory, allow_nan, dry_run, ranks, gb_per_s)


@app.command()
def reshard(
    source: Source,
    out: Target,
    tp: Tp = 1,
    pp: Pp = 1,
    vpp: Vpp = None,
    first: First = None,
    last: Last = None,
    ep: Ep = 1,
    etp: Etp = 1,
    max_memory: Memory = "8GiB",
    allow_nan: AllowNan = False,
    dry_run: DryRun = False,
    ranks: Ranks = 1,
    gb_per_s: Speed = None,
) -> None:
    """Rewrite a Megatron checkpoint, optimizer state included, so that ranks of another layout read whole chunks.

    It is never needed to load one: torch_dist knows no layout.
    """
    from megatron_rl.weights.convert import actions
    from megatron_rl.weights.convert.cuts import TargetLayout
    from megatron_rl.weights.convert.opened import open_checkpoint

    plan = actions.reshard(open_checkpoint(source), out, TargetLayout(tp, pp, 1, vpp, first, last, ep, etp))
    _do(plan, max_memory, allow_nan, dry_run, ranks, gb_per_s)


@app.command()
def inspect(source: Source) -> None:
    """List a checkpoint's tensors: shape, dtype, bytes, and how they are cut. Reads headers only."""
    from megatron_rl.weights.convert.listing import describe
    from megatron_rl.weights.convert.opened import open_checkpoint

    tensors, summary = describe(open_checkpoint(source))
    table = _table("tensor", "shape", "dtype", "bytes", "stored as")
    for row in tensors:
        table.add_row(row.name, str(list(row.shape)), row.dtype, f"{row.size:,}", row.cut)
    _out.print(table)
    for line in summary:
        _out.print(line)


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(metavar="A")],
    second: Annotated[Path, typer.Argument(metavar="B")],
    hf: HfDir = None,
    limit: Annotated[
        int,
        typer.Option(
            min=1, help="Print so many of the largest differences, and of the tensors that one side alone has."
        ),
    ] = 20,
) -> None:
    """Compare two checkpoints number by number, across formats and layouts. Ends with 1 when they differ."""
    from megatron_rl.weights.convert.compare import compare, total_size
    from megatron_rl.weights.convert.opened import open_checkpoint

    opened = [open_checkpoint(path) for path in (first, second)]
    beside = hf or next((side.companions for side in opened if side.companions is not None), None)
    left, right = (replace(side, companions=side.companions or beside) for side in opened)
    with progress("compare", total_size(left, right)) as advance:
        found = compare(left, right, advance)
    table = _table("tensor", "max abs", "max rel", "")
    differing = [row for row in found.differences if row.max_abs or row.note]
    for row in differing[:limit]:
        table.add_row(row.name, f"{row.max_abs:.3e}", f"{row.max_rel:.3e}", row.note)
    if differing:
        _out.print(table)
    for side, names in ((first, found.only_first), (second, found.only_second)):
        for name in names[:limit]:
            _out.print(f"only in {side}: {name}")
        if (more := len(names) - limit) > 0:
            _out.print(f"... and {more} more only in {side}")
    unequal = sum(row.max_abs > 0 for row in found.differences)
    _out.print(f"{len(found.differences)} tensors compared: {unequal} differ")
    raise typer.Exit(0 if found.is_equal else 1)


@app.command()
def verify(
    source: Source,
    hf: Annotated[
        Path | None, typer.Option("--hf", help="Hugging Face directory to compare with; default: SRC itself.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="File with one text a line; default: a few built-in sentences.")
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Largest difference of two log-probs.")] = 1e-4,
) -> None:
    """Compare the log-probs of Megatron with these weights and of transformers, in fp32; holds both models in memory.

    Where they differ, the first layer that deviates is named. Ends with 1 when they differ.

    Example: megatron-rl convert verify megatron/Qwen3-0.6B --hf models/Qwen3-0.6B
    """
    from megatron_rl.verify import SENTENCES, read_texts, verify_log_probs

    texts = SENTENCES if prompts is None else read_texts(prompts)
    warnings.simplefilter("ignore")  # Megatron's, about what is not installed here
    found = verify_log_probs(source, hf or source, texts, tolerance)
    gap = f"largest difference {found.max_abs:.2e}, mean {found.mean_abs:.2e}"
    _out.print(f"{found.texts} texts, {found.tokens} log-probs: {gap}")
    if found.first_deviation is not None:
        _out.print(f"first deviation: {found.first_deviation}")
    _out.print("equal" if found.is_equal else f"NOT equal: more than {tolerance:g} apart")
    raise typer.Exit(0 if found.is_equal else 1)


# ------------------------------------------------------------------------------------------------------------- helpers


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
    return table


def _do(plan: Conversion, max_memory: str, allow_nan: bool, dry_run: bool, ranks: int, gb_per_s: float | None) -> None:
    from megatron_rl.weights.convert.job import LEAST_MEMORY, check_space
    from megatron_rl.weights.reader import some_names

    if _bytes(max_memory, "--max-memory") < LEAST_MEMORY:
        raise ConfigError(f"--max-memory={max_memory}: at least {LEAST_MEMORY // 2**20} MiB are needed")
    if plan.left_out:
        _out.print(f"left out, since Megatron's model here has no such part: {some_names(set(plan.left_out))}")
    if dry_run:
        with_weights = any(plan.identity["sources"])
        if with_weights:
            check_space(plan.out, plan.size)
        for line in describe(plan, ranks, gb_per_s):
            _out.print(line)
        if not with_weights:
            _out.print("the weights are not there: planned from config.json alone")
        _out.print(f"dry run: {plan.size:,} bytes of tensors would be written to {plan.out}; nothing was")
        return
    done = execute(plan, allow_nan)
    if done is None:
        return
    for name in done.not_finite:
        _out.print(f"not finite: {name}")
    kept = f" ({done.kept:,} bytes were there from an interrupted call)" if done.kept else ""
    _out.print(f"{plan.out}: {plan.size:,} bytes of tensors in {len(plan.target.files)} files{kept}")


_SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?) ?([KMGT]i?)?B?", re.I)


def _bytes(text: str, key: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{key}={text}: not a size; write 512MiB, 8GiB or 5GB")
    unit = (match[2] or "").lower()
    power = "kmgt".index(unit[0]) + 1 if unit else 0
    return int(float(match[1]) * (1024 if unit.endswith("i") else 1000) ** power)


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _dtype(name: str | None, fp8_too: bool = False) -> Any:
    import torch

    from megatron_rl.weights import fp8

    if name is None:
        return None
    found = _DTYPES.get(name, name)
    if found in _DTYPES.values():
        return getattr(torch, found)
    if found == "fp8" and fp8_too:
        return fp8.FP8
    known = ", ".join(f"{long} ({short})" for short, long in _DTYPES.items())
    raise ConfigError(f"--dtype={name}: one of {known}" + (", fp8" if fp8_too else "; fp8 is for `convert cast`"))
