"""Log lines name role, rank and node, on whatever standard error is."""

from __future__ import annotations

import io
import logging
import re
import socket
import sys
import warnings
from collections.abc import Iterator

import pytest

from megatron_rl.monitor.logs import setup_logging

log = logging.getLogger("megatron_rl.somewhere")


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("megatron_rl")
    levels, handlers = (root.level, ours.level), list(root.handlers)
    yield
    root.handlers = handlers
    logging.captureWarnings(False)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def test_a_line_names_time_level_role_rank_node_and_logger(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("trainer", 3)
    log.warning("slow %d", 5)
    who = f"trainer-3@{socket.gethostname().partition('.')[0]}"
    line = rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{{3}} WARNING {re.escape(who)} megatron_rl\.somewhere: slow 5\n"
    assert re.fullmatch(line, capsys.readouterr().err)


def test_levels_apply_to_our_loggers_and_other_packages_are_heard_from_warning_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging("controller", 1, "DEBUG")
    log.debug("ours")
    logging.getLogger("aiohttp.access").info("chatter")
    logging.getLogger("aiohttp.server").warning("theirs")
    warnings.warn("through the warnings module", stacklevel=1)
    text = capsys.readouterr().err
    assert "ours" in text
    assert "theirs" in text
    assert "through the warnings module" in text
    assert "chatter" not in text


def test_setting_up_again_does_not_double_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for level in ("ERROR", "INFO"):
        setup_logging("trainer", 0, level)
        log.info("said")
    assert capsys.readouterr().err.count("said") == 1


def test_the_console_follows_a_replaced_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    setup_logging("trainer", 0)
    replaced = io.StringIO()  # what a live display does while it is on
    monkeypatch.setattr(sys, "stderr", replaced)
    log.error("seen")
    assert replaced.getvalue().rstrip().endswith("seen")
