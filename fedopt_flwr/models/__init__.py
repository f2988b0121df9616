"""The built-in models, made for the shape of the data and its number of classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, require_options, unknown_name
from ..imports import is_import_path, load_attribute
from ..seeding import derive
from .networks import cnn, logistic, mlp, resnet18

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "logistic": logistic,
    "resnet18": resnet18,
}


def make_model(
    name: str,
    options: dict[str, Any],
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    seed: int,
    folders: Iterable[Path] = (),
) -> nn.Module:
    """Return the named model; the same seed gives the same parameters in every engine.

    A built-in gets `input_shape` and `num_classes` beside its options; the user's own
    `module:attribute` gets its options only. Raises ConfigError for an unknown name or option.
    """
    if is_import_path(name):
        factory = load_attribute("model.name", name, folders)
        arguments = dict(options)
    else:
        if name not in MODELS:
            raise ConfigError(unknown_name("model.name", name, MODELS))
        factory, shape = MODELS[name], {"input_shape": input_shape, "num_classes": num_classes}
        known = [key for key in signature(factory).parameters if key not in shape]
        require_options("model.options", name, options, known)
        arguments = {**shape, **options}
    what = f"model.options: {name!r} refused {arguments}"
    return seeded_module(partial(factory, **arguments), seed, what)


def seeded_module(
    factory: Callable[[], nn.Module], seed: int, what: str = "model: the function failed"
) -> nn.Module:
    """Call a factory with torch's global generator seeded for it, and restored afterwards.

    Raises ConfigError, which begins with `what`, if it raises or returns no module.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "model"))
        try:
            module = factory()
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{what}: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"model: the factory returned a {type(module).__name__}; it must return an nn.Module"
        )
    return module
