"""Flower on one side, rules on the other: messages, a Strategy, a NumPyClient."""

from __future__ import annotations

from .client import FederatedClient
from .instruction import Instruction
from .pool import ModelPool
from .state import BEGINS_ANEW, STATE_LOST, ClientStates, ContextStates, DiskStates, MemoryStates
from .strategy import FederatedStrategy

__all__ = [
    "BEGINS_ANEW",
    "STATE_LOST",
    "ClientStates",
    "ContextStates",
    "DiskStates",
    "FederatedClient",
    "FederatedStrategy",
    "Instruction",
    "MemoryStates",
    "ModelPool",
]
