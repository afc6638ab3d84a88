"""What every configuration section shares: frozen, strict about unknown keys, documented field by field.

No section lives here, and no check that needs more than one section (see `checks.py`).
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ConfigError(ValueError):
    """A configuration that cannot run. The message names key, value, what is allowed and what to do."""


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys refused, the docstring under a field is its description."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
