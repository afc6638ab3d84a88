"""Aborting, pausing, flushing: what happens to requests that run and to requests that wait."""

from __future__ import annotations

import http.client
import json
import select
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.contract.conftest import Reference
from tests.contract.servers import Server, generate_body

PROMPT = [40, 41, 42]
LONG = {"max_new_tokens": 3000, "ignore_eos": True}


def start_running(server: Server, count: int = 1, prefix: str = "long", **params: Any) -> list[Future[Any]]:
    """Requests that have drawn at least ten tokens each and are far from done."""
    futures = [server.generate_later(PROMPT, rid=f"{prefix}-{i}.", **{**LONG, **params}) for i in range(count)]
    enough = count * (len(PROMPT) + 10)
    server.wait_for_load(
        f"{count} requests to run", lambda load: load["num_running_reqs"] == count and load["num_used_tokens"] >= enough
    )
    return futures


def more_than(tokens: int) -> Callable[[dict[str, Any]], bool]:
    """Whether more tokens than that are in the cache."""
    return lambda load: load["num_used_tokens"] > tokens


def let_it_turn(server: Server) -> None:
    """Ten turns of the scheduler's loop, each of which would have drawn a token for whatever runs."""
    for _ in range(10):
        assert server.call("/flush_cache", {}).status in (200, 400)  # the scheduler itself says whether it may


def post_generate(server: Server, **params: Any) -> http.client.HTTPConnection:
    """A connection over which a request was sent whole; its answer is still to be read."""
    where = urlsplit(server.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    connection.request("POST", "/generate", json.dumps(generate_body(PROMPT, **params)), server.headers)
    return connection


def end_after_ten_more(server: Server, future: Future[Any], tokens: int) -> dict[str, Any]:
    """The answer of request long-0., ended once it has drawn ten tokens more than are in the cache with `tokens`."""
    server.wait_for_load("ten more tokens", more_than(tokens + 10))
    server.ok("/abort_request", {"rid": "long-0."})
    return future.result(60)


def assert_partial(answer: dict[str, Any]) -> None:
    meta = answer["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["finish_reason"]["message"] == "Aborted"
    assert 10 <= len(answer["output_ids"]) < LONG["max_new_tokens"]
    assert len(answer["output_ids"]) == meta["completion_tokens"] == len(meta["output_token_logprobs"])
    assert meta["prompt_tokens"] == len(PROMPT)


def test_aborted_while_running_keeps_tokens_and_log_probs(server: Server, reference: Reference) -> None:
    (future,) = start_running(server, temperature=0)
    server.ok("/abort_request", {"rid": "long-0."})
    answer = future.result(60)
    assert_partial(answer)
    assert answer["output_ids"][:20] == reference.greedy(PROMPT, len(answer["output_ids"][:20]))


def test_aborted_while_waiting_has_no_tokens(server: Server) -> None:
    running = start_running(server, server.max_running_requests)
    waiting = server.generate_later(PROMPT, rid="late-0.", **LONG)
    server.wait_for_load("one to wait", lambda load: load["num_waiting_reqs"] == 1)
    server.ok("/abort_request", {"rid": "late-0."})
    answer = waiting.result(60)
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert "prompt_tokens" not in answer["meta_info"]
    assert not any(future.done() for future in running)
    server.ok("/abort_request", {"abort_all": True})
    for future in running:
        assert_partial(future.result(60))


def test_abort_takes_a_live_id_and_ends_those_that_begin_with_it_too(server: Server) -> None:
    group = server.generate_later([PROMPT] * 2, rid=["group-1", "group-12"], **LONG)
    other = server.generate_later(PROMPT, rid="group-2.", **LONG)
    server.wait_for_load("all to run", lambda load: load["num_running_reqs"] == 3)
    server.ok("/abort_request", {"rid": "group-"})  # the beginning of all, but no id itself
    server.wait_for_load("ten more tokens", more_than(server.load()["num_used_tokens"] + 10))
    assert not group.done()
    server.ok("/abort_request", {"rid": "group-1"})
    assert [a["meta_info"]["finish_reason"]["type"] for a in group.result(60)] == ["abort"] * 2
    server.wait_for_load("the other to run alone", lambda load: load["num_running_reqs"] == 1)
    server.ok("/abort_request", {"rid": "group-2."})
    assert other.result(60)["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("body", [{"rid": "nobody"}, {"rid": ""}, {}])
def test_abort_of_nobody_changes_nothing(server: Server, body: dict[str, Any]) -> None:
    (future,) = start_running(server)
    server.ok("/abort_request", body)
    server.wait_for_load("ten more tokens", more_than(server.load()["num_used_tokens"] + 10))
    assert not future.done()


def test_in_place_pause_freezes_and_goes_on(server: Server, reference: Reference) -> None:
    (future,) = start_running(server, temperature=0)
    answer = server.ok("/pause_generation", {"mode": "in_place"})
    assert answer == {"message": "Generation paused successfully.", "status": "ok"}
    assert server.call("/flush_cache", {}).status == 400  # its keys and values are in use
    frozen = server.load()  # only now: a real SGLang answers before the pause has reached its scheduler
    let_it_turn(server)
    assert server.load()["num_used_tokens"] == frozen["num_used_tokens"]
    assert frozen["num_running_reqs"] == 1
    assert server.ok("/continue_generation", {})["status"] == "ok"
    result = end_after_ten_more(server, future, frozen["num_used_tokens"])
    assert result["meta_info"]["num_retractions"] == 0
    assert result["output_ids"][:60] == reference.greedy(PROMPT, 60)[: len(result["output_ids"])]


def test_retract_pause_frees_the_cache_and_the_sequence_goes_on(server: Server, reference: Reference) -> None:
    (future,) = start_running(server, temperature=0)
    server.ok("/pause_generation", {"mode": "retract"})
    server.ok("/flush_cache", {})  # which is refused while requests run
    server.ok("/continue_generation", {})
    result = end_after_ten_more(server, future, len(PROMPT) + 10)
    assert result["meta_info"]["num_retractions"] == 1
    assert result["output_ids"][:60] == reference.greedy(PROMPT, 60)[: len(result["output_ids"])]


def test_aborting_a_retracted_request_keeps_what_it_had(server: Server) -> None:
    (future,) = start_running(server)
    server.ok("/pause_generation", {"mode": "retract"})
    server.ok("/abort_request", {"abort_all": True})
    answer = future.result(60)
    assert answer["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
    assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"])


def test_abort_pause_ends_all_and_holds_newcomers_until_continue(server: Server) -> None:
    running = start_running(server, 2)
    server.ok("/pause_generation", {})  # abort is the default
    for future in running:
        assert_partial(future.result(10))
    held = post_generate(server, max_new_tokens=2, ignore_eos=True)
    for _ in range(10):
        assert server.load()["num_running_reqs"] == 0
    assert select.select([held.sock], [], [], 0)[0] == []  # no answer
    server.ok("/continue_generation", {})
    assert json.loads(held.getresponse().read())["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    held.close()


def test_flush_is_refused_while_requests_run(server: Server) -> None:
    assert server.call("/flush_cache", {}).status == 200
    start_running(server)
    assert server.call("/flush_cache", {}).status == 400


def test_requests_join_and_leave_a_running_batch(server: Server, reference: Reference) -> None:
    (long,) = start_running(server, temperature=0)
    short = [server.generate([50 + i], temperature=0, max_new_tokens=5, ignore_eos=True) for i in range(3)]
    assert not long.done()
    assert [a["output_ids"] for a in short] == [reference.greedy([50 + i], 5) for i in range(3)]
    server.ok("/abort_request", {"rid": "long-0."})
    output = long.result(60)["output_ids"]
    assert output[:60] == reference.greedy(PROMPT, 60)[: len(output)]


def test_a_client_that_goes_away_frees_its_place(embedded_server: Server) -> None:
    server = embedded_server  # a real SGLang looks after its clients every few seconds only; ours aborts by id
    connection = post_generate(server, **LONG)
    server.wait_for_load("the request to run", lambda load: load["num_running_reqs"] == 1)
    connection.close()
    reached = 0

    def dropped(load: dict[str, Any]) -> bool:
        nonlocal reached
        reached = max(reached, load["num_used_tokens"])
        return load["num_running_reqs"] == 0

    server.wait_for_load("the request to be dropped", dropped)
    assert reached < LONG["max_new_tokens"] / 2, "it was dropped because it was done, not because its client had gone"


def test_what_a_server_tells_of_itself(server: Server) -> None:
    for path in ("/ready", "/health"):
        assert server.call(path).status == 200
    info = server.ok("/model_info")
    assert info["model_path"] == str(server.model)
    assert info["weight_version"] == "w0"
    assert server.ok("/server_info")["version"]
    load = server.load()
    assert load["num_running_reqs"] == load["num_waiting_reqs"] == 0
