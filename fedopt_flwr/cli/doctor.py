"""`fedopt doctor`: what this machine has, and what would go wrong."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from ..config.run_config import RunConfig
from ..errors import FedoptError
from .console import LOG, Debug
from .options import ConfigFile, Settings, require_writable, usable_cores

_PACKAGES = ("fedopt-flwr", "flwr", "torch", "torchvision", "flwr-datasets", "grpcio")
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")
_DATA_FILES = {
    "mnist": "MNIST/raw/train-images-idx3-ubyte*",
    "fashion_mnist": "FashionMNIST/raw/train-images-idx3-ubyte*",
    "emnist": "EMNIST/raw/emnist-*-train-images-idx3-ubyte*",
    "cifar10": "cifar-10-*",
    "cifar100": "cifar-100-*",
    "npz": "train.npz",
}


def doctor(config: ConfigFile = None, settings: Settings = None, debug: Debug = False) -> None:
    """Say what this machine has, which data is available, and whether a configuration would run."""
    run_config = RunConfig.from_file(config, settings or [])
    checks: dict[str, Callable[[], str]] = {
        "packages": _packages,
        "processors": lambda: f"{usable_cores()} usable of {os.cpu_count()}, {platform.machine()}",
        "CUDA": _cuda,
        "proxy": lambda: describe_proxy(run_config.transport.proxy),
        "data": lambda: _data(run_config.data.path),
        "cache": _cache,
        "configuration": lambda: _configuration(run_config),
    }
    console = Console(highlight=False)
    passed = True
    for name, check in checks.items():
        try:
            line = f"[green]ok[/]       {name}: {escape(check())}"
        except FedoptError as error:
            passed = False
            LOG.debug("%s", name, exc_info=error)
            line = f"[red]problem[/]  {name}: {escape(str(error))}"
        console.print(line, soft_wrap=True)
    if not passed:
        raise typer.Exit(1)


def _packages() -> str:
    return ", ".join([f"Python {platform.python_version()}", *map(_version, _PACKAGES)])


def _version(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:  # as in the image for clients
        return f"no {name}"


def describe_proxy(proxy: str | None) -> str:
    named = [name for name in os.environ if name.lower() in _PROXY_VARIABLES]
    found = sorted((name for name in named if os.environ[name]), key=str.lower)
    ignored = f"{', '.join(found)}: set, but not used between server and clients"
    if proxy is not None:
        used = f"`fedopt client` uses {proxy} (transport.proxy) to a server on another machine"
        return f"{used}; {ignored}" if found else used
    if found:
        return f"{ignored}; to use a proxy set transport.proxy"
    return "none; `fedopt client` connects directly"


def _cuda() -> str:
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(names) or "no device; training runs on the CPU"


def _data(path: Path | None) -> str:
    from ..data.files import cache_root, configured_root

    places = {configured_root(path), cache_root()}
    found = [
        name
        for name, pattern in _DATA_FILES.items()
        if any(any(place.glob(pattern)) for place in places)
    ]
    always = ["digits", "synthetic"]
    return f"{', '.join(always + found)} (looked in {', '.join(sorted(map(str, places)))})"


def _cache() -> str:
    from ..data.files import cache_root

    folder = cache_root()
    require_writable("cache", folder, "set XDG_CACHE_HOME to a folder that can be written")
    return f"{folder} can be written"


def _own_data(config: RunConfig) -> str:
    from ..config.sections import Facts
    from ..data import load_client_data
    from ..training.devices import pick_device

    facts = Facts(num_clients=config.federation.num_clients, seed=config.federation.seed)
    ((own, _),) = load_client_data(config.data, facts, [0], config.import_folders).values()
    return (
        f"a client with {own.num_examples:,} examples of its own ({config.data.name}) on "
        f"{pick_device(config.training.device)}; the server decides what is trained"
    )


def _configuration(config: RunConfig) -> str:
    """Put the whole experiment together and say what a round would send; of a client that has a
    data set of its own, load that."""
    if config.data.partition.kind == "whole":
        return _own_data(config)
    from ..data import load_test_data
    from ..flower.sizes import require_messages_fit
    from ..run.experiment import Experiment
    from ..run.needs import require_what_is_asked

    data = load_test_data(config) if config.federation.is_open else None  # as a server does
    if config.output.directory is None:  # a run gets one
        config = config.with_values({"output.directory": "runs/new"})
    experiment = Experiment(config, data=data)
    require_what_is_asked(experiment)
    rule = experiment.rule
    model = experiment.model
    down, up = require_messages_fit(rule, model, config)
    asked = config.federation.clients_per_round
    return (
        f"{rule.name} on {config.data.name} with {config.model.name} ({model.size:,} parameters) "
        f"on {experiment.device}; a round sends each of {asked} clients {down / 1e6:.3g} MB and "
        f"gets back {up / 1e6:.3g} MB; over gRPC up to {config.transport.max_message_mb} MiB pass"
    )
