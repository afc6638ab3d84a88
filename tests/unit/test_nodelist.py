"""Short lists of nodes become names; what Slurm would not write is refused (against the real scontrol: tests/slurm)."""

from __future__ import annotations

import pytest

from megatron_rl.cluster.nodelist import NodelistError, expand


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("node1", ["node1"]),
        ("login,gpu7", ["login", "gpu7"]),
        ("gpu[08-10,3],login", ["gpu08", "gpu09", "gpu10", "gpu3", "login"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("a[1,3]-ib,b-[2].x", ["a1-ib", "a3-ib", "b-2.x"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_short_forms_become_names_in_order(nodelist: str, names: list[str]) -> None:
    assert expand(nodelist) == names


@pytest.mark.parametrize(
    ("nodelist", "problem"),
    [
        ("", "a name is expected at character 1"),
        ("a,,b", "a name is expected at character 3"),
        ("a,", "a name is expected at character 3"),
        ("a[1-2", "bracket without its other half at 2"),
        ("a1]", "bracket without its other half at 3"),
        ("a[2-1]", "'2-1' is no number and no range"),
        ("a[]", "'' is no number"),
        ("a[1-x]", "'1-x' is no number"),
        ("a[٣-٥]", "'٣-٥' is no number"),
        ("a[1-999999999999]", "'1-999999999999' stands for more than 65536 names"),
        ("a[1-40000,50000-90000]", "stands for more than 65536 names"),
        ("a[1-1000]b[1-1000]", "'a[1-1000]b[1-1000]' stands for more than 65536 names"),
        (f"a[{'9' * 5000}]", "is no number"),
    ],
)
def test_what_is_no_list_of_nodes_is_refused_with_its_place(nodelist: str, problem: str) -> None:
    with pytest.raises(NodelistError, match="is not a list of nodes") as refusal:
        expand(nodelist)
    assert problem in str(refusal.value)
    assert repr(nodelist) in str(refusal.value)
