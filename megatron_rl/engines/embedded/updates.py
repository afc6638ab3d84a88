"""What may be done to the weights when: sessions, updates, their names, memory that was given away.

Belongs to the scheduler's thread, which nothing here leaves; how weights arrive is in `weight_service`.
"""

from __future__ import annotations

from .scheduler import Scheduler
from .weights import Weights, WeightsError
from .wire_tensors import NamedTensors

UNFLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)


class Updates:
    """One session at a time, opened and closed by its client; as in SGLang nothing else ends it.

    A session keeps nobody from generating, and an update that fails half-way keeps what it has replaced: whoever sends
    weights pauses first, and compares checksums at the end.

    Args:
        scheduler: whose requests and cache the weights concern.
        weights: the parameters.
    """

    def __init__(self, scheduler: Scheduler, weights: Weights) -> None:
        self._scheduler, self._weights = scheduler, weights
        self._open = False

    def begin(self) -> None:
        """Open a session. Raises WeightsError when one is open."""
        if self._open:
            raise WeightsError("a weight-update session is already open; call end_weight_update() first")
        self._open = True

    def end(self) -> None:
        """Close the session. Raises WeightsError when none is open."""
        if not self._open:
            raise WeightsError("no weight-update session is open; call begin_weight_update() first")
        self._open = False

    def require_session(self, function: str) -> None:
        """Raises WeightsError when no session is open."""
        if not self._open:
            raise WeightsError(f"{function} must run between begin_weight_update() and end_weight_update()")

    def load(self, tensors: NamedTensors, version: str | None, flush: bool) -> None:
        """Replace some parameters, then rename the weights and flush, if asked to.

        Raises:
            WeightsError: one of the tensors cannot be used, and none of these was; or there was nothing to flush with.
        """
        self._weights.replace(tensors)
        self._finish(version, flush)

    def load_from_disk(self, path: str, version: str | None, flush: bool) -> None:
        """Replace all parameters; needs no session. Raises WeightsError when nothing has been changed."""
        running = self._scheduler.num_running
        if flush and running:
            raise WeightsError(
                f"{running} requests are running on keys and values of the old weights, and flush_cache is true; "
                "pause with mode retract first, or send flush_cache false to keep them"
            )
        self._weights.update(path)
        self._finish(version, flush)

    def _finish(self, version: str | None, flush: bool) -> None:
        if version is not None:
            self._scheduler.name_weights(version)
        if flush and not self._scheduler.flush():
            raise WeightsError(UNFLUSHED)

    def release(self, flush: bool) -> None:
        """Let go of keys and values, if asked to. Raises WeightsError while requests run, or wait to run."""
        if not self._scheduler.idle:
            raise WeightsError("release_memory_occupation should be called only when server is idle.")
        if flush:
            self._scheduler.flush()

    def checksums(self) -> dict[str, str]:
        """See `Weights.checksums`."""
        return self._weights.checksums()
