"""How problems are worded, collected and reported together."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from .errors import ConfigError, DataError, FedoptError


def unknown_name(field: str, seen: str, known: Iterable[str]) -> str:
    """Text for a name that is not in `known`, with the nearest one that is."""
    names = sorted(known)
    near = difflib.get_close_matches(seen, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return f"{field}: unknown {seen!r}{hint} Known: {', '.join(names)}"


def foreign_text(text: object, limit: int = 500) -> str:
    """Return what a peer sent so that it can be printed and kept: on one line, at most `limit`
    characters, with control characters and what UTF-8 cannot hold written as escapes."""
    start = str(text)[: limit + 1]
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in start)
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


@contextlib.contextmanager
def about(whom: str) -> Iterator[None]:
    """Say in a DataError whose data it is about."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{whom}: {error}") from error


@contextlib.contextmanager
def needing(package: str, field: str) -> Iterator[None]:
    """Name the package to install in a DataError where importing it meanwhile fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise DataError(
            f"{field} needs {package}, which is not installed (the image for clients leaves it "
            f"out); run `pip install {package}`, or use data.name = 'npz' with data of your own"
        ) from error


@contextlib.contextmanager
def collected(errors: list[FedoptError]) -> Iterator[None]:
    """Add a ConfigError or DataError to `errors` instead of raising it."""
    try:
        yield
    except (ConfigError, DataError) as error:
        errors.append(error)


def raise_together(errors: Sequence[FedoptError]) -> None:
    """Raise what was collected: one error as it is, several as a ConfigError with all lines."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigError([line for error in errors for line in str(error).splitlines()])


def require_options(field: str, owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for the options that `owner` does not have."""
    names = list(known)
    unknown = [key for key in given if key not in names]
    if unknown and not names:
        raise ConfigError(f"{field}: got {unknown}; {owner!r} has no options; remove them")
    if unknown:
        raise ConfigError([unknown_name(f"{field} of {owner!r}", key, names) for key in unknown])


def validation_problems(
    error: ValidationError, root: type[BaseModel], place: Callable[[str], str] = lambda key: ""
) -> list[str]:
    """Turn pydantic's errors into lines of field, value, what is allowed, what to do.

    `place` returns what comes before a first key in the field's full name.
    """
    lines = []
    for item in error.errors():
        loc = [str(part) for part in item["loc"]]
        field = ".".join([place(loc[0] if loc else ""), *loc]).strip(".")
        if item["type"] == "extra_forbidden":
            known = list(getattr(_at(root, item["loc"][:-1]), "model_fields", {}))
            lines.append(unknown_name(field, str(item["loc"][-1]), known))
        elif item["type"] == "value_error":
            lines.append(str(item["ctx"]["error"]))
        elif item["type"] in ("model_type", "dict_type"):
            lines.append(f"{field}: got {item['input']!r}; must be a section of keys and values")
        else:
            message = item["msg"].removeprefix("Input ").removeprefix("Value ")
            remedy = "" if ";" in message else _remedy(root, item["loc"])  # it may say so itself
            lines.append(f"{field}: got {_short(item['input'])}; {message}{remedy}")
    return lines


def _remedy(root: Any, loc: tuple[int | str, ...]) -> str:
    """Name a field's range, as far as its own metadata hold it, and its default."""
    keys = [part for part in loc if isinstance(part, str)]  # of a tuple, not of its items
    known = getattr(_at(root, tuple(keys[:-1])), "model_fields", {})
    field = known.get(keys[-1]) if keys else None
    if field is None:
        return ""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{sign} {getattr(limit, name)}"
        for limit in field.metadata
        for name, sign in signs.items()
        if hasattr(limit, name)
    ]
    allowed = f" (allowed: {' and '.join(bounds)})" if bounds else ""
    if field.is_required():
        return f"{allowed}; give it another value"
    default = field.get_default(call_default_factory=True, validated_data={})
    shown = "" if default is None else f", {default!r}"
    return f"{allowed}; change it, or leave it out for the default{shown}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... of {len(text)} characters"


def _at(root: Any, loc: tuple[int | str, ...]) -> Any:
    """Return the section at that place, or None where there is none."""
    for part in loc:
        root = getattr(root, "model_fields", {}).get(str(part))
        root = root.annotation if root is not None else None
    return root
