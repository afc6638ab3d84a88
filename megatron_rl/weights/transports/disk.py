"""Weights as a version directory that every engine reads by itself: works with any placement, engine and layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.weights.version_dir import version_path, write_version

if TYPE_CHECKING:
    from megatron_rl.config import HfConfig


class Disk:
    """See `Transport`.

    Args:
        chunks: this rank's model chunks, with up-to-date parameters.
        source_dir: where the files beside the weights are copied from.
        weights_dir: the parent of version directories; all ranks and engines see it.
        dtype: in which the weights leave.
        bucket_bytes: of one file; see `plan_export`.
        load: has engines load a directory, on rank 0; returns why it failed, by URL. Collective.
    """

    in_session = False

    def __init__(
        self,
        chunks: Sequence[Any],
        hf: HfConfig,
        source_dir: str | Path,
        weights_dir: Path,
        dtype: torch.dtype,
        bucket_bytes: int,
        load: Callable[[Path], dict[str, str]],
    ) -> None:
        self._chunks, self._hf, self._load = chunks, hf, load
        self._source_dir, self._weights_dir = Path(source_dir), weights_dir
        self._dtype, self._bucket_bytes = dtype, bucket_bytes

    def path(self, version: int) -> Path:
        """The directory of a version."""
        return version_path(self._weights_dir, version)

    def prepare(self, version: int) -> None:
        """Write the directory. Raises WeightsError, on all ranks, when one of them cannot."""
        write_version(self._chunks, self._hf, self._source_dir, self.path(version), self._dtype, self._bucket_bytes)

    def send(self, version: int, urls: Sequence[str]) -> dict[str, str]:
        """See `Transport.send`."""
        return self._load(self.path(version))
