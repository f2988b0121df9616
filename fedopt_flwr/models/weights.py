"""Where a model starts, from a file or a state_dict."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import ConfigError, FedoptWarning

_NAMED = 5  # names of a problem


def plain_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's state_dict under the names that it has without torch.compile."""
    return {plain_name(name): value for name, value in module.state_dict().items()}


def plain_module(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile was given; not what another one, such as peft's, finds
    under that name in its own base."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "")


def load_weights(
    module: nn.Module,
    weights: Path | str | Mapping[str, Tensor],
    prefix: str = "",
    *,
    strict: bool = True,
    field: str = "model.weights",
    remedy: str | None = None,
) -> None:
    """Put arrays into the parameters and persistent buffers of the same names, in place.

    `weights` is a safetensors file or a state_dict; of its names only those that begin with
    `prefix` count, without it. Names count without what torch.compile puts before them. Unless
    `strict`, what only one side has stays as it is, and a warning says how much that is. Raises
    ConfigError, naming `field`, names and shapes, if the file cannot be read, shapes differ, values
    are not finite, names of one parameter have unlike values, or nothing fits; its `remedy` for
    names is by default those options of `field` that are prefix and strict here.
    """
    source, read = _read(weights, field)
    found, prefix = {plain_name(name): value for name, value in read.items()}, plain_name(prefix)
    found = {n.removeprefix(prefix): a for n, a in found.items() if n.startswith(prefix)}
    own = plain_state(module)
    problems = _misfits(own, found, source)
    places = {_place(own[name]) for name in own.keys() & found.keys()}
    # files of others hold weights that are tied under one of their names
    missing = {name for name in own.keys() - found.keys() if _place(own[name]) not in places}
    foreign = found.keys() - own.keys()
    remedy = remedy or f"name the prefix ({field}_prefix) or say {field}_strict = false"
    if strict and missing:
        problems.append(f"{source} lacks {_named(missing)}; {remedy}")
    if strict and foreign:
        problems.append(f"the model has no {_named(foreign)} of {source}; {remedy}")
    if not strict and len(missing) == len(own):
        problems.append(
            f"nothing in {source} has the name of anything in the model, such as "
            f"{_named(own.keys())}; name the prefix ({field}_prefix)"
        )
    if problems:
        raise ConfigError([f"{field}: {problem}" for problem in problems])
    if missing or foreign:
        warnings.warn(
            f"{field}_strict = false: {len(missing)} of the model's {len(own)} arrays stay as they "
            f"are ({_named(missing)}), {len(foreign)} of {source} are left out ({_named(foreign)})",
            FedoptWarning,
            stacklevel=2,
        )
    state = module.state_dict()
    state.update({name: found[plain_name(name)] for name in state if plain_name(name) in found})
    module.load_state_dict(state)


def _misfits(own: Mapping[str, Tensor], found: Mapping[str, Any], source: str) -> list[str]:
    """Say which arrays of the same names cannot be taken."""
    problems = []
    tied: dict[tuple[int, tuple[int, ...]], tuple[str, Tensor]] = {}
    for name, array in own.items():
        value = found.get(name)
        if value is None or array.is_meta:  # which no model may be
            continue
        if not isinstance(value, Tensor) or value.shape != array.shape:
            seen = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            problems.append(
                f"{name!r} is {seen} in {source}; the model's is {list(array.shape)}; take a file "
                "of this model"
            )
            continue
        value = value.to(array)
        bad = int((_finite(array) & ~_finite(value)).sum())  # masks may hold -inf
        if bad:
            problems.append(f"{name!r} holds {bad} values that are not finite in {source}")
        first, other = tied.setdefault(_place(array), (name, value))
        if first != name and not bad and not torch.equal(value, other):
            problems.append(
                f"{first!r} and {name!r} are one array of the model and differ in {source}; leave "
                "one of them out, or untie them in the model"
            )
    return problems


def _finite(array: Tensor) -> Tensor:
    return (array.float() if array.dtype.itemsize == 1 else array).isfinite()  # 8 bits lack it


def weights_digest(path: Path) -> str:
    """Return what tells a file of weights from others; ConfigError if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(os.path.expanduser(path), "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise _unreadable(path, error) from error
    return digest.hexdigest()


def _place(array: Tensor) -> tuple[int, tuple[int, ...]]:
    return array.data_ptr(), tuple(array.shape)


def _read(weights: object, field: str) -> tuple[str, Mapping[str, Any]]:
    """Return what the weights are called in errors, and the weights by name."""
    if isinstance(weights, Mapping):
        return "the state_dict", weights
    if not isinstance(weights, (Path, str)):
        raise ConfigError(
            f"{field}: got an object of type {type(weights).__name__}; must be a state_dict, or a "
            "safetensors file of one"
        )
    try:
        return repr(str(weights)), load_file(os.path.expanduser(weights))
    except (OSError, SafetensorError) as error:
        raise _unreadable(Path(weights), error, field) from error


def _unreadable(path: Path, error: Exception, field: str = "model.weights") -> ConfigError:
    return ConfigError(
        f"{field}: cannot read {str(path)!r}: {error}; must be a safetensors file, such as a "
        "run's model.safetensors"
    )


def _named(names: Collection[str]) -> str:
    every = sorted(names)
    more = f" and {len(every) - _NAMED} more" if len(every) > _NAMED else ""
    return ", ".join(map(repr, every[:_NAMED])) + more or "none"
