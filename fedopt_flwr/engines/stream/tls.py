"""TLS for both ends, and plain words for why a handshake failed."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
from cryptography import x509

from ...errors import ConfigError, FedoptWarning

FEW_DAYS = 30  # left of a certificate, with which it is time for another
_PROBE_SECONDS = 5.0
_STAYS_SECONDS = 0.5
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_NAMESAKE = "its certificate is not signed by this federation's CA, but by one of the same name"
_REASONS = {  # what OpenSSL says -> what it means, seen from this end
    "unable to get local issuer": "its certificate is not signed by this federation's CA",
    "self signed certificate": "its certificate is not signed by this federation's CA",
    "self-signed certificate": "its certificate is not signed by this federation's CA",
    "certificate signature failure": _NAMESAKE,
    "BAD_SIGNATURE": _NAMESAKE,
    "certificate has expired": "its certificate has expired",
    "not yet valid": "its certificate is not valid yet (check the clocks)",
    "WRONG_VERSION_NUMBER": "it spoke plain text where TLS is wanted",
    "ALERT_UNKNOWN_CA": "it does not trust this end's certificate: it is of another CA",
    "ALERT_CERTIFICATE_EXPIRED": "it says that this end's certificate has expired",
    "ALERT_CERTIFICATE_REQUIRED": "it wants a certificate: give --certificate and --key",
    "HANDSHAKE_FAILURE": "it wants a certificate: give --certificate and --key",
    "ALERT_CERTIFICATE_UNKNOWN": "it does not accept this end's certificate",
    "ALERT_BAD_CERTIFICATE": "it does not accept this end's certificate",
}


def days_left(end: datetime) -> int:
    """Return whole days from now, below 0 if it is over."""
    return (end - datetime.now(UTC)).days


@dataclass(frozen=True)
class ServerTls:
    """The server's certificate and key, and the CA of clients if they must show a certificate.

    `revoked` is a list, signed by that CA, of those of its certificates that count no more.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None
    revoked: Path | None = None

    def credentials(
        self, say: Callable[[str, str], None] = lambda what, problem: None
    ) -> grpc.ServerCredentials:
        """Read the files; ConfigError names the one that cannot be used.

        Files that change are read again for the connections that come after. `say` hears of those
        that cannot be used; what was read before them stays in force.
        """
        return grpc.dynamic_ssl_server_credentials(
            self._read(), _Renewal(self, say), self.client_ca is not None
        )

    def ends(self) -> dict[str, datetime]:
        """Return when its certificates end that can be read."""
        return _ends(own=self.certificate, ca=self.client_ca)

    def _read(self) -> grpc.ServerCertificateConfiguration:
        pair = _read_pair(self.certificate, self.key)
        ca = None if self.client_ca is None else _read_certificate(self.client_ca, "--client-ca")
        return grpc.ssl_server_certificate_configuration([pair], ca)


class _Renewal:
    """Called at each handshake: returns what it is to use from now on, None if nothing changed."""

    def __init__(self, tls: ServerTls, say: Callable[[str, str], None]) -> None:
        self._tls, self._say = tls, say
        self._lock = threading.Lock()
        self._seen = self._state_of_files()

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        with self._lock:
            seen = self._state_of_files()
            if seen == self._seen:
                return None
            self._seen = seen  # as it was before they are read, so that a later change counts
            try:
                return self._tls._read()
            except ConfigError as error:  # such as a new certificate whose key is not there yet
                self._say("certificates", f"{error}; those that were read before stay in force")
                return None

    def _state_of_files(self) -> list[object]:
        tls = self._tls
        paths = [path for path in (tls.certificate, tls.key, tls.client_ca) if path is not None]
        return [state_of_file(path) for path in paths]


def state_of_file(path: Path) -> object:
    """Return what differs when a file was written again, or why it cannot be seen."""
    try:
        state = path.stat()
    except OSError as error:
        return str(error)
    return state.st_mtime_ns, state.st_size, state.st_ino


@dataclass(frozen=True)
class ClientTls:
    """The CA that the server's certificate must be of, and the client's own certificate."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None

    def ends(self) -> dict[str, datetime]:
        """Return when its certificates end that can be read."""
        return _ends(own=self.certificate, ca=self.ca)

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files; ConfigError names the one that cannot be used."""
        ca = _read_certificate(self.ca, "--ca")
        if self.certificate is None or self.key is None:
            return grpc.ssl_channel_credentials(ca)
        key, certificate = _read_pair(self.certificate, self.key)
        return grpc.ssl_channel_credentials(ca, key, certificate)


def _ends(**paths: Path | None) -> dict[str, datetime]:
    found = {}
    for name, path in paths.items():
        with contextlib.suppress(OSError, ValueError):
            if path is not None:
                certificate = x509.load_pem_x509_certificate(path.read_bytes())
                found[name] = certificate.not_valid_after_utc
    return found


def _read_certificate(path: Path, option: str) -> bytes:
    """Return a file's contents; ConfigError if its certificate cannot be used, FedoptWarning if it
    soon cannot."""
    try:
        contents = path.read_bytes()
        certificate = x509.load_pem_x509_certificate(contents)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}: {str(path)!r} holds no certificate: {error}") from None
    if certificate.not_valid_after_utc < datetime.now(UTC):
        raise ConfigError(
            f"{option}: the certificate in {str(path)!r} has expired on "
            f"{certificate.not_valid_after_utc:%Y-%m-%d}; make a new one with `fedopt certs`"
        )
    if (left := days_left(certificate.not_valid_after_utc)) < FEW_DAYS:
        text = (
            f"{option}: the certificate in {str(path)!r} ends on "
            f"{certificate.not_valid_after_utc:%Y-%m-%d}, {left} days from now; make a new one "
            "with `fedopt certs`"
        )
        warnings.warn(text, FedoptWarning, stacklevel=2)
    return contents


def _read_pair(certificate: Path, key: Path) -> tuple[bytes, bytes]:
    contents = _read_certificate(certificate, "--certificate")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        return key.read_bytes(), contents
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--key: {str(key)!r} is not the key of {str(certificate)!r}: {error}"
        ) from None


def explain(address: str, tls: ClientTls | None, proxy: str | None = None) -> str | None:
    """Say why a stream to `address` cannot open, if it is a matter of TLS; else return None.

    A server that has no place for another connection hangs up on it, whatever is said.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        with _connect(host, int(port), proxy) as connection:
            if tls is not None:
                return _handshake(connection, host, tls)
            if _greets(connection):
                return None
        with _connect(host, int(port), proxy) as connection:
            if not _is_open(connection):
                return None
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return "it does not answer plain text as gRPC does: give --ca if it speaks TLS"


def _connect(host: str, port: int, proxy: str | None) -> socket.socket:
    if proxy is None:
        return socket.create_connection((host, port), _PROBE_SECONDS)
    way = http.client.HTTPConnection(proxy.removeprefix("http://"), timeout=_PROBE_SECONDS)
    way.set_tunnel(host, port)
    way.connect()
    connection: socket.socket = way.sock
    return connection


def _greets(connection: socket.socket) -> bool:
    """Whether a gRPC server without TLS is there; one with TLS hangs up on plain text."""
    connection.sendall(_PREFACE)
    with contextlib.suppress(ConnectionError):
        greeting = connection.recv(9)
        return len(greeting) == 9 and greeting[3] == 4  # a SETTINGS frame
    return False


def _is_open(connection: socket.socket) -> bool:
    """Whether a server lets a connection stay on which nothing was said yet."""
    connection.settimeout(_STAYS_SECONDS)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True


def _handshake(connection: socket.socket, host: str, tls: ClientTls) -> str | None:
    context = ssl.create_default_context(cafile=str(tls.ca))
    context.set_alpn_protocols(["h2"])
    if tls.certificate and tls.key:
        context.load_cert_chain(tls.certificate, tls.key)
    try:
        with (
            context.wrap_socket(connection, server_hostname=host) as secure,
            contextlib.suppress(ConnectionError),
        ):
            # only now a server judges the client's certificate; gRPC's then just hangs up
            if secure.recv(1):
                return None
    except ssl.SSLCertVerificationError as error:
        if "ostname mismatch" in error.verify_message or "IP address mismatch" in str(error):
            return f"its certificate is not for {host!r}: {error.verify_message}"
        return _plain_reason(error.verify_message)
    except ssl.SSLEOFError:
        return None
    except ssl.SSLError as error:
        return _plain_reason(f"{error.reason} {error}")
    if tls.certificate is None:
        return "it wants a certificate: give --certificate and --key"
    return (
        f"it does not accept the certificate in {str(tls.certificate)!r}: that must be of the "
        "server's CA and still be valid there"
    )


def _plain_reason(text: str) -> str:
    for mark, reason in _REASONS.items():
        if mark.lower() in text.lower():
            return reason
    return f"TLS handshake failed: {text}"
