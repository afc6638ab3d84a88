"""Section `engine:`, the generation servers that the run starts or talks to."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from .base import Seconds, Section


class EngineConfig(Section):
    """Generation replicas that speak SGLang's HTTP protocol."""

    kind: Literal["embedded"] = "embedded"
    """`embedded`: transformers on the CPU, started by the run."""
    urls: list[str] = Field(default_factory=list)
    """Servers that already run; when given, none is started."""
    replicas: int = Field(1, ge=1)
    """Servers to start."""
    max_running_requests: int = Field(512, ge=1)
    """Sequences that one server decodes at once."""
    dtype: Literal["float32", "bfloat16", "model"] = "model"
    """Number format of the server's weights; `model` = model.dtype."""
    ready_timeout_s: Seconds = 300.0
    """Deadline for a started server to answer."""
    update_timeout_s: Seconds = 600.0
    """Deadline of one weight update over all servers."""
    keep_versions: int = Field(2, ge=1)
    """Weight version directories kept on disk."""

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: list[str]) -> list[str]:
        wrong = [url for url in urls if not _is_address(url)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not the address of a server; write it as http://HOST:PORT")
        if len({url.rstrip("/") for url in urls}) < len(urls):
            raise ValueError(f"{urls}: every server may stand once; remove the doubled one")
        return urls


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or the brackets of an IPv6 address do not match
        return False
