"""How large messages will be, known from rule and model before the first one is sent."""

from __future__ import annotations

from collections.abc import Iterable

from ..algorithm import Algorithm
from ..config.run_config import RunConfig
from ..errors import ConfigError
from ..training.flat_model import FlatModel, Layout
from .messages import encoded_size, expected_arrays

_INSTRUCTION_BYTES = 8192  # an upper bound
_MIB = 1 << 20


def message_bytes(rule: Algorithm, model: FlatModel, config: RunConfig) -> tuple[int, int]:
    """Return the size in bytes of the largest message down and up, an upper bound."""
    buffers = config.federation.buffers == "average" and model.has_buffers
    down = expected_arrays(rule.broadcast_names, model, with_buffers=buffers)
    up = expected_arrays(rule.upload_names, model, with_buffers=buffers)
    return _total(down.values()), _total(up.values())


def require_messages_fit(rule: Algorithm, model: FlatModel, config: RunConfig) -> None:
    """Raise ConfigError, naming the option, if a message would be over the limit."""
    down, up = message_bytes(rule, model, config)
    needed = -(-max(down, up) // _MIB)
    if needed <= config.transport.max_message_mb:
        return
    sizes = f"{rule.name} with {model.size:,} parameters sends {down:,} bytes down, {up:,} up"
    remedy = f"set it to {needed} or more"
    if needed > 2047:
        remedy = "no gRPC message holds that; take a smaller model or freeze part of it"
    raise ConfigError(
        f"transport.max_message_mb: got {config.transport.max_message_mb}; {sizes}; {remedy}"
    )


def _total(arrays: Iterable[Layout]) -> int:
    return _INSTRUCTION_BYTES + sum(encoded_size((a.size,), a.dtype) for a in arrays)
