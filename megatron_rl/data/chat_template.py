"""Messages to text by a model's Jinja chat template, with the names and filters that such templates may use.

What templates expect is set by `transformers.apply_chat_template`, which imports torch and so cannot serve a process
that must start at once; a test holds the two equal. Tokens are `tokenizer.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .records import DataError


class ChatTemplate:
    """A compiled template. `origin` is the file it came from, for messages."""

    def __init__(self, source: str, origin: str, special_tokens: Mapping[str, str]) -> None:
        self._origin = origin
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"{origin}: not a valid chat template (line {error.lineno}: {error.message})") from None

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text, ending with what introduces the assistant's turn.

        Raises `DataError` when the template refuses the messages (an unknown role, two user turns in a row, ...).
        """
        try:
            return self._template.render(
                # Copies: a template may not change the caller's records.
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            roles = [message.get("role") for message in messages]
            raise DataError(f"{self._origin}: the chat template refuses messages of roles {roles}: {error}") from None


def read_chat_template(model_path: Path, tokenizer_config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Source and origin of the template of a Hugging Face directory, or None if it has none.

    `chat_template.jinja` comes before the key `chat_template` of `tokenizer_config.json`, which is a string or a list
    of named templates, of which `default` counts.
    """
    file = model_path / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8"), str(file)
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return None if template is None else (template, f"{model_path / 'tokenizer_config.json'}, key chat_template")


def _environment() -> ImmutableSandboxedEnvironment:
    # A template comes with a downloaded model, so it is untrusted: sandboxed, and unable to change what it is given.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for other uses; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012  # jinja reads it as a class attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would put \u003c into a prompt instead of <.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.now().strftime(fmt)
