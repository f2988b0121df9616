"""The user's own code, named `module:attribute` in a configuration."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .errors import ConfigError


def is_import_path(name: str) -> bool:
    """Whether a name means `module:attribute` rather than a built-in."""
    return ":" in name


def load_attribute(field: str, path: str, folders: Iterable[Path]) -> Any:
    """Import `module:attribute`, looking in `folders` before the installed packages.

    Raises ConfigError that names `field` when the module or the attribute is not there or raises
    while it is imported.
    """
    module_name, _, attribute = path.partition(":")
    places = [str(folder) for folder in folders]
    before = list(sys.path)
    sys.path[:0] = places
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ConfigError(
            f"{field}: cannot import {path!r} ({type(error).__name__}: {error}); looked in "
            f"{', '.join(places)} and the installed packages; must be 'module:attribute'"
        ) from error
    finally:
        sys.path[:] = before
    return found
