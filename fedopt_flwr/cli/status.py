"""`fedopt status`: what a server or client tells of itself, for people."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import RunError
from ..problems import foreign_text
from .options import require_address

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.samples import Sample

_LARGEST_BYTES = 16 << 20
_TIMEOUT_SECONDS = 10.0
_DAY = 86_400


def status(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="The --metrics of a server or client.")
    ],
) -> None:
    """Show what a server or client says of itself at its --metrics address."""
    require_address("HOST:PORT", address, lowest_port=1)
    families = {f.name.removeprefix("fedopt_").replace("_", " "): f for f in _read(address)}
    width = max(map(len, families))
    for title, family in families.items():
        print(f"{title.ljust(width)}  {foreign_text(_text(family), 2000)}")


def _read(address: str) -> list[Metric]:
    """Return the metrics of this package; RunError if there are none."""
    import http.client
    import urllib.request

    from prometheus_client.parser import text_string_to_metric_families

    open_directly = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    problem = "it does not speak of fedopt"
    try:
        with open_directly(f"http://{address}/metrics", timeout=_TIMEOUT_SECONDS) as answer:
            text = answer.read(_LARGEST_BYTES).decode()
        families = [*text_string_to_metric_families(text)]
        ours = [family for family in families if family.name.startswith("fedopt")]
        if ours:
            return ours
    except (OSError, ValueError, http.client.HTTPException) as error:
        problem = foreign_text(getattr(error, "reason", error), 200)
    raise RunError(
        f"HOST:PORT: no metrics at {address!r}: {problem}; name the address that `fedopt server` "
        "or `fedopt client` was given as --metrics"
    )


def _text(family: Metric) -> str:
    if family.name == "fedopt_info":  # a gauge to its reader; its labels are what it says
        return ", ".join(f"{k} {v}" for s in family.samples for k, v in s.labels.items())
    if family.type == "histogram":
        return ", ".join(_mean(family.samples))
    shown = [s for s in family.samples if s.value or family.type != "counter"]
    return ", ".join(_labelled(s, _value(family.name, s.value)) for s in shown) or "none"


def _mean(samples: Sequence[Sample]) -> list[str]:
    sums = [s for s in samples if s.name.endswith("_sum")]
    counts = [s for s in samples if s.name.endswith("_count")]
    return [
        _labelled(total, f"{total.value / count.value:.3g} s (mean of {count.value:.0f})")
        for total, count in zip(sums, counts, strict=True)
        if count.value
    ] or ["none yet"]


def _labelled(sample: Sample, value: str) -> str:
    return " ".join([*(v for v in sample.labels.values() if v), value])


def _value(name: str, value: float) -> str:
    if name.endswith("_timestamp_seconds"):
        left = (value - time.time()) // _DAY
        return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d} ({left:.0f} days left)"
    if name.endswith("_seconds"):
        return f"{value:.3g} s"
    if name.endswith("_bytes"):
        return f"{value / 1e6:,.1f} MB"
    return f"{value:.6g}"
