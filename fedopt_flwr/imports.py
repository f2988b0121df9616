"""The user's own code, named `module:attribute` in a configuration."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
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
    sys.path[:0] = places
    _forget_namesake(module_name.partition(".")[0], places)
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{field}: cannot import {path!r} ({type(error).__name__}: {error}); looked in "
            f"{', '.join(places)} and the installed packages; must be 'module:attribute'"
        ) from error
    finally:
        for place in places:  # not the whole list: another thread's import may have added to it
            with contextlib.suppress(ValueError):  # the module itself took it away
                sys.path.remove(place)
    return found


def file_of(path: str) -> str | None:
    """Return the file that `module:attribute` was imported from, if there is one."""
    return getattr(sys.modules.get(path.partition(":")[0]), "__file__", None)


def file_digest(path: str) -> str:
    """Return a digest of the file that `module:attribute` was imported from, "" without one."""
    file = file_of(path)
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    return ""


def _forget_namesake(top: str, places: list[str]) -> None:
    """Drop a module of this name that came from another folder, as another run's code would."""
    spec, loaded = PathFinder.find_spec(top, places), sys.modules.get(top)
    if spec is None or loaded is None or getattr(loaded, "__file__", None) == spec.origin:
        return
    for name in [n for n in sys.modules if n == top or n.startswith(f"{top}.")]:
        del sys.modules[name]
