"""Models that know how to save themselves: Hugging Face's, and peft's adapters alone."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import FedoptWarning
from ..models.weights import plain_state
from ..own_code import described

PRETRAINED = "pretrained"


def write_pretrained(module: nn.Module, run: Path) -> None:
    """Write RUN/pretrained by the module's own `save_pretrained`, if it has one.

    `from_pretrained` of its class reads it, of an adapter together with the base model. OSError
    where the disk does not take it; whatever else fails is a warning, as the run has its model.
    """
    inner: Any = getattr(module, "_orig_mod", module)  # of torch.compile
    if not hasattr(inner, "save_pretrained"):
        return
    copies: dict[tuple[int, int], Tensor] = {}  # one of weights that are tied
    state = {
        name: copies.setdefault((value.data_ptr(), value.numel()), value.detach().cpu().clone())
        for name, value in plain_state(inner).items()
    }
    unfinished = run / f".{PRETRAINED}"
    try:
        inner.save_pretrained(str(unfinished), state_dict=state)
        shutil.rmtree(run / PRETRAINED, ignore_errors=True)
        unfinished.rename(run / PRETRAINED)
    except OSError:
        raise
    except Exception as error:
        warnings.warn(f"{PRETRAINED}: not written: {described(error)}", FedoptWarning, stacklevel=2)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
