"""Version directories on disk: which are seen, which are pruned."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.weights.version_dir import list_versions, prune_versions, version_path


def make(folder: Path, *versions: int) -> None:
    for version in versions:
        version_path(folder, version).mkdir(parents=True)
        (version_path(folder, version) / "model.safetensors").write_bytes(b"0")


def test_versions_are_named_with_six_digits_and_listed_in_order(tmp_path: Path) -> None:
    make(tmp_path, 12, 2, 1000000)
    (tmp_path / "v00003").mkdir()  # not one of ours
    (tmp_path / "v000004").write_text("a file")
    assert list_versions(tmp_path) == [
        (2, tmp_path / "v000002"),
        (12, tmp_path / "v000012"),
        (1000000, tmp_path / "v1000000"),
    ]
    assert list_versions(tmp_path / "absent") == []


def test_pruning_keeps_the_newest_and_those_in_use(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4, 5)
    prune_versions(tmp_path, keep=2, in_use=[2])
    assert [version for version, _ in list_versions(tmp_path)] == [2, 4, 5]


def test_pruning_removes_what_crashes_left(tmp_path: Path) -> None:
    make(tmp_path, 1)
    for name in (".writing-v000002", ".removing-v000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"0")
    (tmp_path / "notes").mkdir()
    prune_versions(tmp_path, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "v000001"]
