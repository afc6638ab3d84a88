"""Runs unmodified Megatron-Core over gloo without CUDA; nothing else belongs here, and with CUDA it is inert.

Megatron-Core hard-codes CUDA in places that no option reaches. Each `Entry` of `ENTRIES` answers one of them, names it,
and has a test that fails without it (tests/unit/test_cpu_backend.py). Entries touch Megatron's own modules wherever
Python allows it; the others replace attributes that could only raise on a machine without CUDA.

What only concerns Transformer Engine or Apex being absent is not here but in `policy/upstream_fixes.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_CPU = torch.device("cpu")
_undo = contextlib.ExitStack()
_installed: set[str] = set()


@dataclass(frozen=True)
class Entry:
    """One replacement: `name` is its key, `upstream` the place in megatron-core that needs it."""

    name: str
    upstream: str
    patches: Callable[[], Iterator[tuple[Any, str, Any]]]
    """Yields (object, attribute, replacement); called at install, so that nothing of Megatron is imported before."""


def install(*, exclude: Collection[str] = ()) -> bool:
    """Install every entry but those named in `exclude`; True if the CPU stands in for CUDA in this process.

    Call it before Megatron touches a device. With CUDA it does nothing and returns False. Calling it twice is fine.
    """
    if torch.cuda.is_available():
        return False
    for entry in ENTRIES:
        if entry.name in exclude or entry.name in _installed:
            continue
        for owner, attribute, replacement in entry.patches():
            _replace(owner, attribute, replacement)
        _installed.add(entry.name)
    return True


def uninstall() -> None:
    """Put everything back as it was before `install`."""
    _undo.close()
    _installed.clear()


def _replace(owner: Any, attribute: str, replacement: Any) -> None:
    _undo.callback(setattr, owner, attribute, getattr(owner, attribute))
    setattr(owner, attribute, replacement)


# -- stand-ins for torch.cuda


def _torch_cuda(**replacements: Any) -> Callable[[], Iterator[tuple[Any, str, Any]]]:
    def patches() -> Iterator[tuple[Any, str, Any]]:
        for attribute, replacement in replacements.items():
            yield torch.cuda, attribute, replacement

    return patches


# -- device="cuda" literals


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor factory that reads `device="cuda"` as the CPU."""

    def create(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return create


def torch_without_cuda() -> types.ModuleType:
    """A module equal to `torch`, attribute by attribute, but for the tensor factories."""
    view = types.ModuleType("torch")
    view.__dict__.update(torch.__dict__)
    for name in ("tensor", "zeros", "ones", "empty", "empty_like"):
        setattr(view, name, _on_cpu(getattr(torch, name)))
    return view


def _literals_of(module: str) -> Callable[[], Iterator[tuple[Any, str, Any]]]:
    """The name `torch` of one Megatron module is bound to a view: no other code sees it, no operation gets slower."""

    def patches() -> Iterator[tuple[Any, str, Any]]:
        yield importlib.import_module(f"megatron.core.{module}"), "torch", torch_without_cuda()

    return patches


# -- tensor methods


def _tensor_cuda() -> Iterator[tuple[Any, str, Any]]:
    yield torch.Tensor, "cuda", lambda self, *_, **__: self


def _tensor_type() -> Iterator[tuple[Any, str, Any]]:
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(answer, str) and caller.startswith("megatron.core.optimizer"):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    yield torch.Tensor, "type", type_


# -- streams


class _Stream:
    """A stream, or an event, of a device that does everything at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


_STREAM = _Stream()


# -- split sizes


def _split_sizes() -> Iterator[tuple[Any, str, Any]]:
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    yield dispatcher, "maybe_move_tensor_to_cpu", move


# -- parts of different size


def _uneven_parts() -> Iterator[tuple[Any, str, Any]]:
    """gloo gathers, and sums and scatters, parts of one size: they are filled up to the largest."""
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def fill(part: torch.Tensor, size: int) -> torch.Tensor:
        return torch.cat([part, part.new_zeros((size - len(part), *part.shape[1:]))])

    def gather_uneven(input_: Any, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if sizes is None or group.size() == 1:
            return gather(input_, group, sizes, use_global_buffer)
        parts = gather(fill(input_, max(sizes)), group).split(max(sizes))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def scatter_uneven(input_: Any, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if sizes is None or group.size() == 1:
            return scatter(input_, group, sizes, use_global_buffer)
        filled = torch.cat([fill(part, max(sizes)) for part in input_.split(sizes)])
        return scatter(filled, group)[: sizes[group.rank()]]

    yield mappings, "_gather_along_first_dim", gather_uneven
    yield mappings, "_reduce_scatter_along_first_dim", scatter_uneven


# -- random numbers


def _rng_tracker() -> Iterator[tuple[Any, str, Any]]:
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    yield random, "_get_cuda_rng_state", lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    yield random, "_set_cuda_rng_state", lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


ENTRIES: tuple[Entry, ...] = (
    Entry(
        "current_device",
        "tensor_parallel/layers.py, mappings.py, pipeline_parallel/p2p_communication.py, distributed/"
        "param_and_grad_buffer.py and others: buffers on torch.cuda.current_device()",
        _torch_cuda(current_device=lambda: _CPU),
    ),
    Entry(
        "synchronize",
        "pipeline_parallel/p2p_communication.py _communicate: torch.cuda.synchronize() after batched sends",
        _torch_cuda(synchronize=lambda *_, **__: None),
    ),
    Entry(
        "rng_state",
        "tensor_parallel/random.py CudaRNGStatesTracker.add: torch.cuda.get_rng_state() and manual_seed()",
        _torch_cuda(get_rng_state=lambda *_, **__: torch.get_rng_state(), manual_seed=torch.manual_seed),
    ),
    Entry(
        "rng_tracker",
        "tensor_parallel/random.py _get_cuda_rng_state and _set_cuda_rng_state: torch.cuda.default_generators",
        _rng_tracker,
    ),
    Entry(
        "streams",
        "transformer/moe/token_dispatcher.py: torch.cuda.Stream(), current_stream(), stream()",
        _torch_cuda(
            Stream=_Stream,  # a class, as transformers' annotations need it
            current_stream=lambda *_, **__: _STREAM,
            stream=lambda _: contextlib.nullcontext(),
        ),
    ),
    Entry(
        "split_sizes",
        "transformer/moe/moe_utils.py maybe_move_tensor_to_cpu: turns split sizes to numpy only when they are on a GPU",
        _split_sizes,
    ),
    Entry(
        "uneven_parts",
        "tensor_parallel/mappings.py _gather_along_first_dim, _reduce_scatter_along_first_dim: parts of different "
        "size, as the token dispatcher has them with expert-tensor and expert parallelism together; NCCL takes them",
        _uneven_parts,
    ),
    Entry(
        "literals_schedules",
        'pipeline_parallel/schedules.py: total_num_tokens = torch.zeros(..., device="cuda")',
        _literals_of("pipeline_parallel.schedules"),
    ),
    Entry(
        "literals_optimizer",
        'optimizer/optimizer.py: found_inf, _scale_one and _scale = torch.tensor(..., device="cuda")',
        _literals_of("optimizer.optimizer"),
    ),
    Entry(
        "literals_clip_grads",
        'optimizer/clip_grads.py get_grad_norm_fp32, count_zeros_fp32: device="cuda"',
        _literals_of("optimizer.clip_grads"),
    ),
    Entry(
        "literals_utils",
        'utils.py local_multi_tensor_l2_norm (gradient norm without Transformer Engine and Apex): device="cuda"',
        _literals_of("utils"),
    ),
    Entry(
        "tensor_type",
        "optimizer/distrib_optimizer.py, optimizer.py, clip_grads.py: param.type() == 'torch.cuda.FloatTensor'",
        _tensor_type,
    ),
    Entry(
        "tensor_cuda",
        "models/common/language_module/language_module.py setup_embeddings_and_output_layer: weight.data.cuda()",
        _tensor_cuda,
    ),
)
