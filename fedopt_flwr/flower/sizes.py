"""How large messages will be, known from rule and model before the first one is sent."""

from __future__ import annotations

from ..algorithm import Algorithm
from ..config.run_config import RunConfig
from ..errors import ConfigError
from ..training.flat_model import FlatModel
from .messages import encoded_size, expected_arrays

_INSTRUCTION_BYTES = 8192  # an upper bound, but where very many checkpoints are kept
_MIB = 1 << 20


def largest_instruction(rule: Algorithm, model: FlatModel, *, with_buffers: bool) -> int:
    """Return the size in bytes of the largest message to a client, an upper bound."""
    return max(_size(n, model, with_buffers) for n in (rule.broadcast_names, ("model",)))


def largest_reply(rule: Algorithm, model: FlatModel, config: RunConfig) -> int:
    """Return the size in bytes of a client's largest message, an upper bound."""
    with_buffers = config.federation.buffers == "average"
    phases = (rule.upload_names, rule.start_names, ("gradient",))
    return max(_size(names, model, with_buffers) for names in phases)


def _size(names: tuple[str, ...], model: FlatModel, with_buffers: bool) -> int:
    arrays = expected_arrays(names, model, with_buffers=with_buffers)
    return _INSTRUCTION_BYTES + sum(encoded_size((a.size,), a.dtype) for a in arrays.values())


def require_messages_fit(rule: Algorithm, model: FlatModel, config: RunConfig) -> tuple[int, int]:
    """Return the size in bytes of the largest message down and up, an upper bound.

    Raises ConfigError, naming the option, if one would be over the limit.
    """

    down = largest_instruction(rule, model, with_buffers=config.federation.buffers == "average")
    up = largest_reply(rule, model, config)
    needed = -(-max(down, up) // _MIB)
    if needed <= config.transport.max_message_mb:
        return down, up
    sizes = f"{rule.name} with {model.size:,} parameters sends {down:,} bytes down, {up:,} up"
    remedy = f"set it to {needed} or more"
    if needed > 2047:
        remedy = "no gRPC message holds that; take a smaller model or freeze part of it"
    raise ConfigError(
        f"transport.max_message_mb: got {config.transport.max_message_mb}; {sizes}; {remedy}"
    )
