"""The device that a name means."""

from __future__ import annotations

import torch

from ..errors import ConfigError


def pick_device(name: str, field: str = "training.device") -> torch.device:
    """Return the device of that name; "auto" is CUDA where there is one.

    Raises ConfigError, which names `field`, for a device that this machine does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        raise ConfigError(f"{field}: got {name!r}; {text}; use 'auto' or 'cpu'") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"{field}: got {name!r}; this machine has {torch.cuda.device_count()} CUDA devices; "
            "use 'auto' or 'cpu'"
        )
    return device
