"""TLS for both ends, and plain words for why a handshake failed."""

from __future__ import annotations

import http.client
import os
import re
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import grpc
from cryptography import x509

from ...errors import ConfigError

_PROBE_SECONDS = 5.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_REASONS = {  # what OpenSSL and BoringSSL say -> what it means, seen from this end
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it showed no certificate",
    "unable to get local issuer": "its certificate is not signed by this federation's CA",
    "self signed certificate": "its certificate is not signed by this federation's CA",
    "self-signed certificate": "its certificate is not signed by this federation's CA",
    "certificate has expired": "its certificate has expired",
    "not yet valid": "its certificate is not valid yet (check the clocks)",
    "WRONG_VERSION_NUMBER": "it spoke plain text where TLS is wanted",
    "HTTP_REQUEST": "it spoke plain text where TLS is wanted",
    "ALERT_UNKNOWN_CA": "it does not trust this end's certificate: it is of another CA",
    "ALERT_CERTIFICATE_EXPIRED": "it says that this end's certificate has expired",
    "ALERT_CERTIFICATE_REQUIRED": "it wants a certificate: give --certificate and --key",
    "HANDSHAKE_FAILURE": "it wants a certificate: give --certificate and --key",
    "ALERT_CERTIFICATE_UNKNOWN": "it does not accept this end's certificate",
    "ALERT_BAD_CERTIFICATE": "it does not accept this end's certificate",
}


@dataclass(frozen=True)
class ServerTls:
    """The server's certificate and key, and the CA of clients if they must show a certificate."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Read the files; ConfigError names the one that cannot be used."""
        pair = _read_pair(self.certificate, self.key)
        ca = None if self.client_ca is None else _read_certificate(self.client_ca, "--client-ca")
        return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)


@dataclass(frozen=True)
class ClientTls:
    """The CA that the server's certificate must be of, and the client's own certificate."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files; ConfigError names the one that cannot be used."""
        ca = _read_certificate(self.ca, "--ca")
        if self.certificate is None or self.key is None:
            return grpc.ssl_channel_credentials(ca)
        key, certificate = _read_pair(self.certificate, self.key)
        return grpc.ssl_channel_credentials(ca, key, certificate)


def _read_certificate(path: Path, option: str) -> bytes:
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
    """Say why a stream to `address` cannot open, if it is a matter of TLS; else return None."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        with _connection(host, int(port), proxy) as connection:
            return _explain_plain(connection) if tls is None else _handshake(connection, host, tls)
    except (OSError, ValueError, http.client.HTTPException):
        return None


def _connection(host: str, port: int, proxy: str | None) -> socket.socket:
    if proxy is None:
        return socket.create_connection((host, port), _PROBE_SECONDS)
    way = http.client.HTTPConnection(proxy.removeprefix("http://"), timeout=_PROBE_SECONDS)
    way.set_tunnel(host, port)
    way.connect()
    connection: socket.socket = way.sock
    return connection


def _explain_plain(connection: socket.socket) -> str | None:
    """A gRPC server without TLS greets at once; one with TLS hangs up on plain text."""
    connection.sendall(_PREFACE)
    try:
        greeting = connection.recv(9)
    except ConnectionError:
        greeting = b""
    if len(greeting) == 9 and greeting[3] == 4:  # a SETTINGS frame
        return None
    return "it does not answer plain text as gRPC does: give --ca if it speaks TLS"


def _handshake(connection: socket.socket, host: str, tls: ClientTls) -> str | None:
    context = ssl.create_default_context(cafile=str(tls.ca))
    context.set_alpn_protocols(["h2"])
    if tls.certificate and tls.key:
        context.load_cert_chain(tls.certificate, tls.key)
    try:
        with context.wrap_socket(connection, server_hostname=host) as secure:
            return None if _greets(secure) else _unwelcome(tls)
    except ssl.SSLCertVerificationError as error:
        if "ostname mismatch" in error.verify_message or "IP address mismatch" in str(error):
            return f"its certificate is not for {host!r}: {error.verify_message}"
        return plain_reason(error.verify_message)
    except ssl.SSLError as error:
        return plain_reason(f"{error.reason} {error}")


def _greets(secure: ssl.SSLSocket) -> bool:
    """A server judges the client's certificate after the handshake; gRPC's then just hangs up."""
    try:
        return bool(secure.recv(1))
    except ConnectionError:
        return False


def _unwelcome(tls: ClientTls) -> str:
    if tls.certificate is None:
        return "it wants a certificate: give --certificate and --key"
    return (
        f"it does not accept the certificate in {str(tls.certificate)!r}: that must be of the "
        "server's CA and still be valid there"
    )


def plain_reason(text: str) -> str:
    """Turn what a TLS library says into a sentence."""
    for mark, reason in _REASONS.items():
        if mark.lower() in text.lower():
            return reason
    return f"TLS handshake failed: {text}"


class HandshakeLog:
    """Hears of refused handshakes, which gRPC's core writes to file descriptor 2 and nowhere else.

    At GRPC_VERBOSITY=info, that is, set before gRPC is first used: importing flwr sets another one.
    Meanwhile Python's own standard error goes where it went before, and so does what other C code
    writes there, and what gRPC's core has to say of warnings and errors.
    """

    _LINE = re.compile(r"ssl_transport_security\.cc.*Handshake failed with (?:fatal )?error (.*)")

    _CHATTER = re.compile(r"I\d{4} \S+ +\d+ \w+\.cc:\d+\] ")

    def __init__(self, on_refusal: Callable[[str], None]) -> None:
        self._on_refusal = on_refusal

    def __enter__(self) -> Self:
        sys.stderr.flush()
        self._original = os.dup(2)
        self._python_stderr = sys.stderr
        sys.stderr = os.fdopen(
            os.dup(self._original),
            "w",
            buffering=1,
            encoding=getattr(sys.stderr, "encoding", None),
            errors=getattr(sys.stderr, "errors", None),
        )
        reader, writer = os.pipe()
        os.dup2(writer, 2)
        os.close(writer)
        self._thread = threading.Thread(target=self._read, args=(reader,), daemon=True)
        self._thread.start()
        return self

    def _read(self, reader: int) -> None:
        with os.fdopen(reader, "r", errors="replace") as lines:
            for line in lines:
                found = self._LINE.search(line)
                if found:
                    self._on_refusal(plain_reason(found[1]))
                elif not self._CHATTER.match(line):
                    os.write(self._original, line.encode())

    def __exit__(self, *_: object) -> None:
        os.dup2(self._original, 2)  # closes the pipe's last writer, so the reader ends
        self._thread.join(_PROBE_SECONDS)
        own = sys.stderr
        sys.stderr = self._python_stderr
        own.close()
        os.close(self._original)
