"""Weights are updated while every row of an engine is taken: the probe of their log-probs has room, or does no harm."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.rollout import weight_update
from megatron_rl.rollout.control import EngineControl
from tests.contract.conftest import Reference
from tests.contract.servers import Server
from tests.contract.test_control import start_running

ROWS = 4
"""Of the servers here."""
PROBE = [70, 71, 72, 73]


@pytest.mark.parametrize("running", [ROWS - 1, ROWS], ids=["a row left", "full"])
def test_an_update_beside_requests_that_go_on_keeps_the_engine(
    server: Server, other_reference: Reference, running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.updated = True
    if running == ROWS:  # the probe stands behind requests that last longer than it may take
        monkeypatch.setattr(weight_update, "PROBE_TIMEOUT_S", 0.5)
    futures = start_running(server, running)
    control = EngineControl([server.url], api_key=server.api_key, timeout_s=60.0)
    update = control.begin_update(9)
    update.pause("retract")
    update.load_from_disk(server.other_model, {}, flush=True)
    update.compare()
    update.resume()
    expected = other_reference.log_probs(PROBE[:1], PROBE[1:], 1.0)
    # Where the probe is not answered at once, these are far off.
    wrong = expected if running < ROWS else np.full_like(expected, 100.0)
    update.probe(PROBE, wrong, 1e-4)
    still_running = not any(future.done() for future in futures)
    assert still_running
    assert update.failed == {}
    assert update.left == [server.url]
    assert update.unprobed == ([server.url] if running == ROWS else [])
    for number, future in enumerate(futures):
        server.ok("/abort_request", {"rid": f"long-{number}."})
        future.result(60)
    update._probes.result()
    late = update.late_probe()  # now there was room
    control.close()
    assert [*late] == update.unprobed + ([server.url] if running == ROWS else [])
    assert update.left == ([] if running == ROWS else [server.url])
    if running == ROWS:
        assert "further than engine.probe_tolerance=0.0001" in str(late[server.url])
