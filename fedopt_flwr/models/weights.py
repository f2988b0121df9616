"""Where a model starts, from a file or a state_dict."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import ConfigError

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
    weights: Path | Mapping[str, Tensor],
    prefix: str = "",
    *,
    strict: bool = True,
) -> None:
    """Put arrays into the parameters and persistent buffers of the same names, in place.

    `weights` is a safetensors file or a state_dict; of its names only those that begin with
    `prefix` count, without it. Unless `strict`, what only one side has stays as it is. Raises
    ConfigError, naming field, names and shapes, if the file cannot be read, shapes differ, or
    nothing fits.
    """
    source = f"{str(weights)!r}" if isinstance(weights, Path) else "the state_dict"
    found = _read(weights) if isinstance(weights, Path) else dict(weights)
    found = {n.removeprefix(prefix): a for n, a in found.items() if n.startswith(prefix)}
    own = plain_state(module)
    problems = [
        f"model.weights: {name!r} is {list(found[name].shape)} in {source}; the model's is "
        f"{list(array.shape)}; take a file of this model"
        for name, array in own.items()
        if name in found and found[name].shape != array.shape
    ]
    places = {_place(own[name]) for name in own.keys() & found.keys()}
    # files of others hold weights that are tied under one of their names
    missing = {name for name in own.keys() - found.keys() if _place(own[name]) not in places}
    foreign = found.keys() - own.keys()
    remedy = "name the prefix (model.weights_prefix) or say model.weights_strict = false"
    if strict and missing:
        problems.append(f"model.weights: {source} lacks {_named(missing)}; {remedy}")
    if strict and foreign:
        problems.append(f"model.weights: the model has no {_named(foreign)} of {source}; {remedy}")
    if not strict and len(missing) == len(own):
        problems.append(
            f"model.weights: nothing in {source} has the name of anything in the model, such as "
            f"{_named(own.keys())}; name the prefix (model.weights_prefix)"
        )
    if problems:
        raise ConfigError(problems)
    with torch.no_grad():
        for name, array in own.items():  # which share the module's memory
            if name in found:
                array.copy_(found[name])


def weights_digest(path: Path) -> str:
    """Return what tells a file of weights from others; ConfigError if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.expanduser().open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise _unreadable(path, error) from error
    return digest.hexdigest()


def _place(array: Tensor) -> tuple[int, tuple[int, ...]]:
    return array.data_ptr(), tuple(array.shape)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path.expanduser())
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"model.weights: cannot read {str(path)!r}: {error}; must be a safetensors file, such as a "
        "run's model.safetensors"
    )


def _named(names: object) -> str:
    every = sorted(names)  # type: ignore[call-overload]
    more = f" and {len(every) - _NAMED} more" if len(every) > _NAMED else ""
    return ", ".join(map(repr, every[:_NAMED])) + more
