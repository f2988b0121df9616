"""Data sets, their division among clients, and minibatches on the device."""

from __future__ import annotations

from .client_data import ClientData, as_client_data
from .federated import (
    FederatedData,
    fingerprint,
    from_datasets,
    load_client_data,
    load_federated_data,
    load_test_data,
    require_examples,
)

__all__ = [
    "ClientData",
    "FederatedData",
    "as_client_data",
    "fingerprint",
    "from_datasets",
    "load_client_data",
    "load_federated_data",
    "load_test_data",
    "require_examples",
]
