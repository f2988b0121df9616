"""Data sets, their division among clients, and minibatches on the device."""

from __future__ import annotations

from .client_data import ClientData, Loading
from .federated import (
    Collate,
    FederatedData,
    fingerprint,
    from_datasets,
    load_client_data,
    load_federated_data,
    load_test_data,
    require_examples,
)
from .holdouts import Part
from .wrapping import as_client_data

__all__ = [
    "ClientData",
    "Collate",
    "FederatedData",
    "Loading",
    "Part",
    "as_client_data",
    "fingerprint",
    "from_datasets",
    "load_client_data",
    "load_federated_data",
    "load_test_data",
    "require_examples",
]
