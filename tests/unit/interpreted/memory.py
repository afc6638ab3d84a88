"""Tensors beside or on memory that must not be touched: reading a forbidden page kills the process; no tests here."""

import ctypes
import mmap

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


def rows_on_pages(values: Tensor, forbidden: list[int]) -> Tensor:
    """A copy of `values` [T, W] whose rows begin one page apart, rows `forbidden` neither readable nor writable."""
    rows, columns = values.shape
    step = PAGE // values.element_size()
    assert columns <= step
    memory, base = _map(rows)
    tensor = torch.frombuffer(memory, dtype=values.dtype).view(rows, step)[:, :columns]
    tensor.copy_(values)
    for row in forbidden:
        _forbid(base + row * PAGE)
    return tensor


def rows_before_a_wall(values: Tensor) -> Tensor:
    """A contiguous copy of `values` [T, W] that ends where a forbidden page begins."""
    pages = -(-values.numel() * values.element_size() // PAGE)
    memory, base = _map(pages + 1)
    whole = torch.frombuffer(memory, dtype=values.dtype)
    end = pages * PAGE // values.element_size()
    tensor = whole[end - values.numel() : end].view(values.shape)
    tensor.copy_(values)
    _forbid(base + pages * PAGE)
    return tensor


def _map(pages: int) -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(-1, pages * PAGE)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _forbid(address: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
