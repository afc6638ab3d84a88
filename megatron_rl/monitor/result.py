"""The outcome of a finished run: RUN/result.json and the last line on the terminal. Measuring is not done here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import orjson

from megatron_rl.files import regular, write_atomic

FILE_NAME = "result.json"
Interval = tuple[float, float]


@dataclass(frozen=True)
class RunResult:
    """Held-out pass@1 before and after reinforcement, with 95 % intervals (low, high); shares are in 0 to 1."""

    pass_at_1_before: float | None
    pass_at_1_after: float | None
    pass_at_1_before_interval: Interval | None
    pass_at_1_after_interval: Interval | None
    format_valid_before: float | None
    format_valid_after: float | None
    train_seconds: float
    steps: int
    seed: int
    run_dir: str

    @classmethod
    def from_evaluations(
        cls,
        before: Mapping[str, float | None] | None,
        after: Mapping[str, float | None] | None,
        *,
        train_seconds: float,
        steps: int,
        seed: int,
        run_dir: str | Path,
    ) -> Self:
        """Take the `eval/...` metrics of the first and the last evaluation; either may be missing."""
        before, after = before or {}, after or {}
        return cls(
            pass_at_1_before=_share(before, "pass_at_1"),
            pass_at_1_after=_share(after, "pass_at_1"),
            pass_at_1_before_interval=_interval(before),
            pass_at_1_after_interval=_interval(after),
            format_valid_before=_share(before, "format_valid"),
            format_valid_after=_share(after, "format_valid"),
            train_seconds=round(train_seconds, 1),
            steps=steps,
            seed=seed,
            run_dir=str(run_dir),
        )

    def write(self) -> Path:
        """Write `result.json` into the run's directory, atomically, and return its path."""
        content = orjson.dumps(self, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        return write_atomic(Path(self.run_dir) / FILE_NAME, content)

    def line(self) -> str:
        """`RESULT {json}` on one line, for scripts that read the last line of a run."""
        return f"RESULT {orjson.dumps(self).decode()}"

    @classmethod
    def read(cls, run_dir: str | Path) -> Self | None:
        """The result of a finished run, None while there is none. Raises ValueError naming an unusable file."""
        path = Path(run_dir) / FILE_NAME
        if not path.exists():
            return None
        try:
            values: dict[str, Any] = orjson.loads(regular(path).read_bytes())
            known = {field.name: values[field.name] for field in fields(cls)}
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not the result of a run ({error!r}); remove it to go on without it") from error
        for key in ("pass_at_1_before_interval", "pass_at_1_after_interval"):
            known[key] = tuple(known[key]) if known[key] else None
        return cls(**known)


def _share(metrics: Mapping[str, float | None], name: str) -> float | None:
    """Without the noise of its last digits; not so short that rounding it again would move what is shown."""
    value = metrics.get(f"eval/{name}")
    return None if value is None else round(value, 6)


def _interval(metrics: Mapping[str, float | None]) -> Interval | None:
    low, high = _share(metrics, "pass_at_1_low"), _share(metrics, "pass_at_1_high")
    return None if low is None or high is None else (low, high)
