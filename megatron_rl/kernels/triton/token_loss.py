"""Triton kernel for the built-in token losses: loss, closed-form derivative and clip flags of every token at once. The
formulas stand in `algorithms.losses`, which also prepares what is needed here; logits are in the other modules.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl.algorithms import losses
from megatron_rl.algorithms.kl import MAX_LOG_RATIO
from megatron_rl.algorithms.losses import DUAL, FREE, HIGH, LOW
from megatron_rl.algorithms.spec import LossSpec

from ..token_loss import PolicyLossOutput
from . import launch
from .launch import or_any

KINDS = {"ppo": "token", "gspo": "sequence", "gspo_token": "sequence", "cispo": "cispo", "nll": "nll"}
"""Losses of the registry that have a closed form here, and what it is called in the kernel."""

_LIMIT = tl.constexpr(MAX_LOG_RATIO)
_FREE = tl.constexpr(FREE)
_HIGH = tl.constexpr(HIGH)
_LOW = tl.constexpr(LOW)
_DUAL = tl.constexpr(DUAL)


@triton.jit
def _safe_exp(x):
    """exp of x bounded to [-20, 20], and its derivative, 0 where the bound acts. NaN stays NaN."""
    bounded = tl.where(x > _LIMIT, _LIMIT, tl.where(x < -_LIMIT, -_LIMIT, x))
    value = tl.exp(bounded)
    return value, tl.where(bounded == x, value, 0.0)


@triton.jit
def _surrogate(ratio, d_ratio, a, low, high, dual, HAS_DUAL: tl.constexpr):
    """-min(r A, clip(r) A), bounded by the dual clip. The sign of A says which bound acts."""
    above = (a > 0.0) & (ratio > high)
    below = (a < 0.0) & (ratio < low)
    flag = tl.where(above, _HIGH, tl.where(below, _LOW, _FREE))
    bounded = tl.where(above, high, tl.where(below, low, ratio))
    if HAS_DUAL:
        far = (a < 0.0) & (ratio > dual)
        flag = tl.where(far, _DUAL, flag)
        bounded = tl.where(far, dual, bounded)
    return -bounded * a, tl.where(flag == _FREE, -d_ratio * a, 0.0), flag


@triton.jit
def _token_term(logp, ratio, d_ratio, a, low, high, dual, KIND: tl.constexpr, HAS_DUAL: tl.constexpr):
    """Loss, derivative by logp and flag of a loss without sequence ratios."""
    if KIND == "nll":
        return -logp, tl.full(logp.shape, -1.0, tl.float64), tl.full(logp.shape, _FREE, tl.int32)
    elif KIND == "cispo":
        flag = tl.where(ratio > high, _HIGH, tl.where(ratio < low, _LOW, _FREE))
        slope = -tl.where(ratio > high, high, tl.where(ratio < low, low, ratio)) * a
        return slope * logp, slope, flag
    else:
        return _surrogate(ratio, d_ratio, a, low, high, dual, HAS_DUAL)


@triton.jit
def _penalty(logp, reference, w, d_w, ESTIMATOR: tl.constexpr, UNBIASED: tl.constexpr):
    """KL to the reference and its derivative; w = exp(logp - old) multiplies it when it is to be unbiased."""
    d = reference - logp
    if ESTIMATOR == "k2":
        value = 0.5 * d * d
        slope = -d
    else:
        ratio, d_ratio = _safe_exp(d)
        value = ratio - 1.0 - tl.where(d > _LIMIT, _LIMIT, tl.where(d < -_LIMIT, -_LIMIT, d))
        slope = tl.where(d_ratio == 0.0, 0.0, 1.0 - ratio)
    if UNBIASED:
        slope = slope * w
        if ESTIMATOR == "k3":
            slope += value * d_w
        value = value * w
    return value, slope


@triton.jit
def token_loss_kernel(
    log_probs,
    old_log_probs,
    sequence_log_ratio,
    advantages,
    weights,
    factor,
    reference,
    entropy,
    loss,
    d_log_probs,
    d_entropy,
    flags,
    n,
    low: tl.float64,
    high: tl.float64,
    dual: tl.float64,
    kl_coef: tl.float64,
    entropy_coef: tl.float64,
    KIND: tl.constexpr,
    HAS_DUAL: tl.constexpr,
    ESTIMATOR: tl.constexpr,
    UNBIASED: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
):
    """w (f (loss + β KL) - c H) and its derivatives by logp and H, in float64. Only weight and flag of a token with
    weight 0 count."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = t < n
    logp = tl.load(log_probs + t, mask=ok, other=0.0)
    old = tl.load(old_log_probs + t, mask=ok, other=0.0)
    w = tl.load(weights + t, mask=ok, other=0.0)
    a = w
    if KIND != "nll":
        a = tl.load(advantages + t, mask=ok, other=0.0)
    ratio, d_ratio = _safe_exp(logp - old)
    if KIND == "sequence":
        whole, d_whole = _safe_exp(tl.load(sequence_log_ratio + t, mask=ok, other=0.0))
        value, slope, flag = _surrogate(whole, d_whole, a, low, high, dual, False)
    else:
        value, slope, flag = _token_term(logp, ratio, d_ratio, a, low, high, dual, KIND, HAS_DUAL)
    if ESTIMATOR != "none":
        kl, d_kl = _penalty(logp, tl.load(reference + t, mask=ok, other=0.0), ratio, d_ratio, ESTIMATOR, UNBIASED)
        value += kl_coef * kl
        slope += kl_coef * d_kl
    if HAS_FACTOR:
        f = tl.load(factor + t, mask=ok, other=0.0)
        value *= f
        slope *= f
    if HAS_ENTROPY:
        value -= entropy_coef * tl.load(entropy + t, mask=ok, other=0.0)
        tl.store(d_entropy + t, (-entropy_coef * w).to(d_entropy.dtype.element_ty), mask=ok)
    tl.store(loss + t, tl.where(w != 0.0, w * value, 0.0), mask=ok)
    tl.store(d_log_probs + t, tl.where(w != 0.0, w * slope, 0.0).to(d_log_probs.dtype.element_ty), mask=ok)
    tl.store(flags + t, flag.to(tl.int8), mask=ok)


def token_loss(log_probs: Tensor, spec: LossSpec, **tensors: Any) -> PolicyLossOutput:
    """`kernels.token_loss.token_loss` for the losses of `KINDS`."""
    with torch.no_grad():
        ready = losses.prepare(log_probs, spec, **tensors)
    inputs, n = ready.inputs, log_probs.shape[0]
    x = inputs.log_probs.contiguous()
    terms, d_log_probs = torch.empty_like(x), torch.empty_like(x, dtype=log_probs.dtype)
    d_entropy = None if ready.entropy is None else torch.empty_like(x, dtype=tensors["entropy"].dtype)
    flags = torch.empty_like(x, dtype=torch.int8)
    if n:
        token_loss_kernel[(triton.cdiv(n, launch.ROWS),)](
            x,
            inputs.old_log_probs,
            inputs.sequence_mean(0) if KINDS[spec.kind] == "sequence" else x,
            or_any(None if spec.kind == "nll" else inputs.require_advantages(spec.kind), x),
            ready.weights,
            or_any(None if ready.correction is None else ready.correction.factor, x),
            or_any(ready.reference_log_probs, x),
            or_any(ready.entropy, x),
            terms,
            d_log_probs,
            or_any(d_entropy, x),
            flags,
            n,
            1.0 - spec.eps_low,
            1.0 + spec.eps_high,
            spec.dual_clip or 0.0,
            spec.kl_coef,
            spec.entropy_coef,
            KIND=KINDS[spec.kind],
            HAS_DUAL=spec.dual_clip is not None,
            ESTIMATOR="none" if ready.reference_log_probs is None else spec.kl_estimator,
            UNBIASED=spec.kl_unbiased,
            HAS_FACTOR=ready.correction is not None,
            HAS_ENTROPY=ready.entropy is not None,
            ROWS=launch.ROWS,
            num_warps=4,
        )
    return PolicyLossOutput(terms.sum(), ready.final_flags(flags), d_log_probs, d_entropy)
