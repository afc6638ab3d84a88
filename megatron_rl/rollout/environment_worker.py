"""The process that runs environments: calls come in on its standard input, answers go out on its standard output.

Started by `episodes.py` as `python -m megatron_rl.rollout.environment_worker PARENT_PID`. The first frame names the
class; the answer to it is `{"ready": true}` or `{"error": message}`. Then every call but `forget` has one answer. It
may be killed at any moment, and does not outlive its parent.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any, BinaryIO

from megatron_rl.config import ConfigError
from megatron_rl.rewards import frames
from megatron_rl.rewards.evaluate import last_line
from megatron_rl.rewards.worker import run

from .environment import Environment, EnvironmentFailed, load_environment, read_opening, read_step, role_of


def serve(calls: BinaryIO, answers: BinaryIO) -> int:
    """Read the class, then calls, until the end of `calls`."""
    first = frames.read(calls)
    if first is None:
        return 0
    try:
        kind = load_environment(first["environment"], first["args"])
    except ConfigError as error:
        _send(answers, {"error": str(error)})
        return 1
    _send(answers, {"ready": True, "role": role_of(kind)})
    running: dict[int, Environment] = {}
    while (call := frames.read(calls)) is not None:
        if "forget" in call:
            running.pop(call["forget"], None)
        else:
            _send(answers, _answer(kind, first["args"], running, call))
    return 0


def _answer(
    kind: type[Environment], args: dict[str, Any], running: dict[int, Environment], call: dict[str, Any]
) -> dict[str, Any]:
    number = call["episode"]
    try:
        if "reset" in call:
            running[number] = kind(**args)
            return {"opening": read_opening(running[number].reset(frames.record_of(call["reset"])))}
        return asdict(read_step(running[number].step(call["step"])))
    except KeyboardInterrupt:
        raise
    except EnvironmentFailed as error:
        return {"error": str(error)}
    except BaseException as error:  # an environment that calls sys.exit must not end the others
        return {"error": f"{'reset' if 'reset' in call else 'step'} raised {last_line(error)}"}


def _send(stream: BinaryIO, value: dict[str, Any]) -> None:
    try:
        frame = frames.encode(value)
    except TypeError as error:  # text that is not valid Unicode
        frame = frames.encode({"error": f"its answer cannot be sent on: {error}"})
    stream.write(frame)
    stream.flush()


if __name__ == "__main__":
    sys.exit(run(serve))
