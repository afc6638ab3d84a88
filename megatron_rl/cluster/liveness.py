"""Whether an engine that runs still answers: it is asked in a thread, its silence is counted here; nothing is ended.

Waits for: one answer at a time, each up to the limit of the silence. What follows from silence: `engine_process.py`.
"""

from __future__ import annotations

import http.client
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

LONGEST_TICK_S = 1.0
"""Most that counts of the time between two looks: an engine is not to blame for a supervisor that was stopped too."""
LONGEST_PAUSE_S = 5.0
QUESTION = "/server_info"
"""SGLang and the embedded engine ask their scheduler before they answer it, also while they are paused; `/ready` and
`/v1/loads` are answered without it, `/health_generate` generates."""


class Silence:
    """Counts the time without an answer, in steps: look at it regularly by `lasts`.

    >>> clock = iter([0.0, 0.9, 1.8, 1.9, 60.0, 61.0]).__next__
    >>> silence = Silence(1.5, clock)
    >>> silence.lasts(), silence.lasts()
    (False, True)
    >>> silence.answered()
    >>> silence.lasts(), silence.lasts(), silence.lasts()  # the machine slept: that counts as one second
    (False, False, True)
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s, self._clock = limit_s, clock
        self._counted_s, self._looked_at = 0.0, clock()
        self._has_answered = False

    def answered(self) -> None:
        """Count from the beginning; from any thread."""
        self._has_answered = True

    def lasts(self) -> bool:
        """Whether it has lasted longer than the limit."""
        now = self._clock()
        if self._has_answered:
            self._has_answered, self._counted_s = False, 0.0
        else:
            self._counted_s += min(now - self._looked_at, LONGEST_TICK_S)
        self._looked_at = now
        return self._counted_s > self.limit_s


def listen(silence: Silence, url: str, api_key: str | None, over: threading.Event) -> None:
    """Ask the engine at `url` again and again, in a thread that ends with `over`; `silence` hears of every answer.

    An answer of any status counts, since a scheduler that hangs gives none; that an engine has ended, its exit code
    says. Only one question is open at a time: an engine that is busy for minutes must not find a queue of them.
    """

    def run() -> None:
        while not over.is_set():
            if answers(url, api_key, silence.limit_s):
                silence.answered()
            over.wait(min(LONGEST_PAUSE_S, silence.limit_s / 4))

    threading.Thread(target=run, name=f"liveness of {url}", daemon=True).start()


def answers(url: str, api_key: str | None, timeout_s: float) -> bool:
    """Whether the engine answers the question within the time."""
    request = urllib.request.Request(url + QUESTION)
    if api_key is not None:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError, http.client.HTTPException):  # closed, reset, too late; half an answer
        return False
