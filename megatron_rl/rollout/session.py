"""How this room speaks HTTP: a keep-alive session with the right settings, errors in words. No route is known here."""

from __future__ import annotations

import re
import resource
from typing import Any

import aiohttp
import orjson

WANTED_OPEN_FILES = 65536
CONNECT_TIMEOUT_S = 10.0


def open_session(token: str | None = None) -> aiohttp.ClientSession:
    """A session for many concurrent requests on few hosts; deadlines are set by the caller. Needs a running loop.

    Proxy variables are ignored: engines and the controller are always reached directly.
    """
    raise_open_file_limit()
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {}),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),  # nothing here is compressed, or chosen by them
        cookie_jar=aiohttp.DummyCookieJar(),  # engines set none, and looking for them takes time for every request
        trust_env=False,
        read_bufsize=2**20,
    )


def raise_open_file_limit() -> None:
    """One connection per request in flight: lift the soft limit of open files as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(WANTED_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def error_text(body: bytes) -> str:
    """What an error body says, on one line: `error.message`, `message` or `detail` of a JSON object, else its text.

    Tags are left out: what answers may be a web server or a proxy instead of an engine.
    """
    try:
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return " ".join(re.sub(r"<[^<>]*>", " ", body.decode(errors="replace")).split())[:500]
    while isinstance(value, dict):
        value = next((value[k] for k in ("error", "message", "detail") if k in value), str(value))
    return str(value)[:500]
