"""The built-in models, made for the shape of the data and its number of classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import randomness
from ..errors import ConfigError
from ..own_code import described, is_import_path, load_attribute
from ..problems import require_options, unknown_name
from ..randomness import derive
from .networks import cnn, logistic, lstm, mlp, resnet18

MODELS: dict[str, Callable[..., nn.Module]] = {
    make.__name__: make for make in (mlp, cnn, logistic, lstm, resnet18)
}


def find_model(name: str, folders: Iterable[Path] = ()) -> Callable[..., nn.Module]:
    """Return the function behind a name; ConfigError if there is none."""
    if not is_import_path(name):
        if name not in MODELS:
            raise ConfigError(unknown_name("model.name", name, [*MODELS, "module:attribute"]))
        return MODELS[name]
    factory: Callable[..., nn.Module] = load_attribute("model.name", name, folders)
    if not callable(factory):
        raise ConfigError(f"model.name: {name!r} is no function or class; it must make a module")
    return factory


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
    `module:attribute` gets its options only. Raises ConfigError for an unknown name or option, and
    where a built-in would have no class to predict.
    """
    factory = find_model(name, folders)
    arguments = dict(options)
    if not is_import_path(name):
        if num_classes < 1:
            raise ConfigError(
                f"model.name: {name!r} predicts classes, and the targets of this data are no class "
                "indices; give a model of your own, as 'module:attribute' or as an object"
            )
        shape = {"input_shape": input_shape, "num_classes": num_classes}
        known = [key for key in signature(factory).parameters if key not in shape]
        require_options("model.options", name, options, known)
        arguments = {**shape, **options}
    what = f"model.options: {name!r} refused {arguments}"
    return seeded_module(lambda: factory(**arguments), seed, what)


def seeded_module(
    factory: Callable[[], nn.Module], seed: int, what: str = "model: the function failed"
) -> nn.Module:
    """Call a factory with the global generators seeded for it, and restored afterwards.

    Raises ConfigError, which begins with `what`, if it raises or returns no module.
    """
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    every = range(torch.cuda.device_count()) if started else []
    own_seed = derive(seed, "model")
    with torch.random.fork_rng(devices=every), randomness.kept(torch.device("cpu"), own_seed):
        torch.manual_seed(own_seed)
        try:
            module = factory()
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{what}: {described(error)}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"model: the factory returned a {type(module).__name__}; it must return an nn.Module"
        )
    return module
