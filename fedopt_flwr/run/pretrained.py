"""Models that know how to save themselves: Hugging Face's, and peft's adapters alone."""

from __future__ import annotations

import errno
import shutil
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import FedoptWarning
from ..models.weights import plain_module, plain_state
from ..own_code import described
from ..training.flat_model import copied

PRETRAINED = "pretrained"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EROFS, errno.EACCES)


def write_pretrained(module: nn.Module, run: Path) -> None:
    """Write RUN/pretrained by the module's own `save_pretrained`, if it has one.

    `from_pretrained` of its class reads it, of an adapter together with the base model. OSError
    where the disk does not take it; whatever else fails is a warning, as the run has its model.
    """
    if not hasattr(plain_module(module), "save_pretrained"):
        return
    unfinished = run / f".{PRETRAINED}"
    try:
        # whose parameters have memory of their own, and are tied as they were
        own: Any = copied(plain_module(module)).cpu()
        renamed = plain_state(own) if plain_state(own).keys() != own.state_dict().keys() else None
        own.save_pretrained(str(unfinished), **({} if renamed is None else {"state_dict": renamed}))
        shutil.rmtree(run / PRETRAINED, ignore_errors=True)
        if unfinished.is_dir():
            unfinished.rename(run / PRETRAINED)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise
        warnings.warn(f"{PRETRAINED}: not written: {described(error)}", FedoptWarning, stacklevel=2)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
