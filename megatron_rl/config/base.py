"""What every configuration section shares: frozen, strict about unknown keys, documented field by field.

No section lives here, and no check that needs more than one section (see `checks.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

Seconds = Annotated[float, Field(gt=0, le=1e6)]
"""A deadline. Bounded (11 days), because the system's own timers overflow at some length."""


Processes = Annotated[int, Field(ge=1, le=10_000)]
"""Processes, devices or nodes. Bounded, because plans and placements write each of them down."""

Weight = Annotated[float, Field(ge=0, le=1e6)]
"""Factor of a term. Bounded, because what is computed with it in single precision must stay finite."""

Score = Annotated[float, Field(ge=-1e6, le=1e6)]
"""A reward, or a bound on what is measured; bounded likewise."""


YamlOff = BeforeValidator(lambda value: "off" if value is False else value)
"""For words with `off` among them, which YAML 1.1 reads as false where it is bare."""


class ConfigError(ValueError):
    """A configuration that cannot run. The message names key, value, what is allowed and what to do."""


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys refused, the docstring under a field is its description."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic reads true as 1: `lr: true` must not train at a rate of 1."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if _has_boolean(value) and _mentions(annotation, (int, float)) and not _mentions(annotation, (bool,)):
            raise ValueError(f"{value!r} is not a number; write one")
        return value

    @field_validator("*")
    @classmethod
    def _exact_as_a_float(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > 2**53:
            raise ValueError(f"a number of {len(str(abs(value)))} digits; write one of at most {2**53:,}")
        return value


def _has_boolean(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, list | tuple) and any(isinstance(v, bool) for v in value))


def _mentions(annotation: Any, types: tuple[type, ...]) -> bool:
    return annotation in types or any(_mentions(part, types) for part in get_args(annotation))
