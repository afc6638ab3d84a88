"""Which slow tests CI runs in the time it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import slow_files
from tests.slow_files import AREAS, ROOT, choose, run_within
from tests.slow_files import slow_files as found_files

COSTS = {"tests/e2e/test_kill.py": 200.0, "tests/parallel/test_layouts.py": 50.0}


def chosen(touched: set[str] | None) -> list[str]:
    return [choice.file for choice in choose(COSTS, touched, COSTS) if choice.runs]


def test_a_file_runs_when_what_it_guards_its_helpers_or_itself_were_touched() -> None:
    assert chosen({"README.md", "megatron_rl/kernels/logprob.py"}) == ["tests/parallel/test_layouts.py"]
    assert chosen({"megatron_rl/cluster/local.py"}) == ["tests/e2e/test_kill.py"]
    assert chosen({"tests/e2e/live.py"}) == ["tests/e2e/test_kill.py"]
    assert chosen({"tests/e2e/test_circle.py"}) == []
    assert chosen({"tests/parallel/test_layouts.py"}) == ["tests/parallel/test_layouts.py"]


def test_without_history_all_run_and_the_cheapest_come_first() -> None:
    assert chosen(None) == ["tests/parallel/test_layouts.py", "tests/e2e/test_kill.py"]


def test_a_file_that_was_never_measured_waits_for_that() -> None:
    (choice,) = choose(["tests/e2e/test_new.py"], None, COSTS)
    assert not choice.runs
    assert "was never measured" in choice.reason


def test_what_fetches_something_runs_when_asked_only() -> None:
    for fetching in (False, True):
        choices = choose(slow_files.FETCHES, None, dict.fromkeys(slow_files.FETCHES, 9.0), fetching)
        assert [choice.runs for choice in choices] == [fetching] * len(slow_files.FETCHES)


def test_what_does_not_fit_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(slow_files, "run_file", lambda file, *_: ran.append(file) or 1)
    failed, left_out = run_within(choose(COSTS, None, COSTS), 190.0, 1.5, [])
    assert ran == failed == ["tests/parallel/test_layouts.py"]
    assert left_out == ["tests/e2e/test_kill.py: takes about 300 s, and 190 s are left"]


def test_a_file_that_does_not_end_is_stopped_and_is_no_failure(tmp_path: Path) -> None:
    test = tmp_path / "test_endless.py"
    test.write_text("import pytest, time\n@pytest.mark.slow\ndef test_it():\n    time.sleep(3600)\n")
    choice = slow_files.Choice(str(test), 0.1, True, "a test")
    failed, left_out = run_within([choice], 3.0, 1.0, ["-p", "no:cacheprovider"])
    assert failed == []
    assert left_out == [f"{test}: stopped when the time was up, after 3 s"]


def test_every_area_names_tests_and_paths_that_exist() -> None:
    files = found_files()
    assert [key for key in AREAS if not any(file.startswith(key) for file in files)] == []
    paths = {path for starts in AREAS.values() for path in starts}
    assert [path for path in sorted(paths) if not list(ROOT.glob(f"{path.rstrip('/')}*"))] == []
