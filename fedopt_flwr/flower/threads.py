"""The number of threads that the server computes with, whoever calls it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

_Method = TypeVar("_Method", bound=Callable[..., Any])


@contextlib.contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Compute with so many threads meanwhile; sums depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_fixed_threads(method: _Method) -> _Method:
    """Have a strategy's method compute with the run's number of threads."""

    @functools.wraps(method)
    def fixed(strategy: Any, *arguments: Any, **options: Any) -> Any:
        with intra_op_threads(strategy._config.training.threads):
            return method(strategy, *arguments, **options)

    return fixed  # type: ignore[return-value]
