"""What an engine of the run knows of the others: who serves, who has failed. Files in RUN/endpoints, nobody is asked.

engine-<i>.json    published by an engine once it serves (its supervisor: `engine_process.py`)
failed-<i>.json    empty, there from a failed start until the next one, or for good
"""

from __future__ import annotations

from .run_dir import RunDir


class Fellows:
    """The other replicas of the run, as replica number `replica` of `replicas` sees them."""

    def __init__(self, run: RunDir, replica: int, replicas: int) -> None:
        self._run, self._mine = run, run.engine_failure(replica)
        self._others = [i for i in range(replicas) if i != replica]

    def may_serve(self) -> bool:
        """Whether one of them serves or is being started."""
        return any(not self._run.engine_failure(i).exists() for i in self._others)

    def serve(self) -> bool:
        """Whether one of them has come up."""
        up = (i for i in self._others if self._run.engine_endpoint(i).exists())
        return any(not self._run.engine_failure(i).exists() for i in up)

    def tell_failed(self) -> None:
        """This replica does not serve."""
        self._mine.touch()

    def tell_started(self) -> None:
        """This replica is started, once more or for the first time."""
        self._mine.unlink(missing_ok=True)
