"""The optimizer's state in a Megatron checkpoint: by parameter, whatever optimizer and layout hold it; no file I/O.

Of every parameter the moments and, where the model is not fp32, the fp32 main weights, each under the parameter's
global name and in its shape:

    optimizer.state.exp_avg.NAME    optimizer.state.exp_avg_sq.NAME    optimizer.state.param.NAME

Megatron's own format lists groups of parameters as well, as the optimizers of this layout have them. Those lists are
what cannot be read where experts are shared otherwise, and hold nothing that is not in the configuration, but for the
number of updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "param"


def checkpoint_metadata() -> dict[str, Any]:
    """How Megatron is to lay out a checkpoint: every tensor in its model's shape, readable at another layout."""
    from megatron.core import parallel_state

    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def sharded(part: Any, model_state: dict[str, Any], *, is_loading: bool) -> dict[int, dict[str, Any]]:
    """Sharded tensors of one of Megatron's optimizers, by number of the parameter. Collective over its data ranks.

    Args:
        part: has its moments, see `make_moments`.
        model_state: sharded state of the model chunks.
        is_loading: only the shapes are needed.
    """
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

    if not _is_distributed(part):
        places = _by_parameter(model_state)
        return {
            number: {
                name: make_sharded_optimizer_tensor(places[id(parameter)], tensor, f"optimizer.state.{name}")
                for name, tensor in _state(part, main).items()
            }
            for number, (parameter, main) in enumerate(_main_parameters(part))
        }
    found: dict[int, dict[str, Any]] = part.sharded_param_state_fully_reshardable(
        model_state, is_loading=is_loading, metadata=checkpoint_metadata()
    )
    if part.config.bf16:
        return found
    # The main weights of an fp32 model are the model's, which a checkpoint has already.
    return {number: {name: tensors[name] for name in MOMENTS} for number, tensors in found.items()}


@torch.no_grad()
def restore(part: Any, loaded: dict[int, dict[str, Tensor]]) -> None:
    """Take over what was read for `sharded`."""
    for number, main, span in _owned(part):
        for name, target in _state(part, main).items():
            target.copy_(loaded[number][name].flatten()[span].view(target.shape))


def make_moments(part: Any, updates: int) -> None:
    """Give every parameter its moments, zero where it has none, and the number of updates made so far.

    Adam makes them before the first update; a checkpoint has to say what there is to read or write.
    """
    inner = part.optimizer
    if not inner.state:
        part.init_state_fn(inner, part.config)
    if isinstance(inner, torch.optim.Adam):
        for state in inner.state.values():
            state["step"] = torch.tensor(float(updates))
    elif updates:
        for group in inner.param_groups:
            group["step"] = updates  # fused Adam counts per group


def _is_distributed(part: Any) -> bool:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return isinstance(part, DistributedOptimizer)


def _state(part: Any, main: Tensor) -> dict[str, Tensor]:
    """What there is of a parameter, given what Adam updates: of the distributed optimizer, this rank's share of it."""
    state = {name: part.optimizer.state[main][name] for name in MOMENTS}
    return state | {MAIN: main} if part.config.bf16 else state


def _owned(part: Any) -> Iterator[tuple[int, Tensor, slice]]:
    """Number of each parameter that this rank updates, what Adam updates of it, and which of its elements that is."""
    if not _is_distributed(part):
        yield from ((number, main, slice(None)) for number, (_, main) in enumerate(_main_parameters(part)))
        return
    numbered = (parameter for buffer in part.buffers for parameter in buffer.param_index_map)
    for number, parameter in enumerate(numbered):
        if parameter in part.model_param_group_index_map:
            group, order = part.model_param_group_index_map[parameter]
            span = part._get_model_param_range_map(parameter)["param"]
            yield number, part.optimizer.param_groups[group]["params"][order], slice(span.start, span.end)


def _main_parameters(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Parameters of an optimizer that is not distributed, and what Adam updates: fp32 copies, or the same."""
    if not part.config.bf16:
        yield from ((parameter, parameter) for parameter in part.get_parameters())
        return
    for own, main in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
        yield from zip(own, main, strict=True)
    yield from ((parameter, parameter) for group in part.fp32_from_fp32_groups for parameter in group)


def _by_parameter(model_state: dict[str, Any]) -> dict[int, Any]:
    """Sharded tensors of the model, by the identity of the parameter."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    tensors, _ = extract_sharded_tensors_and_factories(model_state)
    return {id(tensor.data): tensor for tensor in nested_values(tensors)}
