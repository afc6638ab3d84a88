"""Log lines name role, rank, node and step, in the file and on the console."""

from __future__ import annotations

import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.monitor.logs import close_logging, setup_logging

log = logging.getLogger("megatron_rl.somewhere")


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("megatron_rl")
    levels = root.level, ours.level
    yield
    close_logging()
    logging.captureWarnings(False)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def test_a_line_names_time_level_role_rank_node_step_and_logger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = setup_logging("trainer", 3, tmp_path, node="node07", console_level="INFO")
    log.info("before any step")
    context.step = 12
    log.warning("slow %d", 5)
    lines = (tmp_path / "logs" / "trainer-3.log").read_text("utf-8").splitlines()
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"
    assert re.fullmatch(stamp + r" INFO    trainer-3@node07 step=- megatron_rl\.somewhere: before any step", lines[0])
    assert re.fullmatch(stamp + r" WARNING trainer-3@node07 step=12 megatron_rl\.somewhere: slow 5", lines[1])
    assert capsys.readouterr().err.splitlines() == lines


def test_levels_apply_to_our_loggers_and_other_packages_are_heard_from_warning_on(tmp_path: Path) -> None:
    setup_logging("controller", 0, tmp_path, "DEBUG")
    log.debug("ours")
    logging.getLogger("aiohttp.access").info("chatter")
    logging.getLogger("aiohttp.server").warning("theirs")
    warnings.warn("through the warnings module", stacklevel=1)
    text = (tmp_path / "logs" / "controller-0.log").read_text("utf-8")
    assert "ours" in text
    assert "theirs" in text
    assert "through the warnings module" in text
    assert "chatter" not in text


def test_only_rank_zero_informs_on_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        setup_logging("trainer", rank, tmp_path)
        log.info("information of rank %d", rank)
        log.warning("warning of rank %d", rank)
    shown = capsys.readouterr().err
    assert "information of rank 0" in shown
    assert "information of rank 1" not in shown
    assert "warning of rank 1" in shown
    assert "information of rank 1" in (tmp_path / "logs" / "trainer-1.log").read_text("utf-8")


def test_setting_up_again_neither_doubles_lines_nor_loses_earlier_ones(tmp_path: Path) -> None:
    setup_logging("trainer", 0, tmp_path)
    log.info("first")
    setup_logging("trainer", 0, tmp_path)
    log.info("second")
    lines = (tmp_path / "logs" / "trainer-0.log").read_text("utf-8").splitlines()
    assert [line.rsplit(" ", 1)[1] for line in lines] == ["first", "second"]


def test_the_console_follows_a_replaced_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    setup_logging("trainer", 0, None)
    replaced = io.StringIO()  # what a live display does while it is on
    monkeypatch.setattr(sys, "stderr", replaced)
    log.error("seen")
    assert replaced.getvalue().rstrip().endswith("seen")


def test_an_unknown_level_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="level='LOUD' is not a log level; choose one of DEBUG, INFO, WARNING, ERROR"):
        setup_logging("trainer", 0, tmp_path, "LOUD")
