"""Certificates that count no more although their time is not over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import grpc
from cryptography import x509

from ...errors import ConfigError
from .tls import state_of_file

REVOKED = "this certificate was revoked; ask for a new one"


class RevokedList:
    """The serial numbers in a list (a CRL in PEM) that the clients' CA signed, as the file is now.

    A list that is no longer readable, or of another CA, is said once; the one that was read before
    it stays in force.
    """

    def __init__(self, path: Path, ca: Path, say: Callable[[str, str], None]) -> None:
        self._path, self._ca, self._say = path, ca, say
        self._lock = threading.Lock()
        self._seen: object = None  # the file when it was read last, or why it could not be
        self._serials: frozenset[int] = frozenset()
        try:
            self._serials = self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--revoked: {str(path)!r} holds no list of revoked certificates: {error}; name "
                "the one that `fedopt certs revoke` writes (without names: an empty one)"
            ) from None

    def refuses(self, serial: int | None) -> bool:
        """Whether a certificate is listed, or has no serial number that could be."""
        with self._lock:
            seen = state_of_file(self._path)
            if seen != self._seen:
                self._seen = seen  # as it was before it is read, so that a later change counts
                try:
                    self._serials = self._read()
                except (OSError, ValueError) as error:
                    text = f"{error}; the list that was read before it stays in force"
                    self._say("--revoked", text)
            return serial is None or serial in self._serials

    def _read(self) -> frozenset[int]:
        revoked = x509.load_pem_x509_crl(self._path.read_bytes())
        authorities = x509.load_pem_x509_certificates(self._ca.read_bytes())
        if not any(_has_signed(authority, revoked) for authority in authorities):
            raise ValueError("it is not signed by --client-ca")
        return frozenset(entry.serial_number for entry in revoked)


def _has_signed(authority: x509.Certificate, revoked: x509.CertificateRevocationList) -> bool:
    try:
        return revoked.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    except TypeError:  # a key of a kind that signs no lists
        return False


def peer_certificate(context: grpc.ServicerContext) -> x509.Certificate | None:
    """Return the caller's certificate; None if there is none to read."""
    try:
        return x509.load_pem_x509_certificate(context.auth_context()["x509_pem_cert"][0])
    except (KeyError, IndexError, ValueError):
        return None
