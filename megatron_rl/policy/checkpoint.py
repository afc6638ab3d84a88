"""Checkpoint directories: written aside, completed, found, verified, pruned; what is in the tensors is not known here.

    RUN/checkpoints/
      step-000020/            complete by construction: it got this name last
        manifest.json         step, metric, layout, hash of the configuration, every other file with its size and hash
        policy/  reference/   Megatron distributed checkpoints (see `sharded_state.py`)
        extra/                what the training loop gave along: NAME.json or NAME.bin
      .tmp-step-000030/       being written, or left by a crash

What a crash leaves behind:

    while files are written       .tmp-step-N; it is never read, and removed when the next checkpoint begins
    before the rename             the same, although it was whole
    after the rename              step-N; the directory entry itself is synced before `complete` returns
    while an old one is removed   .tmp-old-step-N (removal begins with a rename), removed when the next one begins
    while step-N is replaced      possibly no step-N (two renames), and all other checkpoints

So `latest` never sees half of a checkpoint. A file that was changed afterwards is named by `verify` (names, sizes, the
small files) or `verify_contents` (all bytes, for which ranks share the files), and nothing falls back silently to an
older state. Only rank 0 calls the functions that write.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError, changed_shape
from megatron_rl.files import regular, sync
from megatron_rl.policy.digest import digest_of_file
from megatron_rl.policy.manifest import FileFacts, Manifest

MANIFEST = "manifest.json"
EXTRA = "extra"
_TEMPORARY = ".tmp-"
_NAME = re.compile(r"step-(\d{6,})")
_HELD_BY_NFS = re.compile(r"\.nfs[0-9a-f]+")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file and what to do."""


def begin(run_dir: Path, step: int) -> Path:
    """Make the empty directory in which the checkpoint of `step` is to be written, and clear what crashes left."""
    root = Path(run_dir) / "checkpoints"
    root.mkdir(parents=True, exist_ok=True)
    for stale in root.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(stale)
    folder = temporary(run_dir, step)
    folder.mkdir()
    return folder


def temporary(run_dir: Path, step: int) -> Path:
    """Where `begin` puts the checkpoint of `step`; known to all ranks without asking."""
    return Path(run_dir) / "checkpoints" / f"{_TEMPORARY}{_name(step)}"


def complete(
    run_dir: Path,
    step: int,
    extra: Mapping[str, Any],
    *,
    metric: float | None,
    layout: Mapping[str, Any],
    config_hash: str,
    model: Mapping[str, Any],
    digests: Mapping[str, str],
) -> Path:
    """Add `extra` (bytes, or anything that JSON can hold) and the manifest, sync all to disk, and give the final name.

    Args:
        model: `HfConfig.shape` of the model.
        digests: `digest_of_file` of files that whoever wrote them knows already, by path within the checkpoint.

    Returns:
        The checkpoint's directory.
    """
    folder = temporary(run_dir, step)
    (folder / EXTRA).mkdir()
    for name, value in extra.items():
        if isinstance(value, bytes):
            (folder / EXTRA / f"{name}.bin").write_bytes(value)
        else:
            (folder / EXTRA / f"{name}.json").write_text(json.dumps(value))
    files = {
        name: FileFacts(path.stat().st_size, digests.get(name) or digest_of_file(path))
        for name, path in _files(folder).items()
    }
    manifest = Manifest(step, metric, dict(layout), config_hash, files, dict(model))
    (folder / MANIFEST).write_text(manifest.to_json())
    for path in [*_files(folder).values(), *(p for p in folder.rglob("*") if p.is_dir()), folder]:
        sync(path)
    final = folder.with_name(_name(step))
    if final.exists():
        os.replace(final, final.with_name(f"{_TEMPORARY}old-{final.name}"))
    os.replace(folder, final)
    sync(final.parent)
    return final


def latest(run_dir: Path) -> Path | None:
    """The checkpoint of the highest step, None when there is none."""
    found = _all(run_dir)
    return found[-1] if found else None


def at(run_dir: Path, step: int) -> Path:
    """The checkpoint of `step`, as --resume-from asks for it.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    found = {step_of(path): path for path in _all(run_dir)}
    if step not in found:
        listed = ", ".join(map(str, found))
        raise ConfigError(
            f"--resume-from={step}: {Path(run_dir) / 'checkpoints'} has no checkpoint of step {step}; "
            + (f"it has those of: {listed}; give one of these" if found else "it has none; begin without this option")
        )
    return found[step]


def step_of(checkpoint: Path) -> int:
    """RL steps that were trained when `checkpoint` was written.

    Raises:
        CheckpointError: that is not the name of a checkpoint.
    """
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise CheckpointError(f"{checkpoint}: not a checkpoint; their directories are named step-NNNNNN")
    return int(match[1])


def verify(checkpoint: Path) -> Manifest:
    """The manifest, after a look at every file's name and size, and at the content of the small ones (`extra`).

    Raises:
        CheckpointError: the manifest is missing, damaged, or of another step; a file is missing, has another size or
            content, or was not there when the checkpoint was written.
    """
    manifest = _read_manifest(checkpoint)
    if manifest.step != step_of(checkpoint):
        raise CheckpointError(
            f"{checkpoint} is the checkpoint of step {manifest.step} under another name: rename it to "
            f"{_name(manifest.step)}, or move it away"
        )
    there = _files(checkpoint)
    for name, facts in manifest.files.items():
        if name not in there:
            raise _damaged(checkpoint, name, "is missing")
        size = there[name].stat().st_size
        if size != facts.size:
            raise _damaged(checkpoint, name, f"has {size} bytes instead of {facts.size}")
    for name in there.keys() - manifest.files.keys() - {MANIFEST}:
        raise CheckpointError(
            f"{there[name]} does not belong to this checkpoint, which was written without it: move it away"
        )
    _verify_files(checkpoint, manifest, [name for name in manifest.files if name.startswith(f"{EXTRA}/")])
    return manifest


def require_model(checkpoint: Path, manifest: Manifest, model: Mapping[str, Any], path: str) -> None:
    """Refuse a model whose weights are not those of the checkpoint. `model`: `HfConfig.shape` of the one at `path`.

    Raises:
        CheckpointError: with both values of everything that differs.
    """
    if changes := changed_shape(manifest.model, model):
        raise CheckpointError(
            f"{checkpoint} holds another model than model.path={path}: {', '.join(changes)}. No option makes its "
            "weights fit: resume with the model of that run, or choose another run_dir"
        )


def verify_contents(checkpoint: Path, part: int, parts: int) -> None:
    """Compare the bytes of every `parts`-th file, from number `part` on, with what was written.

    Raises:
        CheckpointError: names the file whose content has changed, or that cannot be read.
    """
    manifest = _read_manifest(checkpoint)
    _verify_files(checkpoint, manifest, sorted(manifest.files)[part::parts])


def _verify_files(checkpoint: Path, manifest: Manifest, names: Iterable[str]) -> None:
    for name in names:
        try:
            digest = digest_of_file(checkpoint / name)
        except OSError as error:
            raise unreadable(checkpoint, checkpoint / name, error) from error
        if digest != manifest.files[name].xxh3_128:
            raise _damaged(checkpoint, name, "has the right size but not the bytes that were written")


def _damaged(checkpoint: Path, name: str, state: str) -> CheckpointError:
    return CheckpointError(f"{checkpoint / name} {state}: {_advice(checkpoint)}")


def read_extra(checkpoint: Path) -> dict[str, Any]:
    """What `complete` was given as `extra`, by name.

    Raises:
        CheckpointError: a file cannot be read.
    """
    extra: dict[str, Any] = {}
    for path in sorted((checkpoint / EXTRA).iterdir()):
        if _HELD_BY_NFS.fullmatch(path.name):
            continue
        try:
            extra[path.stem] = path.read_bytes() if path.suffix == ".bin" else json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise unreadable(checkpoint, path, error) from error
    return extra


def unreadable(checkpoint: Path, part: Path, error: Exception) -> CheckpointError:
    """For a part that has the size it should have, but not the content."""
    reason = f"{type(error).__name__}: {first_line(error)}"
    return CheckpointError(f"{part} cannot be read ({reason}): {_advice(checkpoint)}")


def first_line(error: Exception) -> str:
    """The first line of its message, shortened."""
    return str(error).strip().partition("\n")[0][:200] or "no reason given"


def prune(run_dir: Path, keep_last: int, keep_best: bool) -> None:
    """Remove all checkpoints but the `keep_last` newest and, with `keep_best`, the one with the largest metric."""
    found = _all(run_dir)
    kept = set(found[-keep_last:])
    if keep_best:
        scored = [(metric, path) for path in found if (metric := _metric(path)) is not None]
        kept |= {max(scored)[1]} if scored else set()
    for path in found:
        if path not in kept:
            _remove(path)


def discard_after(run_dir: Path, step: int) -> None:
    """Remove checkpoints of later steps: after resuming from `step` they belong to a run that no longer exists."""
    for path in _all(run_dir):
        if step_of(path) > step:
            _remove(path)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _all(run_dir: Path) -> list[Path]:
    """All checkpoints, by step."""
    root = Path(run_dir) / "checkpoints"
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name)] if root.is_dir() else []
    return sorted(found, key=step_of)


def _files(folder: Path) -> dict[str, Path]:
    """All files below `folder`, by their path within it, but those that NFS keeps for readers of a removed one."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not _HELD_BY_NFS.fullmatch(path.name)
    }


def _read_manifest(checkpoint: Path) -> Manifest:
    path = checkpoint / MANIFEST
    try:
        return Manifest.from_json(regular(path).read_text())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): {_advice(checkpoint)}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a manifest ({error}): {_advice(checkpoint)}") from error


def _advice(checkpoint: Path) -> str:
    older = [step_of(path) for path in _all(checkpoint.parent.parent) if step_of(path) < step_of(checkpoint)]
    if older:
        return (
            f"the checkpoint is damaged; restore the file, or go on from an earlier one with --resume-from {older[-1]}"
        )
    return f"the checkpoint is damaged; restore the file, or delete {checkpoint} to start again"


def _metric(checkpoint: Path) -> float | None:
    try:
        return _read_manifest(checkpoint).metric
    except CheckpointError:
        return None


def _remove(checkpoint: Path) -> None:
    doomed = checkpoint.with_name(f"{_TEMPORARY}old-{checkpoint.name}")
    os.replace(checkpoint, doomed)
    shutil.rmtree(doomed)
