"""Text that becomes a configuration: TOML files and `section.key=VALUE`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from datetime import date, time
from pathlib import Path
from typing import Any

import tomli_w
from pydantic_core import PydanticCustomError

from ..errors import ConfigError

_PATHS = {"data.path", "output.directory"}


def read_toml(path: Path) -> dict[str, Any]:
    """Return a file's tables; ConfigError if there is none or it is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"config file: {str(path)!r} is not a file that can be read: {error.strerror}; check "
            "the path"
        ) from None
    except (ValueError, RecursionError) as error:  # also: not UTF-8, thousands of digits
        raise ConfigError(
            f"config file: {str(path)!r} is not TOML: {error}; fix that line"
        ) from None


def changed(
    data: dict[str, Any], settings: Iterable[str] = (), values: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Apply `section.key=VALUE` settings to `data`, then values by their `section.key`.

    ConfigError for a setting of another form, or whose section is a value.
    """
    for key, value in (*map(_parsed, settings), *(values or {}).items()):
        *sections, last = key.split(".")
        if sections[0] == "rules" and sections[1:]:  # yours has dots: rules.pkg.mod:Rule.key
            sections = ["rules", ".".join(sections[1:])]
        inner = data
        for part in sections:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--set {key}: {part!r} is a value, not a section")
        inner[last] = value
    return data


def _parsed(setting: str) -> tuple[str, Any]:
    """Return key and value; the latter is read as TOML, else as a bare string."""
    key, equals, text = (part.strip() for part in setting.partition("="))
    parts = key.split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"--set {setting!r}: must have the form section.key=VALUE")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return key, text
    is_date = isinstance(value, (date, time))  # no key takes one
    is_number = isinstance(value, (int, float)) and key in _PATHS  # runs/2024 as 2024
    return key, text if is_date or is_number else value


def as_setting(key: str, value: Any) -> str:
    """Return `section.key=VALUE`, for another process, that is read back as this very value."""
    return key + tomli_w.dumps({"v": value}).strip().removeprefix("v ")


def plain(value: Any) -> Any:
    """Return a value with NumPy's numbers as Python's and paths as text, also inside of others."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value.item() if getattr(value, "shape", None) == () else value


def storable(options: dict[str, Any]) -> dict[str, Any]:
    """Return options that config.toml can hold; pydantic reports those that it cannot."""
    try:
        tomli_w.dumps(options)
    except (TypeError, ValueError, AttributeError) as error:
        text = f"must hold text, numbers, lists and tables only: {error}"
        raise PydanticCustomError("not_toml", "{text}", {"text": text}) from None
    return options
