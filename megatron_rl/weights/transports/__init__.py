"""How new weights travel to the engines: one interface, three ways; when, to whom and what follows is decided above.

    disk        files that all engines read                            any placement, any engine
    broadcast   process groups of trainer ranks and engines            engines on devices of their own
    ipc         memory of a device that trainer and engine share       colocated (on a CPU: the values themselves)

All ranks call the methods of a transport in the same order. An engine that fails is no error: it is named in the
result, and what it holds is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Replies(Protocol):
    """Answers and failures by URL."""

    @property
    def answers(self) -> Mapping[str, Any]: ...

    @property
    def failures(self) -> Mapping[str, Exception]: ...


class Pending(Protocol):
    """An HTTP call to several engines that is on its way."""

    @property
    def done(self) -> bool: ...

    def so_far(self) -> Replies: ...

    def cancel(self) -> None: ...


class Engines(Protocol):
    """HTTP to engines, from whichever rank; calls go on while the caller does something else."""

    def post(self, path: str, bodies: Mapping[str, Any], timeout_s: float) -> Pending: ...


class Transport(Protocol):
    """One way to travel."""

    in_session: bool
    """Whether engines want a session around it (`/begin_weight_update`), and the version named afterwards."""

    def prepare(self, version: int) -> None:
        """What can be done before the engines are paused. Collective."""

    def send(self, version: int, urls: Sequence[str]) -> dict[str, str]:
        """Give the weights to these engines, which are paused. Collective.

        Returns:
            Why it failed, by URL of each engine that did not get them as a whole; the same on all ranks.
        """
