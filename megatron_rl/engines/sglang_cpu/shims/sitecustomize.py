"""Runs at the start of every process of the server: declares torchvision's operators just before it is imported.

torchvision describes the shapes of its operators when it is imported, and fails if its compiled part, which needs CUDA,
has not declared them. SGLang's language models call none of them.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any

OPERATORS = ("nms", "qnms")


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing itself."""

    def __init__(self) -> None:
        self._library: Any = None  # operators live as long as this object

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision" and self._library is None:
            import torch

            self._library = torch.library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                self._library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _BeforeTorchvision())
