"""From files and `section.key=value` words to a validated `Config`; every refusal is one plain `ConfigError`.

YAML files may name a parent with `extends:` (relative to themselves). OmegaConf merges, pydantic validates.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from megatron_rl.files import regular

from .base import ConfigError
from .schema import Config


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file with its parents, apply overrides, validate.

    Raises:
        ConfigError: unreadable file, circular `extends`, malformed override, unknown key (with the nearest valid
            name), or a value that is not allowed. All problems found are listed.
    """
    merged = _merge(_read(Path(path), ()), _parse_overrides(overrides), "the overrides")
    _refuse_open(_open_keys(merged), str(path))
    try:
        values = OmegaConf.to_container(merged, resolve=True)
    except InterpolationKeyError as error:
        raise ConfigError(f"{path}: {_unresolved(error)}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {error}") from error
    return validate(values)


def _unresolved(error: InterpolationKeyError) -> str:
    """Which value refers to what is not there; OmegaConf names the latter in its message only."""
    missing = str(error.msg).partition("'")[2].rpartition("'")[0]
    return (
        f"{error.full_key} refers to ${{{missing}}}, which is not given; add it to the file or as {missing}=... "
        "on the command line"
    )


def validate(values: Any) -> Config:
    """Validate plain nested values. Raises ConfigError that lists every problem."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        problems = [_explain(dict(e)) for e in error.errors()]
        raise ConfigError("the configuration cannot run:\n" + "\n".join(f"  - {p}" for p in problems)) from None


def dump(config: Config) -> str:
    """The resolved configuration as YAML; `load_config` of it gives the same `Config`."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(path: Path, seen: tuple[Path, ...]) -> DictConfig:
    path = path.resolve()
    if path in seen:
        raise ConfigError(
            f"extends: {' -> '.join(str(p) for p in (*seen, path))} goes in a circle; remove one `extends:`"
        )
    try:
        loaded = OmegaConf.load(regular(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file{_from(seen)}; see configs/ for examples") from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: a mapping of sections is expected at the top, not a list")
    parent = loaded.pop("extends", None)
    if parent is None:
        return loaded
    return _merge(_read(path.parent / str(parent), (*seen, path)), loaded, str(path))


def _merge(below: DictConfig, above: DictConfig, source: str) -> DictConfig:
    """`above` wins. Raises ConfigError where one has a list and the other a mapping."""
    clash = _clash(below, above)
    if clash is not None:
        raise ConfigError(
            f"{clash}: {source} has a list where a mapping is expected, or the reverse; correct one of them"
        )
    # OmegaConf would keep the value below and say nothing.
    _refuse_open([key for key in _open_keys(above) if _as_written(below, key) != MISSING], source)
    if _as_written(above, "rollout.environment_args") == {}:  # which would add nothing: it takes away
        below = OmegaConf.merge(below, {"rollout": {"environment_args": None}})  # type: ignore[assignment]
    return OmegaConf.merge(below, above)  # type: ignore[return-value]


def _open_keys(values: DictConfig) -> list[str]:
    """Where `???` stands, which is OmegaConf's mark of a value that others have to give."""

    def walk(found: Any, key: str) -> Iterator[str]:
        if isinstance(found, dict):
            for name, value in found.items():
                yield from walk(value, f"{key}.{name}" if key else str(name))
        elif isinstance(found, list):
            for i, value in enumerate(found):
                yield from walk(value, f"{key}[{i}]")
        elif found == MISSING:
            yield key

    return sorted(walk(OmegaConf.to_container(values, resolve=False), ""))


def _as_written(values: DictConfig, key: str) -> Any:
    """What stands there, `${...}` included; MISSING where nothing does."""
    found: Any = OmegaConf.to_container(values, resolve=False)
    for part in key.split("."):
        found = found.get(part, MISSING) if isinstance(found, dict) else MISSING
    return found


def _refuse_open(keys: Sequence[str], source: str) -> None:
    """A file may leave a value to others, a run may not."""
    if keys:
        listed = ", ".join(f"{key}={MISSING}" for key in keys)
        raise ConfigError(f"{source}: {listed}: {MISSING} stands for a value that is still to be given; write one")


def _clash(below: DictConfig, above: DictConfig, prefix: str = "") -> str | None:
    for key in map(str, above):
        lower, upper = below._get_node(key), above._get_node(key)
        if isinstance(lower, DictConfig) and isinstance(upper, DictConfig) and not upper._is_none():
            found = _clash(lower, upper, f"{prefix}{key}.")
            if found is not None:
                return found
        elif {type(lower), type(upper)} == {DictConfig, ListConfig}:
            return f"{prefix}{key}"
    return None


def _from(seen: tuple[Path, ...]) -> str:
    return f" (named by `extends:` in {seen[-1]})" if seen else ""


def _parse_overrides(overrides: Sequence[str]) -> DictConfig:
    for word in overrides:
        key, equals, _ = word.partition("=")
        if not equals or not key.strip() or key.startswith("-"):
            raise ConfigError(f"override {word!r}: write section.key=value, for example optimizer.lr=1e-6")
    try:
        parsed = OmegaConf.from_dotlist(list(overrides))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"overrides {list(overrides)}: {error}") from error
    _refuse_open(_open_keys(parsed), "the overrides")
    return parsed


def _explain(error: dict[str, Any]) -> str:
    location = [str(part) for part in error["loc"]]
    key = ".".join(location) or "(top)"
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key{_nearest(error['loc'])}"
    if error["type"] == "missing":
        return f"{key}: required, but not given; add it to the file or as {key}=..."
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "value_error":
        return "\n  - ".join(f"{key}: {line}" for line in message.split("\n"))
    hint = _nearest_value(error) if error["type"] == "literal_error" else ""
    return f"{key}={_short(error['input'])}: {message[0].lower() + message[1:]}{hint}"


def _nearest_value(error: dict[str, Any]) -> str:
    """The closest of the allowed words."""
    allowed = re.findall(r"'([^']*)'", str(error["ctx"]["expected"]))
    close = difflib.get_close_matches(str(error["input"]).lower(), allowed, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


_SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "dp": "data_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""What people call sizes of `parallel:`."""


def _nearest(location: tuple[Any, ...]) -> str:
    """The closest valid name beside the unknown one, and the section that would know it, if another does."""
    model: Any = Config
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        model = _section(model.model_fields[part].annotation)
    name = str(location[-1])
    words = (name, _SHORT.get(name, name))
    close = [key for key in words if key in model.model_fields]
    close = close or difflib.get_close_matches(name, model.model_fields, n=1, cutoff=0.5)
    found = [".".join([*map(str, location[:-1]), key]) for key in close]
    fields = {
        key: getattr(_section(field.annotation), "model_fields", {}) for key, field in Config.model_fields.items()
    }
    homes = [f"{section}.{key}" for section, keys in fields.items() for key in keys if key in words]
    # At the top a name that a section has is that key, and no misspelt section.
    if suggested := (homes or found) if len(location) == 1 else (found or homes):
        return f"; did you mean {' or '.join(suggested)}?"
    return f"; valid here: {', '.join(model.model_fields)}"


def _section(annotation: Any) -> Any:
    """The section class inside an annotation such as `list[RewardComponent]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((_section(a) for a in get_args(annotation)), None)
