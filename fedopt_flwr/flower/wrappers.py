"""Wrappers around a strategy that would promise what they cannot keep."""

from __future__ import annotations

import sys
from types import FrameType

from flwr.server import strategy as flower

from ..errors import RunError

_REFUSED = (
    flower.DifferentialPrivacyClientSideAdaptiveClipping,
    flower.DifferentialPrivacyClientSideFixedClipping,
    flower.DifferentialPrivacyServerSideAdaptiveClipping,
    flower.DifferentialPrivacyServerSideFixedClipping,
    flower.DPFedAvgAdaptive,
    flower.DPFedAvgFixed,
)


def refuse_privacy_wrappers() -> None:
    """Raise RunError if one of Flower's privacy wrappers is among the callers.

    A wrapped strategy is not given its wrapper; at its first call that stands on the stack.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, _REFUSED):
            raise RunError(
                f"{type(caller).__name__}: changes the arrays that pass through Flower's loop, "
                "which are not what this strategy takes in: its noise would be dropped and there "
                "be no privacy; use the strategy without it"
            )
        frame = frame.f_back
