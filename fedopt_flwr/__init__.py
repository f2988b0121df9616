"""Federated optimisation on Flower: rules that converge on heterogeneous data, ready to deploy."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config.run_config import RunConfig
    from .errors import ConfigError, DataError, FedoptError, MessageError, ModelError, RunError
    from .run.result import Result
    from .run.simulate import resume, simulate

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless it is asked for

_HOMES = {
    "RunConfig": "config.run_config",
    "ConfigError": "errors",
    "DataError": "errors",
    "FedoptError": "errors",
    "MessageError": "errors",
    "ModelError": "errors",
    "RunError": "errors",
    "Result": "run.result",
    "resume": "run.simulate",
    "simulate": "run.simulate",
}

__all__ = [
    "ConfigError",
    "DataError",
    "FedoptError",
    "MessageError",
    "ModelError",
    "Result",
    "RunConfig",
    "RunError",
    "resume",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Import on first use: torch and flwr take seconds, and the CLI must answer at once."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
