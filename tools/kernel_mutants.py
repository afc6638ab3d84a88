"""The ways in which `tools.mutate_kernels` breaks each Triton kernel, one small change of its source each; no code.

A change must alter what the kernel does: computing the same by other means is not a fault.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old`, which occurs in the kernel's file (the first time counts), becomes `new`."""

    what: str
    old: str
    new: str
    compiled: bool = False
    """Found by the compile check: the interpreter cannot see it."""


@dataclass(frozen=True)
class Kernel:
    """A kernel's file, the checks that know it, and how to break it."""

    file: str
    checks: tuple[str, ...]
    mutants: tuple[Mutant, ...]


STATISTICS = (
    Mutant("old sum not rescaled to the new maximum", "s * shrink + tl.sum(e, axis=1)", "s + tl.sum(e, axis=1)"),
    Mutant("old u not rescaled", "(u + s * moved) * shrink", "u + s * moved"),
    Mutant("old u not moved to the new maximum", "(u + s * moved) * shrink", "u * shrink"),
    Mutant(
        "maximum of the last block alone", "larger = tl.maximum(m, tl.max(x, axis=1))", "larger = tl.max(x, axis=1)"
    ),
    Mutant("0 * -inf in u", "tl.maximum(z, MOST_NEGATIVE), axis=1)", "z, axis=1)"),
    Mutant("temperature left out of the exponent", "LOG2_E, tl.float32) * inverse", "LOG2_E, tl.float32)"),
    Mutant("temperature left out of the maximum", "tl.store(stats + i, top * inverse)", "tl.store(stats + i, top)"),
    Mutant("temperature left out of the target", "stats + 2 * n + i, y * inverse", "stats + 2 * n + i, y"),
    Mutant("wrong base of the exponential", "e = exp2(z)", "e = tl.exp(z)"),
    Mutant("u left in units of log2", "* factor, axis=0) * LN_2)", "* factor, axis=0))"),
    Mutant(
        "padding counted", 'tl.where(columns < valid, x, float("-inf"))', 'tl.where(columns < width, x, float("-inf"))'
    ),
    Mutant("last column lost", "tl.where(columns < valid, x", "tl.where(columns < valid - 1, x"),
    Mutant("last block not read", "if whole < valid:", "if whole > valid:"),
    Mutant("first block not read", "for start in range(0, whole, BLOCK)", "for start in range(BLOCK, whole, BLOCK)"),
    Mutant(
        "read behind the row",
        "mask=columns < width, other=0.0).to(tl.float32)\n        m, s",
        "mask=columns < width + BLOCK, other=0.0).to(tl.float32)\n        m, s",
    ),
    Mutant("row number for live number", "row = tl.load(index + i)", "row = row"),
    Mutant(
        "row offset in 32 bits",
        "base = logits + row * row_stride",
        "base = logits + row.to(tl.int32) * row_stride.to(tl.int32)",
    ),
    Mutant("target of another slice taken", "owned = (local >= 0) & (local < valid)", "owned = local >= 0"),
    Mutant("negative target taken", "owned = (local >= 0) & (local < valid)", "owned = local < valid"),
    Mutant("partial sums not brought to one maximum", "tl.sum(s * factor, axis=0)", "tl.sum(s, axis=0)"),
    Mutant("partial u not moved", "(u + s * moved) * factor, axis=0", "u * factor, axis=0"),
    Mutant(
        "columns swapped for rows of the tile", "tl.arange(0, LANES)[:, None] * VECTOR", "tl.arange(0, LANES)[:, None]"
    ),
    Mutant(
        "whole blocks masked by the true vocabulary",
        "tl.load(base + start + tile)",
        "tl.load(base + start + tile, mask=tile < valid - start, other=0.0)",
        compiled=True,
    ),
    Mutant(
        "last block masked by the true vocabulary",
        "mask=columns < width, other=0.0).to(tl.float32)\n        m, s",
        "mask=columns < valid, other=0.0).to(tl.float32)\n        m, s",
        compiled=True,
    ),
)

MERGE = (
    Mutant(
        "maximum of the last part",
        "m = tl.maximum(m, tl.load(stats + part * 4 * n + i, mask=ok, other=0.0))",
        "m = tl.load(stats + part * 4 * n + i, mask=ok, other=0.0)",
    ),
    Mutant(
        "first part left out of the maximum",
        "for part in range(parts):\n        m =",
        "for part in range(1, parts):\n        m =",
    ),
    Mutant(
        "first part left out of the sums",
        "for part in range(parts):\n        at",
        "for part in range(1, parts):\n        at",
    ),
    Mutant("sums not rescaled", "s += mine * factor", "s += mine"),
    Mutant("u not rescaled", "+ mine * offset) * factor", "+ mine * offset)"),
    Mutant(
        "u not moved",
        "(tl.load(at + 3 * n, mask=ok, other=0.0) + mine * offset) * factor",
        "tl.load(at + 3 * n, mask=ok, other=0.0) * factor",
    ),
    Mutant("target of the last part alone", "y += tl.load", "y = tl.load"),
    Mutant("parts overlap", "at = stats + part * 4 * n + i", "at = stats + part * 3 * n + i"),
    Mutant("sum left out of the log-prob", "(y - m) - log_sum, mask=ok", "(y - m), mask=ok"),
    Mutant("maximum left out of the log-prob", "(y - m) - log_sum, mask=ok", "y - log_sum, mask=ok"),
    Mutant("normaliser beside the common maximum", "log_sum - (mine - m), mask=ok", "log_sum, mask=ok"),
    Mutant("maximum of rank 0 for that of this rank", "stats + rank * 4 * n + i", "stats + i"),
    Mutant("entropy not normalised", "log_sum - u / s, mask=ok", "log_sum - u, mask=ok"),
    Mutant("entropy of the wrong sign", "log_sum - u / s, mask=ok", "u / s - log_sum, mask=ok"),
    Mutant("merged u without entropy", "u if WITH_ENTROPY else tl.zeros(i.shape, tl.float32)", "u"),
    Mutant(
        "rows behind the last written",
        "tl.store(entropy + i, log_sum - u / s, mask=ok)",
        "tl.store(entropy + i, log_sum - u / s)",
    ),
    Mutant(
        "programs overlap",
        "i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)",
        "i = (tl.program_id(0) + tl.arange(0, ROWS)).to(tl.int64)",
    ),
)

GRADIENT = (
    Mutant("target left out", "tl.where(is_target, g, 0.0) - exp2", "0.0 - exp2"),
    Mutant("target of the wrong sign", "tl.where(is_target, g, 0.0) - exp2", "tl.where(is_target, -g, 0.0) - exp2"),
    Mutant("probabilities of the wrong sign", "0.0) - exp2(log_p) * d", "0.0) + exp2(log_p) * d"),
    Mutant(
        "entropy left out of its own gradient",
        "(tl.maximum(log_p, MOST_NEGATIVE) + average)",
        "tl.maximum(log_p, MOST_NEGATIVE)",
    ),
    Mutant("0 * -inf", "tl.maximum(log_p, MOST_NEGATIVE) + average", "log_p + average"),
    Mutant("entropy gradient in units of log2", "h *= inverse * LN_2", "h *= inverse"),
    Mutant("temperature left out of the gradient", "g *= inverse\n", "g *= 1.0\n"),
    Mutant("temperature left out of the exponent", "scale = inverse * LOG2_E", "scale = 1.0 * LOG2_E"),
    Mutant("scaled maximum for the raw one", "m = tl.load(maximum + i) / inverse", "m = tl.load(maximum + i)"),
    Mutant("normaliser of another base", "norm = tl.load(log_norm + i) * LOG2_E", "norm = tl.load(log_norm + i)"),
    Mutant("padding gets a gradient", 'x = tl.where(columns < valid, x, float("-inf"))', "x = x"),
    Mutant("last true column gets none", "tl.where(columns < valid, x", "tl.where(columns < valid - 1, x"),
    Mutant("masked rows not zeroed", "_write_zeros(to, width, BLOCK)\n        return", "return"),
    Mutant(
        "zeros in the first block alone",
        "for start in range(0, width, BLOCK):\n        columns = start + tl.arange",
        "for start in range(0, BLOCK, BLOCK):\n        columns = start + tl.arange",
    ),
    Mutant("rows without gradient read", "(g == 0.0) & (h == 0.0)", "(g == 0.0) & (h == 1.0)"),
    Mutant("one zero gradient is enough to stop", "(g == 0.0) & (h == 0.0)", "(g == 0.0) | (h == 0.0)"),
    Mutant("live number for row number", "tl.load(position + row) if HAS_POSITION else row", "row"),
    Mutant(
        "row offset in 32 bits",
        "base = logits + row * row_stride",
        "base = logits + row.to(tl.int32) * row_stride.to(tl.int32)",
    ),
    Mutant("stride of the logits for that of the result", "to = out + row * out_stride", "to = out + row * row_stride"),
    Mutant(
        "written behind the row",
        "out.dtype.element_ty), mask=columns < width)",
        "out.dtype.element_ty), mask=columns < width + BLOCK)",
    ),
    Mutant(
        "read behind the row", "tl.load(base + columns, mask=columns < width, other=0.0)", "tl.load(base + columns)"
    ),
    Mutant(
        "columns behind the vocabulary not written",
        "for start in range(whole, width, BLOCK)",
        "for start in range(whole, valid, BLOCK)",
    ),
    Mutant(
        "a masked row's gradient read from the row before",
        "mask=i >= 0, other=0.0) if HAS_GRAD",
        "mask=i >= -1, other=0.0) if HAS_GRAD",
    ),
    Mutant("no barrier before the logits are written over", "tl.debug_barrier()", "pass", compiled=True),
    Mutant(
        "stores masked by the true vocabulary in every block",
        "rounded(d, EMULATE_ROUNDING).to(out.dtype.element_ty))",
        "rounded(d, EMULATE_ROUNDING).to(out.dtype.element_ty), mask=columns < valid)",
        compiled=True,
    ),
)

TOKEN_LOSS = (
    Mutant("no upper clip", "above = (a > 0.0) & (ratio > high)", "above = (a > 0.0) & (ratio > 1e30)"),
    Mutant("upper clip whatever the advantage", "above = (a > 0.0) & (ratio > high)", "above = ratio > high"),
    Mutant("lower clip whatever the advantage", "below = (a < 0.0) & (ratio < low)", "below = ratio < low"),
    Mutant("clipped tokens keep their gradient", "tl.where(flag == _FREE, -d_ratio * a, 0.0)", "-d_ratio * a"),
    Mutant("dual clip for good advantages too", "far = (a < 0.0) & (ratio > dual)", "far = ratio > dual"),
    Mutant("dual clip without flag", "flag = tl.where(far, _DUAL, flag)", "flag = flag"),
    Mutant("loss of the wrong sign", "return -bounded * a,", "return bounded * a,"),
    Mutant(
        "flags swapped",
        "tl.where(above, _HIGH, tl.where(below, _LOW, _FREE))\n    bounded",
        "tl.where(above, _LOW, tl.where(below, _HIGH, _FREE))\n    bounded",
    ),
    Mutant(
        "exponent not bounded above",
        "tl.where(x > _LIMIT, _LIMIT, tl.where(x < -_LIMIT, -_LIMIT, x))\n    value",
        "tl.where(x < -_LIMIT, -_LIMIT, x)\n    value",
    ),
    Mutant("gradient where the bound on the exponent acts", "tl.where(bounded == x, value, 0.0)", "value"),
    Mutant("k2 not halved", "0.5 * d * d", "d * d"),
    Mutant("k3 of the wrong sign", "value = ratio - 1.0 -", "value = ratio - 1.0 +"),
    Mutant(
        "k3 grows beyond its bound",
        "ratio - 1.0 - tl.where(d > _LIMIT, _LIMIT, tl.where(d < -_LIMIT, -_LIMIT, d))",
        "ratio - 1.0 - d",
    ),
    Mutant(
        "k3 with gradient beyond its bound", "slope = tl.where(d_ratio == 0.0, 0.0, 1.0 - ratio)", "slope = 1.0 - ratio"
    ),
    Mutant("unbiased k3 without the gradient of its ratio", "slope += value * d_w", "slope += value * 0.0"),
    Mutant(
        "k2 with the gradient of its ratio",
        'if ESTIMATOR == "k3":\n            slope',
        'if ESTIMATOR != "k1":\n            slope',
    ),
    Mutant("biased KL", "value = value * w\n", "value = value\n"),
    Mutant("KL without coefficient", "value += kl_coef * kl", "value += kl"),
    Mutant("KL gradient left out", "slope += kl_coef * d_kl", "slope += 0.0 * d_kl"),
    Mutant("correction left out of the loss", "value *= f", "value *= 1.0"),
    Mutant("correction left out of the gradient", "slope *= f", "slope *= 1.0"),
    Mutant("entropy of the wrong sign", "value -= entropy_coef", "value += entropy_coef"),
    Mutant("entropy gradient without weight", "(-entropy_coef * w)", "(-entropy_coef + 0.0 * w)"),
    Mutant("weight left out of the gradient", "tl.where(w != 0.0, w * slope, 0.0)", "tl.where(w != 0.0, slope, 0.0)"),
    Mutant(
        "token ratio for the sequence's",
        "_safe_exp(tl.load(sequence_log_ratio + t, mask=ok, other=0.0))",
        "_safe_exp(logp - old)",
    ),
    Mutant(
        "cispo: clipped tokens lose their gradient",
        "tl.where(ratio > high, high, tl.where(ratio < low, low, ratio)) * a",
        "tl.where(ratio > high, 0.0, tl.where(ratio < low, low, ratio)) * a",
    ),
    Mutant(
        "cispo: ratio not clipped below",
        "tl.where(ratio < low, low, ratio)) * a",
        "tl.where(ratio < low, ratio, ratio)) * a",
    ),
    Mutant("cispo: loss without the log-prob", "return slope * logp, slope, flag", "return slope, slope, flag"),
    Mutant("nll of the wrong sign", "return -logp, tl.full", "return logp, tl.full"),
    Mutant(
        "programs overlap",
        "t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)",
        "t = tl.program_id(0) + tl.arange(0, ROWS)",
    ),
)

LINEAR = (
    Mutant(
        "temperature left out of the exponent", "inverse * LOG2_E, WITH_ENTROPY", "inverse * 0.0 + LOG2_E, WITH_ENTROPY"
    ),
    Mutant("temperature left out of the maximum", "tl.store(at, m * inverse", "tl.store(at, m"),
    Mutant("temperature left out of the target", "y * inverse, mask=ok", "y, mask=ok"),
    Mutant("u left in units of log2", "u * LN_2, mask=ok", "u, mask=ok"),
    Mutant("padding counted", 'x = tl.where(inside[None, :], x, float("-inf"))', "x = x"),
    Mutant(
        "a column behind the last taken for the target",
        "(columns[None, :] == local[:, None]) & inside[None, :], x, 0.0)",
        'columns[None, :] == local[:, None], tl.where(inside[None, :], x, float("-inf")), 0.0)',
    ),
    Mutant("target of the last tile alone", "y += tl.sum", "y = tl.sum"),
    Mutant(
        "splits overlap",
        "first = tl.program_id(1) * columns_per_split",
        "first = tl.program_id(1) * columns_per_split // 2",
    ),
    Mutant("splits run to the end", "last = tl.minimum(first + columns_per_split, valid)", "last = valid"),
    Mutant("statistics of all splits in one place", "stats + tl.program_id(1).to(tl.int64) * 4 * n + i", "stats + i"),
    Mutant("row number for live number", "rows = tl.load(index + i, mask=ok, other=0)", "rows = i.to(tl.int64)"),
    Mutant("depth read beyond its end", "mask=row_ok[:, None] & inside", "mask=row_ok[:, None]"),
    Mutant("last step of the depth lost", "range(0, depth, DEPTH)", "range(0, depth - DEPTH + 1, DEPTH)"),
    Mutant(
        "product starts anew at each step",
        "tl.dot(h, tl.trans(w), logits, input",
        "tl.dot(h, tl.trans(w), logits * 0.0, input",
    ),
    Mutant("rows behind the last written", "tl.store(at + 3 * n, u * LN_2, mask=ok)", "tl.store(at + 3 * n, u * LN_2)"),
    Mutant(
        "rows of another program",
        "i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)",
        "i = tl.program_id(0) + tl.arange(0, ROWS)",
    ),
    Mutant("tiles so wide that they spill", "TILE = (128, 128, 64)", "TILE = (128, 256, 64)", compiled=True),
)

ROUNDING = (
    Mutant("bfloat16 truncated", "0x7FFF + ((bits >> 16) & 1)", "0"),
    Mutant("bfloat16 rounded away from zero", "0x7FFF + ((bits >> 16) & 1)", "0xFFFF"),
    Mutant(
        "a number for what is none",
        "tl.where(x == x, bits.to(tl.float32, bitcast=True), x)",
        "tl.where(x == x, bits.to(tl.float32, bitcast=True), 0.0)",
    ),
)

FOLDER = "megatron_rl/kernels/triton"
KERNELS = {
    "statistics": Kernel(f"{FOLDER}/statistics.py", ("check_statistics.py",), STATISTICS),
    "combine": Kernel(f"{FOLDER}/statistics.py", ("check_combine.py", "check_linear.py"), MERGE),
    "gradient": Kernel(f"{FOLDER}/gradient.py", ("check_gradient.py",), GRADIENT),
    "token_loss": Kernel(f"{FOLDER}/token_loss.py", ("check_token_loss.py",), TOKEN_LOSS),
    "linear": Kernel(f"{FOLDER}/linear.py", ("check_linear.py",), LINEAR),
    "rounding": Kernel(f"{FOLDER}/launch.py", ("check_gradient.py",), ROUNDING),
}
