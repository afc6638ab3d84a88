"""What a supervisor asks: both servers answer it paused or not, and neither when what decodes stands still."""

from __future__ import annotations

import os
import signal

import psutil

from megatron_rl.cluster.liveness import answers
from tests.contract.servers import Server

PATIENCE_S, IMPATIENCE_S = 60.0, 3.0


def test_the_question_is_answered_paused_or_not_and_a_wrong_key_is_an_answer_too(server: Server) -> None:
    assert answers(server.url, server.api_key, PATIENCE_S)
    assert answers(server.url, "wrong", PATIENCE_S)
    server.ok("/pause_generation", {"mode": "in_place"})
    assert answers(server.url, server.api_key, PATIENCE_S)


def test_a_server_whose_scheduler_stands_still_is_silent(server: Server) -> None:
    assert server.process is not None
    tree = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    (decoding,) = tree[:1] if server.kind == "embedded" else [p for p in tree if "scheduler" in " ".join(p.cmdline())]
    os.kill(decoding.pid, signal.SIGSTOP)
    try:
        assert not answers(server.url, server.api_key, IMPATIENCE_S)
        if server.kind == "sglang":
            assert server.call("/ready").status == 200  # which is why that is not the question
    finally:
        os.kill(decoding.pid, signal.SIGCONT)
    assert answers(server.url, server.api_key, PATIENCE_S)
