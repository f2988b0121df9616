"""What a client lets a server ask of its machine: [limits] of its own configuration."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable

import torch
from torch import nn

from ..config.client_ids import MAX_IDS
from ..config.run_config import RunConfig
from ..config.sections import Facts
from ..errors import ConfigError, MessageError
from ..flower import Instruction
from ..own_code import is_import_path
from ..training.objective import num_steps

_BYTES_PER_PARAMETER = 16  # as float32: the model, its gradient, what came and what is sent
_BYTES_PER_POSITION = 24  # of an example in the round's order, while batches are drawn


def require_clients(config: RunConfig, facts: Facts) -> None:
    """Raise MessageError for more clients than data can be divided among in good time."""
    if config.data.partition.kind != "whole" and facts.num_clients != "open":
        _require("num_clients", facts.num_clients, MAX_IDS, "set data.partition.kind = 'whole'")


def require_examples(config: RunConfig, count: int) -> None:
    """Raise MessageError if the federation gives one client more data than it is to train on."""
    _require("examples", count, config.limits.examples, "raise limits.examples")


def require_work(config: RunConfig, instruction: Instruction, num_examples: int) -> None:
    """Raise MessageError for a round's work that is beyond the limits; nothing is reduced."""
    limits = config.limits
    threads = limits.threads or max(os.cpu_count() or 1, config.training.threads)
    _require("threads", instruction.threads, threads, "raise limits.threads")
    batch_size = instruction.batch_size
    epochs = instruction.local_epochs
    steps = num_steps(num_examples, batch_size, instruction.local_steps or None, epochs or None)
    _require("local_steps", steps, limits.local_steps, "raise limits.local_steps")
    if 0 < batch_size < num_examples:  # else every batch is the same one
        most = _half_of_memory() // _BYTES_PER_POSITION
        _require("local_steps · batch_size", steps * batch_size, most, "lower limits.local_steps")


def bounded_module(
    config: RunConfig, instruction: Instruction, make: Callable[[], nn.Module]
) -> nn.Module:
    """Return the model that an instruction asks for, or raise MessageError if it is too large.

    It is first made without memory, to be counted. Of the user's own code that is done only where
    the server's options are not this client's, as it need not expect to be called twice.
    """
    own = config.model
    is_own = is_import_path(instruction.model)
    if not is_own or json.loads(instruction.model_options) != own.options:
        module: nn.Module | None = None
        with contextlib.suppress(ConfigError), torch.device("meta"):  # own code may need values
            module = make()
        if module is not None:
            _require_size(config, module)
    module = make()
    _require_size(config, module)
    return module


def _require_size(config: RunConfig, module: nn.Module) -> None:
    most = config.limits.parameters or _half_of_memory() // _BYTES_PER_PARAMETER
    count = sum(parameter.numel() for parameter in module.parameters())
    _require("parameters", count, most, "raise limits.parameters")


def _require(what: str, asked: int, most: int, remedy: str) -> None:
    if asked > most:
        raise MessageError(
            f"limits: the server asks for {what} = {asked}; this client allows {most}; {remedy} "
            "in its configuration, or ask for less"
        )


def _half_of_memory() -> int:
    """Half of this machine's memory in bytes; where the system does not say, what 64 bits hold."""
    if not hasattr(os, "sysconf"):
        return 2**63
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
