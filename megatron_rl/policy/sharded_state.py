"""Model, optimizer, RNG and reference weights as Megatron distributed checkpoints; where they lie is `checkpoint.py`'s.

In the directory that is given:

    policy/      model weights, optimizer state, random states
    reference/   the reference policy's weights, only when there is one

Tensors are stored by their global name and shape, each shard once, so they can be read in another layout: at other
tensor, pipeline, data, expert or expert-tensor parallel sizes, with or without the distributed optimizer. Random states
belong to a rank, so they return only at the layout that wrote them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_torch_checkpoint

from megatron_rl.policy.digest import HashingStream
from megatron_rl.policy.exchange import merge_of_all_ranks
from megatron_rl.policy.optimizer import Optimizer
from megatron_rl.policy.optimizer_state import checkpoint_metadata
from megatron_rl.policy.reference import ReferenceWeights

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

POLICY, REFERENCE = "policy", "reference"


def save_training_state(
    directory: Path, chunks: Sequence[GPTModel], optimizer: Optimizer, reference: ReferenceWeights | None
) -> dict[str, str]:
    """Write into the existing `directory`. Collective; every file has reached the disk when it returns.

    Returns:
        `digest.digest_of_file` of each file with tensors, by path within `directory`, on every rank: the rank that
        wrote a file has hashed it meanwhile, so that none has to be read again.
    """
    model = _model_state(chunks)
    state = {**model, "optimizer": optimizer.sharded_state(model, is_loading=False), "rng": _rng_object(_rng_states())}
    written = _save(state, directory / POLICY)
    if reference is not None:
        with reference.swapped_in():
            written |= _save(_model_state(chunks), directory / REFERENCE)
    return merge_of_all_ranks({path.relative_to(directory).as_posix(): digest for path, digest in written.items()})


def load_training_state(
    directory: Path, chunks: Sequence[GPTModel], optimizer: Optimizer, reference: ReferenceWeights | None
) -> bool:
    """Read what `save_training_state` wrote into the objects given. Collective.

    Returns:
        Whether `reference` was read: it is given and the checkpoint has one.
    """
    model = _model_state(chunks)
    state = {**model, "optimizer": optimizer.sharded_state(model, is_loading=True)}
    same_layout = _stored_layout(directory / POLICY) == _layout()
    if same_layout:
        state["rng"] = _rng_object(None)
    loaded = _load(state, directory / POLICY)
    _load_model(chunks, loaded)
    optimizer.load_sharded_state(loaded["optimizer"])
    if same_layout:
        _restore_rng(loaded["rng"])
    if reference is None or not (directory / REFERENCE).is_dir():
        return False
    with reference.swapped_in():
        load_weights(directory / REFERENCE, chunks)
    return True


def load_weights(directory: Path, chunks: Sequence[GPTModel]) -> None:
    """Read weights alone out of a Megatron checkpoint, ours or a converted one. Collective.

    Args:
        directory: the one with the tensors, as `policy/` or `reference/` of a checkpoint.
    """
    _load_model(chunks, _load(_model_state(chunks), directory))


# --------------------------------------------------------------------------------------------------- Megatron's formats


def _model_state(chunks: Sequence[GPTModel]) -> dict[str, Any]:
    """Sharded weights, under Megatron's own keys: `model`, or `model0`, `model1` ... with virtual pipeline stages."""
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    metadata = checkpoint_metadata()
    return {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)}


def _load_model(chunks: Sequence[GPTModel], loaded: dict[str, Any]) -> None:
    if len(chunks) == 1:
        chunks[0].load_state_dict(loaded["model"])
        return
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{index}"])


def _save(state: dict[str, Any], directory: Path) -> dict[Path, str]:
    """Write, and return the hashes of the files that this rank wrote."""
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        directory.mkdir()
    dist.barrier()
    files = HashingFileSystem()
    with _plain_errors():
        dist_checkpointing.save(state | {"layout": _layout()}, str(directory), _synchronous_strategy(files))
    return {path: digest for path, digest in files.digests.items() if path.suffix == DEFAULT_SUFFIX}


def _load(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    with _plain_errors():
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(directory))
    return loaded


@contextmanager
def _plain_errors() -> Iterator[None]:
    """torch's wrapper of what the ranks raised is a BaseException, which no `except Exception` catches: unwrap it."""
    try:
        yield
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        raise (failure if isinstance(failure, Exception) else RuntimeError(str(error))) from error


class HashingFileSystem(FileSystem):
    """torch's file system, which remembers the hash of every file that was written through it."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[Path, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        """As torch's; `mode` is "wb" while a checkpoint is written."""
        with super().create_stream(path, mode) as file:
            stream = HashingStream(cast(IO[bytes], file))
            yield stream
        self.digests[Path(path)] = stream.hexdigest()


def _synchronous_strategy(files: FileSystem) -> Any:
    """Megatron's torch_dist format, written by this process through `files`.

    Megatron's own writer forks one process per file and first spawns a manager process that imports the main module
    again. Both are there for saving in the background, which is not used here; torch's writer makes the same files
    with threads, and each rank syncs its own.
    """
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist

    class SynchronousSave(torch_dist.TorchDistSaveShardedStrategy):
        def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
            by_key, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(
                sharded_state_dict, self.keep_only_main_replica
            )
            planner = torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
            writer = FileSystemWriter(checkpoint_dir, thread_count=self.thread_count, sync_files=True)
            writer.fs = files
            save_torch_checkpoint(
                torch_dist.mcore_to_pyt_state_dict(by_key, False), storage_writer=writer, planner=planner
            )

    return SynchronousSave("torch_dist", 1)


def _layout() -> list[int]:
    """[tensor, pipeline, context x data] parallel sizes."""
    from megatron.core import parallel_state

    return [
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    ]


def _stored_layout(directory: Path) -> list[int]:
    from megatron.core import dist_checkpointing

    return list(dist_checkpointing.load_common_state_dict(str(directory))["layout"])


# ------------------------------------------------------------------------------------------------------------------ RNG


def _rng_states() -> dict[str, Any]:
    """Numbers, strings and tensors only, which torch reads back without trusting the file."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    kind, key, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(key, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _restore_rng(states: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    random.setstate(states["python"])
    kind, key, *rest = states["numpy"]
    np.random.set_state((kind, key.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["device"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["device"])
    get_cuda_rng_tracker().set_states(states["tracker"])


def _rng_object(states: dict[str, Any] | None) -> Any:
    """One object per rank."""
    from megatron.core.dist_checkpointing import ShardedObject

    return ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)
