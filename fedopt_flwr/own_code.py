"""The user's own code, named `module:attribute` in a configuration."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from .errors import ConfigError

_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), Path(__file__).parent)
_NOT_OWN = tuple(  # folders, with a separator at the end
    os.path.join(path, "") for name in _LIBRARIES for path in (name, os.path.realpath(name))
)


def is_import_path(name: str) -> bool:
    """Whether a name means `module:attribute` rather than a built-in."""
    return ":" in name


def load_attribute(field: str, path: str, folders: Iterable[Path]) -> Any:
    """Import `module:attribute`, looking in `folders` before the installed packages.

    Raises ConfigError that names `field` when the module or the attribute is missing or raises
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
            f"{field}: cannot import {path!r} ({described(error)}); looked in "
            f"{', '.join(places)} and the installed packages; must be 'module:attribute'"
        ) from error
    finally:
        for place in places:  # not the whole list: another thread's import may have added to it
            with contextlib.suppress(ValueError):  # the module itself took it away
                sys.path.remove(place)
    return found


def function_of(field: str, value: Any) -> Any:
    """Return a loss or metric that can be called; of a class, an instance made without arguments.

    Raises ConfigError, which names `field`, where the class wants arguments or nothing is callable.
    """
    if isinstance(value, type):
        try:
            value = value()
        except Exception as error:
            raise ConfigError(
                f"{field}: {value.__name__!r} is a class, and it cannot be made without arguments "
                f"({described(error)}); name an instance or a function, such as one that you "
                f"define as `chosen = {value.__name__}(...)`"
            ) from error
    if not callable(value):
        kind = type(value).__name__
        raise ConfigError(f"{field}: got an object of type {kind}; must be a function or a class")
    return value


def described(error: BaseException) -> str:
    """Return an error's type and text, and where the user's own code raised it."""
    place = place_of(error)
    return f"{type(error).__name__}: {error}{f' ({place})' if place else ''}"


def place_of(error: BaseException) -> str:
    """Return where in the user's own code an error was raised, as "own.py, line 12".

    That is the innermost place of its traceback that lies neither in this package nor in the
    standard library nor in an installed package; "" if no place does. Files in the working folder
    are named as they are seen from there.
    """
    for place in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_own(place.filename):
            file = place.filename
            with contextlib.suppress(OSError, ValueError):  # no working folder, or elsewhere
                file = str(Path(file).absolute().relative_to(Path.cwd()))
            return f"{file}, line {place.lineno}"
    return ""


def _is_own(file: str) -> bool:
    if file.startswith("<"):  # made from text, as by dataclasses; or typed by the user
        return file == "<stdin>" or file.startswith("<ipython")
    path = os.path.abspath(file)
    installed = {"site-packages", "dist-packages"} & set(Path(path).parts)
    return not installed and not path.startswith(_NOT_OWN)


def file_digest(path: str) -> str:
    """Return a digest of the file that `module:attribute` was imported from, "" without one."""
    file = getattr(sys.modules.get(path.partition(":")[0]), "__file__", None)
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    return ""


def _forget_namesake(top: str, places: list[str]) -> None:
    """Drop a module of this name that came from another folder, as another run's code would."""
    spec = PathFinder.find_spec(top, places)
    loaded = sys.modules.get(top)
    if spec is None or loaded is None or getattr(loaded, "__file__", None) == spec.origin:
        return
    for name in [n for n in sys.modules if n == top or n.startswith(f"{top}.")]:
        del sys.modules[name]
