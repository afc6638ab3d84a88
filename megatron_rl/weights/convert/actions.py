"""What each converting verb writes, as a plan that can be shown or run; how it is written is in `job`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import HfConfig
from megatron_rl.weights import WeightsError, fp8
from megatron_rl.weights.convert.cuts import TargetLayout, cut, rewritten
from megatron_rl.weights.convert.hf_target import SHARD_BYTES, HfTarget, largest_part
from megatron_rl.weights.convert.job import Outcome, Target, run
from megatron_rl.weights.convert.megatron_lm import extra_states, megatron_lm_arguments
from megatron_rl.weights.convert.one_file import Advance
from megatron_rl.weights.convert.opened import Opened
from megatron_rl.weights.convert.team import ALONE, Team
from megatron_rl.weights.convert.tensors import Changed, Quantised, Rows, cast_rows
from megatron_rl.weights.convert.torch_dist import RELEASE, TorchDistReader
from megatron_rl.weights.convert.torch_dist_target import TorchDistTarget
from megatron_rl.weights.convert.views import as_megatron
from megatron_rl.weights.families import family_of


@dataclass(frozen=True)
class Conversion:
    """A plan: what is written where, from which files."""

    target: Target
    out: Path
    identity: Mapping[str, Any]
    left_out: Sequence[str] = ()
    """Tensors of the source that the target has no place for."""

    @property
    def size(self) -> int:
        """Bytes of tensors that are written."""
        return sum(file.size for file in self.target.files)

    def run(self, advance: Advance, allow_nan: bool = False, team: Team = ALONE) -> Outcome:
        """Do it; see `job.run`."""
        return run(self.target, self.out, self.identity, advance, allow_nan, team)


def hf_to_megatron(source: Opened, out: Path, layout: TargetLayout, dtype: torch.dtype | None) -> Conversion:
    """A `torch_dist` checkpoint of a Hugging Face directory's weights, in a directory that Megatron-LM's --load takes.

    Raises:
        WeightsError: the source is not a Hugging Face directory, or does not fit its config.json or the layout.
    """
    if not source.is_hf:
        raise WeightsError(f"{source.path}: a Megatron checkpoint already; `convert reshard` writes it anew")
    hf = source.hf()
    _check_layout(hf, layout)
    multiple = layout.vocab_multiple * layout.tensor
    padded = math.ceil(hf.vocab_size / multiple) * multiple
    stored, stages = as_megatron(_cast(source.as_hf(dtype), dtype, hf), hf, padded), layout.stages(hf.num_layers)
    common = {
        "args": megatron_lm_arguments(hf, layout, padded, largest_part(_flat(stored))),
        "checkpoint_version": 3.0,
        "iteration": 0,
    }
    target = TorchDistTarget(
        {name: cut(name, planes, layout, stages) for name, planes in stored.items()},
        common,
        extra_states(stored),
        folder=f"{RELEASE}/",
        hf=source.beside(),
        tracker=RELEASE,
    )
    identity = _identity("hf-to-megatron", [source], layout=vars(layout), dtype=str(dtype))
    return Conversion(target, out, identity, source.left_out())


def megatron_to_hf(source: Opened, out: Path, dtype: torch.dtype | None, shard_bytes: int = SHARD_BYTES) -> Conversion:
    """A Hugging Face directory of a Megatron checkpoint's weights, in their dtype or another one.

    Raises:
        WeightsError: the source is not a Megatron checkpoint, or does not fit the config.json.
    """
    if source.is_hf:
        raise WeightsError(f"{source.path}: a Hugging Face directory already; `convert cast` writes it anew")
    tensors = _cast(source.as_hf(), dtype, source.hf())
    target = HfTarget(tensors, source.beside(), shard_bytes)
    return Conversion(target, out, _identity("megatron-to-hf", [source], dtype=str(dtype), shard=shard_bytes))


def cast(source: Opened, out: Path, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES) -> Conversion:
    """The same checkpoint with its floating-point weights in another dtype; optimizer state keeps its own.

    With `fp8.FP8` matrices of layers but the router's become blocks with scales, and all else is in bfloat16.

    Raises:
        WeightsError: a Hugging Face directory has no config.json; or blocks of fp8 are wanted of a Megatron checkpoint,
            which holds none.
    """
    identity = _identity("cast", [source], dtype=str(dtype), shard=shard_bytes)
    if isinstance(source.reader, TorchDistReader):
        if dtype is fp8.FP8:
            raise WeightsError(
                f"{source.path}: a Megatron checkpoint holds no blocks of fp8; use `convert megatron-to-hf` first, and "
                "cast what it writes"
            )
        return Conversion(rewritten(source.path, source.reader, TargetLayout(), dtype), out, identity)
    hf = source.hf()
    if dtype is fp8.FP8:
        tensors = _quantised(_cast(source.plain(torch.bfloat16), torch.bfloat16, hf), source)
    else:
        tensors = _cast(source.plain(dtype), dtype, hf)
    return Conversion(HfTarget(tensors, source.beside(), shard_bytes, dtype), out, identity)


def _quantised(tensors: Mapping[str, Rows], source: Opened) -> dict[str, Rows]:
    ends = {
        name.rsplit(".", 2)[-2]
        for row in family_of(source.hf()).rows(source.hf())
        for name in row.hf
        if ".linear_" in row.rule.megatron
    }
    found: dict[str, Rows] = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2 and name.endswith(".weight") and name.split(".")[-2] in ends:
            found |= {name: Quantised(tensor), name + fp8.SUFFIX: Quantised(tensor, is_scales=True)}
        else:
            found[name] = tensor
    return found


def average(
    sources: Sequence[Opened], weights: Sequence[float], out: Path, shard_bytes: int = SHARD_BYTES
) -> Conversion:
    """A Hugging Face directory whose tensors are the weighted mean of the sources', of either format.

    The mean is computed in fp32 (fp64 for fp64 sources) and rounded once, to the first source's dtype.

    Raises:
        WeightsError: fewer than two sources, weights that do not fit, or sources of different models.
    """
    if len(sources) < 2 or len(weights) != len(sources) or not math.isfinite(sum(weights)) or sum(weights) == 0:
        raise WeightsError(
            f"average: {len(sources)} checkpoints and {len(weights)} weights; give at least two checkpoints, and as "
            "many weights, of a sum that is not 0"
        )
    shares = [weight / sum(weights) for weight in weights]
    opened = [source.as_hf() for source in sources]
    first = opened[0]
    for source, tensors in zip(sources, opened, strict=True):
        for name, tensor in tensors.items():
            if name not in first or first[name].shape != tensor.shape or len(tensors) != len(first):
                raise WeightsError(f"{source.path}: {name} is not as in {sources[0].path}; these are different models")
    mean = {
        name: Changed(name, tensor.dtype, tuple(tensors[name] for tensors in opened), partial(_mean, shares))
        for name, tensor in first.items()
    }
    target = HfTarget(mean, sources[0].beside(), shard_bytes)
    return Conversion(target, out, _identity("average", sources, weights=list(weights), shard=shard_bytes))


def reshard(source: Opened, out: Path, layout: TargetLayout) -> Conversion:
    """The same Megatron checkpoint, optimizer state and random states included, cut for another layout.

    Raises:
        WeightsError: the source is a Hugging Face directory.
    """
    if not isinstance(source.reader, TorchDistReader):
        raise WeightsError(f"{source.path}: a Hugging Face directory has no layout; use `convert hf-to-megatron`")
    target = rewritten(source.path, source.reader, layout)
    return Conversion(target, out, _identity("reshard", [source], layout=vars(layout)))


# ------------------------------------------------------------------------------------------------------------- helpers


def _identity(verb: str, sources: Sequence[Opened], **options: Any) -> dict[str, Any]:
    return {"verb": verb, "sources": [source.identity for source in sources], **options}


def _mean(shares: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    total = tensors[0].to(wide) * shares[0]
    for share, tensor in zip(shares[1:], tensors[1:], strict=True):
        total.add_(tensor.to(wide), alpha=share)
    return total.to(tensors[0].dtype)


def _cast(tensors: Mapping[str, Rows], dtype: torch.dtype | None, hf: HfConfig) -> dict[str, Rows]:
    """All in another dtype, but for what `hf`'s table says keeps its own."""
    keeps = {name for row in family_of(hf).rows(hf) if row.rule.keeps_dtype for name in row.hf}
    return {name: tensor if name in keeps else cast_rows(tensor, dtype) for name, tensor in tensors.items()}


def _flat(stored: Mapping[str, Mapping[tuple[int, ...], Rows]]) -> list[Rows]:
    return [plane for planes in stored.values() for plane in planes.values()]


def _check_layout(hf: HfConfig, layout: TargetLayout) -> None:
    tp, groups = layout.tensor, hf.num_query_groups
    sizes = {"num_attention_heads": hf.num_attention_heads, "intermediate_size": hf.ffn_hidden_size}
    if hf.mla is None:
        sizes["rows of q, k and v"] = hf.qkv_rows
    if hf.moe is not None and hf.moe.shared_ffn_hidden_size:
        sizes["features of the shared experts"] = hf.moe.shared_ffn_hidden_size
    if any(count % tp for count in sizes.values()) or (hf.mla is None and groups % tp and tp % groups):
        listed = ", ".join(f"{name}={count}" for name, count in sizes.items())
        raise WeightsError(
            f"--tp {tp}: does not divide {listed}, or neither divides num_key_value_heads={groups} nor is a multiple "
            "of it; choose another one"
        )
    experts, width = (hf.moe.num_experts, hf.moe.ffn_hidden_size) if hf.moe is not None else (1, 1)
    if experts % layout.expert or width % layout.expert_tensor:
        raise WeightsError(
            f"--ep {layout.expert}, --etp {layout.expert_tensor}: must divide the model's {experts} expert(s), and "
            f"the {width} features of each"
        )
    if hf.num_layers < layout.pipeline:
        raise WeightsError(
            f"--pp {layout.pipeline}: more stages than the model's {hf.num_layers} layers, of which each has "
            f"one or more; choose one up to {hf.num_layers}"
        )
