"""Checkpoint directories: atomic, verified, pruned."""

from __future__ import annotations

import json
import os

import pytest

from megatron_rl.policy import checkpoint
from megatron_rl.policy.checkpoint import CheckpointError
from megatron_rl.policy.digest import HashingStream, digest_of, digest_of_file


def write(run_dir, step, metric=None, extra=None, content=b"weights"):
    folder = checkpoint.begin(run_dir, step)
    (folder / "policy").mkdir()
    (folder / "policy" / "data.distcp").write_bytes(content)
    facts = {
        "metric": metric,
        "layout": {"sizes": 1},
        "config_hash": "abc",
        "model": {"num_layers": 2, "qk_norm": True},
    }
    return checkpoint.complete(run_dir, step, extra or {}, **facts, digests={})


def names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_a_completed_checkpoint_has_its_manifest_and_gives_back_what_was_added(tmp_path):
    extra = {"progress": {"step": 20, "before": {"x": 0.5}}, "controller": b"\x00\xff"}
    folder = write(tmp_path, 20, metric=0.25, extra=extra)
    assert folder == tmp_path / "checkpoints" / "step-000020"
    manifest = checkpoint.verify(folder)
    assert (manifest.step, manifest.metric, manifest.config_hash, manifest.layout) == (20, 0.25, "abc", {"sizes": 1})
    assert {name: facts.size for name, facts in manifest.files.items()} == {
        "policy/data.distcp": 7,
        "extra/controller.bin": 2,
        "extra/progress.json": len(json.dumps(extra["progress"])),
    }
    assert checkpoint.read_extra(folder) == extra
    assert checkpoint.step_of(folder) == 20


def test_the_latest_is_the_one_of_the_highest_step(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    for step in (9, 100, 20):
        write(tmp_path, step)
    assert checkpoint.latest(tmp_path).name == "step-000100"


def test_steps_beyond_six_digits_are_found(tmp_path):
    write(tmp_path, 999999)
    assert checkpoint.latest(tmp_path) is not None
    write(tmp_path, 1000000)
    assert checkpoint.latest(tmp_path).name == "step-1000000"


def test_an_unfinished_checkpoint_is_never_read_and_cleared_by_the_next(tmp_path):
    write(tmp_path, 1)
    (checkpoint.begin(tmp_path, 2) / "half").write_bytes(b"x")
    assert checkpoint.latest(tmp_path).name == "step-000001"
    write(tmp_path, 3)
    assert names(tmp_path) == ["step-000001", "step-000003"]


def test_a_failure_while_completing_leaves_the_older_checkpoint_as_the_latest(tmp_path):
    write(tmp_path, 1)
    checkpoint.begin(tmp_path, 2)
    with pytest.raises(TypeError):
        checkpoint.complete(
            tmp_path, 2, {"bad": object()}, metric=None, layout={}, config_hash="", model={}, digests={}
        )
    assert checkpoint.latest(tmp_path).name == "step-000001"
    checkpoint.verify(checkpoint.latest(tmp_path))


def test_writing_a_step_again_replaces_it(tmp_path):
    write(tmp_path, 5, content=b"old")
    folder = write(tmp_path, 5, content=b"newer")
    assert (folder / "policy" / "data.distcp").read_bytes() == b"newer"
    write(tmp_path, 6)
    assert names(tmp_path) == ["step-000005", "step-000006"]


def flip(path):
    """Change one bit; the size stays."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "policy/data.distcp").unlink(), r"policy/data\.distcp is missing.*resume-from 1"),
        (lambda f: (f / "policy/data.distcp").write_bytes(b"w"), r"distcp has 1 bytes instead of 7.*--resume-from 1"),
        (lambda f: flip(f / "policy/data.distcp"), r"data\.distcp has the right size but not the bytes.*resume-from 1"),
        (lambda f: flip(f / "extra/progress.json"), r"progress\.json has the right size but not the.*resume-from 1"),
        (lambda f: (f / "policy/other").touch(), r"policy/other does not belong to this checkpoint.*move it away"),
        (lambda f: (f / "manifest.json").unlink(), r"manifest\.json cannot be read \(No such file.*resume-from 1"),
        (lambda f: (f / "manifest.json").write_text('{"step": 1'), r"manifest\.json is not a manifest.*resume-from 1"),
        (lambda f: (f / "manifest.json").write_text("[]"), r"manifest\.json is not a manifest.*resume-from 1"),
        (lambda f: flip(f / "manifest.json"), r"manifest\.json is not a manifest.*resume-from 1"),
    ],
)
def test_damage_is_named_with_the_checkpoint_to_go_on_from(tmp_path, damage, message):
    write(tmp_path, 1)
    folder = write(tmp_path, 2, extra={"progress": {"step": 2}})
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        read_all(folder)


def read_all(folder, parts=3):
    checkpoint.verify(folder)
    for part in range(parts):
        checkpoint.verify_contents(folder, part, parts)


def test_any_changed_byte_of_a_manifest_is_noticed(tmp_path):
    folder = write(tmp_path, 2)
    whole = (folder / "manifest.json").read_bytes()
    for place in range(len(whole)):
        (folder / "manifest.json").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match="is not a manifest"):
            checkpoint.verify(folder)


def test_every_file_is_some_rank_s_share(tmp_path):
    folder = write(tmp_path, 1, extra={"progress": {}})
    flip(folder / "policy/data.distcp")
    for parts in (1, 2, 5):
        found = []
        for part in range(parts):
            try:
                checkpoint.verify_contents(folder, part, parts)
            except CheckpointError as error:
                found.append(str(error))
        assert len(found) == 1


def test_a_hash_taken_while_writing_is_that_of_the_file(tmp_path):
    path = tmp_path / "file"
    with open(path, "wb") as file:
        stream = HashingStream(file)
        for part in (b"", b"ab", memoryview(b"c")):
            stream.write(part)
        assert stream.tell() == 3
    assert stream.hexdigest() == digest_of_file(path) == digest_of(b"abc")


def test_what_the_loop_gave_along_is_named_when_its_content_is_damaged(tmp_path):
    folder = write(tmp_path, 2)
    file = folder / "extra" / "progress.json"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=rf"{file.name} cannot be read \(UnicodeDecodeError.*damaged"):
        checkpoint.read_extra(folder)


def test_damage_of_the_only_checkpoint_says_to_start_again(tmp_path):
    folder = write(tmp_path, 2)
    (folder / "policy/data.distcp").unlink()
    with pytest.raises(CheckpointError, match="to start again"):
        checkpoint.verify(folder)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path):
    folder = write(tmp_path, 3)
    folder.rename(folder.with_name("step-000007"))
    with pytest.raises(checkpoint.CheckpointError, match=r"step-000007 is the checkpoint of step 3 .*step-000003"):
        checkpoint.verify(checkpoint.latest(tmp_path))


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    for step, metric in ((1, 0.1), (2, 0.9), (3, None), (4, 0.9), (5, 0.2), (6, 0.3)):
        write(tmp_path, step, metric)
    checkpoint.prune(tmp_path, keep_last=2, keep_best=True)
    assert names(tmp_path) == ["step-000004", "step-000005", "step-000006"]
    checkpoint.prune(tmp_path, keep_last=1, keep_best=False)
    assert names(tmp_path) == ["step-000006"]


def test_pruning_interrupted_halfway_leaves_no_damaged_checkpoint(tmp_path, monkeypatch):
    write(tmp_path, 1)
    write(tmp_path, 2)

    def die(path):
        os.unlink(path / "policy" / "data.distcp")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.prune(tmp_path, keep_last=1, keep_best=False)
    assert checkpoint.latest(tmp_path).name == "step-000002"
    assert not (tmp_path / "checkpoints" / "step-000001").exists()
    write(tmp_path, 3)
    assert names(tmp_path) == ["step-000002", "step-000003"]


def test_checkpoints_of_an_abandoned_future_are_discarded(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    checkpoint.discard_after(tmp_path, 1)
    assert names(tmp_path) == ["step-000001"]


def test_other_names_are_not_checkpoints(tmp_path):
    write(tmp_path, 1)
    (tmp_path / "checkpoints" / "step-000002.bak").mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()
    assert checkpoint.latest(tmp_path).name == "step-000001"
    with pytest.raises(CheckpointError, match="step-NNNNNN"):
        checkpoint.step_of(tmp_path / "notes")


def test_files_that_nfs_keeps_for_a_reader_do_not_count(tmp_path):
    folder = write(tmp_path, 4, extra={"progress": {"step": 4}})
    for place in (folder, folder / "policy", folder / "extra"):
        (place / ".nfs000000000123abcd00000001").write_bytes(b"gone")
    assert set(checkpoint.verify(folder).files) == {"policy/data.distcp", "extra/progress.json"}
    assert checkpoint.read_extra(folder) == {"progress": {"step": 4}}
    (folder / "policy" / ".nfs-notes").write_bytes(b"of a user")
    with pytest.raises(CheckpointError, match="nfs-notes does not belong to this checkpoint"):
        checkpoint.verify(folder)


def test_a_model_of_another_shape_is_refused_with_what_differs(tmp_path):
    folder = write(tmp_path, 4)
    manifest = checkpoint.verify(folder)
    checkpoint.require_model(folder, manifest, {"num_layers": 2, "qk_norm": True, "new": 1}, "models/x")
    told = r"step-000004 holds another model than model.path=models/x: num_layers 2 there, 3 here, qk_norm True there"
    with pytest.raises(CheckpointError, match=told):
        checkpoint.require_model(folder, manifest, {"num_layers": 3}, "models/x")


def test_a_manifest_without_facts_of_the_model_goes_with_every_model(tmp_path):
    folder = write(tmp_path, 4)
    facts = json.loads((folder / "manifest.json").read_text())
    del facts["model"], facts["digest"]
    (folder / "manifest.json").write_text(json.dumps(facts | {"digest": digest_of(json.dumps(facts).encode())}))
    checkpoint.require_model(folder, checkpoint.verify(folder), {"num_layers": 3}, "models/x")
