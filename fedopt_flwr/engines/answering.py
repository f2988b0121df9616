"""What an engine needs of a client."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..flower.messages import Scalar


class Answering(Protocol):
    """What answers the server: these two methods of Flower's NumPyClient."""

    def get_properties(self, config: dict[str, Scalar]) -> dict[str, Scalar]:
        """Say who this is ("client_id") and how many examples it has ("num_examples")."""

    def fit(
        self, parameters: list[np.ndarray], config: dict[str, Scalar]
    ) -> tuple[list[np.ndarray], int, dict[str, Scalar]]:
        """Follow one instruction: arrays, number of examples, report."""
