"""How a client reaches the server."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field

from .protocol import channel_options
from .tls import ClientTls

_LARGEST_METADATA = 128 << 10  # bytes from a server: a model's options have up to 16 Ki characters


@dataclass(frozen=True)
class ServerAddress:
    """Where the server is and how to speak to it; `tls` None is plain text.

    `proxy` is http://host:port, and counts only for an address outside this machine. A message of
    more than `max_message_mb` MiB is refused. `token` is what a server demands that `fedopt launch`
    started.
    """

    address: str
    tls: ClientTls | None
    keep_alive_seconds: float
    proxy: str | None = None
    max_message_mb: int = 512  # of a message from the server
    token: str = field(default="", repr=False)

    @property
    def proxy_in_use(self) -> str | None:
        return proxy_for(self.address, self.proxy)

    def channel_options(self, takes: int, ping_seconds: float) -> list[tuple[str, int | str]]:
        """Return gRPC's options for a channel to it that takes messages of `takes` bytes."""
        options = channel_options(self.keep_alive_seconds, takes, ping_seconds)
        options.append(("grpc.max_metadata_size", _LARGEST_METADATA))
        options.append(("grpc.absolute_max_metadata_size", _LARGEST_METADATA))
        proxy = self.proxy_in_use
        # by itself gRPC would obey http_proxy and the like, which are often set for a browser and
        # end at a proxy that lets no stream through
        options.append(("grpc.enable_http_proxy", int(proxy is not None)))
        if proxy is not None:
            options.append(("grpc.http_proxy", proxy))
        return options

    def __str__(self) -> str:
        proxy = self.proxy_in_use
        return self.address if proxy is None else f"{self.address} through the proxy {proxy}"


def proxy_for(address: str, proxy: str | None) -> str | None:
    """Return the proxy to reach `address` through: never one for this machine or for a host that
    the environment variable no_proxy names."""
    host = address.rpartition(":")[0].strip("[]")
    given = [os.environ[name] for name in ("no_grpc_proxy", "no_proxy") if os.environ.get(name)]
    exempt = [entry.strip() for entry in given[0].split(",")] if given else []  # as gRPC reads it
    if _is_loopback(host) or any(entry and host.endswith(entry) for entry in exempt):
        return None
    return proxy


def _is_loopback(host: str) -> bool:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host.rstrip(".").lower().rpartition(".")[2] == "localhost"
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.is_loopback or ip.is_unspecified
