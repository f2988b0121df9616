"""How a server's address may be written."""

from __future__ import annotations

import re

from ..errors import ConfigError


def require_address(option: str, address: str, *, lowest_port: int) -> None:
    """Raise ConfigError with the remedy unless this is HOST:PORT or [IPv6]:PORT."""
    host, _, port = address.rpartition(":")
    is_host = re.fullmatch(r"[^\s:/@\[\]]+|\[[0-9A-Fa-f:.%\w]+\]", host)
    if is_host and re.fullmatch("[0-9]{1,5}", port) and lowest_port <= int(port) <= 65535:
        return
    remedy = "name the host and the port alone, as in fl.example.org:8080 or [2001:db8::1]:8080"
    found = re.fullmatch(r"(?:\w[\w+.-]*://)?([^\s:/@]+:[0-9]{1,5})(?:/.*)?", address)
    if found and found[1] != address:
        remedy = f"write {found[1]}"
    elif address.startswith("unix:"):
        remedy = "sockets of the file system are not supported"
    elif re.fullmatch(r"[0-9A-Fa-f]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:]*", address):
        remedy = "put an IPv6 address into brackets, as in [2001:db8::1]:8080"
    elif re.fullmatch(r"(?:\w[\w+.-]*://)?[^\s:/@]+/?", address):
        remedy = "add the port, as in fl.example.org:8080"
    raise ConfigError(
        f"{option}: got {address!r}; must be HOST:PORT, with a port from "
        f"{lowest_port} to 65535; {remedy}"
    )


def with_port(address: str, port: int) -> str:
    """Return the address with the port that the system chose."""
    return f"{address.rpartition(':')[0]}:{port}"
