"""A server of the page of a run at work: read-only, renewed as the run's files change."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ...errors import ConfigError
from ..reading import CONFIG, ROUNDS, SUMMARY, record_of_line, run_folders
from .labels import Labels
from .page import Report, content
from .runs import COMPARISON

_OWN_NAMES = ["localhost", "127.0.0.1", "["]  # the last of all: what is split off [::1]:PORT


class Watched:
    """Runs whose page is made anew when their files have changed, for one reader at a time."""

    def __init__(self, given: Sequence[Path]) -> None:
        """ConfigError if there is no run in these folders."""
        self._given = given
        self._labels = Labels()
        self._parse = lru_cache(maxsize=None)(record_of_line)  # a line is parsed once
        self._lock = threading.Lock()
        self._report = self.report()

    def report(self) -> tuple[str, Report]:
        """Return the state of the runs, and their page; ConfigError if one cannot be read."""
        folders = run_folders(self._given)
        state = self._state(folders)  # before they are read: what comes meanwhile is newer
        return state, Report(folders, self._given, self._labels, self._parse)

    def newest(self) -> tuple[str, Report]:
        """Return what `report` does, from before where nothing has changed since."""
        with self._lock:
            if self._state(run_folders(self._given)) != self._report[0]:
                self._report = self.report()
            return self._report

    def _state(self, folders: Sequence[Path]) -> str:
        """Return what changes whenever a file that is read does."""
        files = [folder / COMPARISON for folder in self._given]
        files += [folder / name for folder in folders for name in (ROUNDS, SUMMARY, CONFIG)]
        found = []
        for file in files:
            with contextlib.suppress(OSError):
                seen = file.stat()
                found.append(f"{seen.st_mtime_ns:x}.{seen.st_size:x}")
        return hashlib.sha256("-".join(found).encode()).hexdigest()[:16]


def application(watched: Watched, host: str) -> Starlette:
    """Return the application; at a loopback address it answers to this machine's own names alone,
    so that no page of another site can read it by giving its own name this address."""

    def page(request: Request) -> Response:
        state, report = watched.newest()
        return Response(report.html(live=state), media_type="text/html")

    def newer(request: Request) -> Response:
        state, report = watched.newest()
        if request.query_params.get("seen") == state:
            return Response(status_code=204)
        return Response(content(report, state), media_type="application/json")

    def unreadable(request: Request, error: Exception) -> Response:
        return PlainTextResponse(str(error), status_code=503)

    names = [*_OWN_NAMES, host] if is_loopback(host) else ["*"]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=names)
    return Starlette(
        routes=[Route("/", page), Route("/content", newer)],
        middleware=[hosts, Middleware(GZipMiddleware, minimum_size=1000)],
        exception_handlers={ConfigError: unreadable, OSError: unreadable},
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def serve(given: Sequence[Path], host: str, port: int, on_start: Callable[[int], None]) -> None:
    """Serve the page until Ctrl-C; `on_start` hears of the port before the first request.

    ConfigError if there is no run, or the address cannot be used.
    """
    watched = Watched(given)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"--address: cannot listen on {host} port {port}: {error.strerror or error}; name "
            "another address, with port 0 for any that is free"
        ) from error
    app = application(watched, host)
    config = uvicorn.Config(app, log_level="warning", ws="none", lifespan="off", access_log=False)
    with listening, contextlib.suppress(KeyboardInterrupt):
        on_start(listening.getsockname()[1])
        uvicorn.Server(config).run(sockets=[listening])
