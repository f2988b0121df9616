"""Certificates that end before their time, and a look at those that there are."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

import filelock
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import ConfigError
from ..problems import foreign_text
from .certificates import CA, REVOKED, load_authority, load_certificate, write

_Entries = dict[int, x509.RevokedCertificate]  # by serial number
_Extension = TypeVar("_Extension", bound=x509.ExtensionType)


class Shown(NamedTuple):
    """One certificate, for people."""

    file: str
    kind: str
    names: str
    since: str
    until: str
    state: str
    serial: str


def revoke(directory: Path, names: Sequence[str]) -> Path:
    """Add client certificates to revoked.pem in `directory`, a CRL that its authority signs.

    A name is that of a certificate in `directory` or the path of a file. Returns the list's path;
    without names it is written as it was, or empty. ConfigError names what cannot be revoked.
    """
    authority, key = load_authority(directory)
    path = directory / f"{REVOKED}.pem"
    now = datetime.now(UTC)
    with filelock.FileLock(path.with_suffix(".lock")):  # or one of two at a time would be lost
        entries = _read_entries(path, authority)
        for name in names:
            serial = _client_certificate(directory, name, authority).serial_number
            builder = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
            entries.setdefault(serial, builder.build())
        revoked = (
            x509.CertificateRevocationListBuilder(revoked_certificates=[*entries.values()])
            .issuer_name(authority.subject)
            .last_update(now)
            .next_update(authority.not_valid_after_utc)  # it counts until there is another
            .add_extension(x509.CRLNumber(len(entries)), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False
            )
            .sign(key, hashes.SHA256())
        )
        _replace(path, revoked.public_bytes(serialization.Encoding.PEM))
    return path


def certificates_at(path: Path) -> list[Shown]:
    """Describe a certificate, or all in a folder, beside whose ca.pem and revoked.pem they lie."""
    folder = path if path.is_dir() else path.parent
    files = sorted(folder.glob("*.pem")) if path.is_dir() else [path]
    authority, entries = None, _Entries()
    if (folder / f"{CA}.pem").exists():
        authority = load_certificate(folder / f"{CA}.pem", "PATH")
        entries = _read_entries(folder / f"{REVOKED}.pem", authority)
    shown = []
    for file in files:
        try:
            certificate = load_certificate(file, "PATH")
        except ConfigError:
            if file == path:
                raise
            continue  # the list of those revoked, among others
        shown.append(_shown(file, certificate, authority, entries))
    if not shown:
        raise ConfigError(f"PATH: no certificates in {str(path)!r}; run `fedopt certs init` there")
    return shown


def _shown(
    file: Path,
    certificate: x509.Certificate,
    authority: x509.Certificate | None,
    entries: _Entries,
) -> Shown:
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    state = "valid"
    if authority is not None and not _is_of(authority, certificate):
        state = "of another CA"
    elif entry := entries.get(certificate.serial_number):
        state = f"revoked {entry.revocation_date_utc:%Y-%m-%d}"
    elif until < datetime.now(UTC):
        state = "expired"
    elif since > datetime.now(UTC):
        state = "not valid yet"
    dates = (f"{since:%Y-%m-%d}", f"{until:%Y-%m-%d}")
    serial = f"{certificate.serial_number:x}"
    return Shown(file.name, _kind(certificate), _names(certificate), *dates, state, serial)


def _client_certificate(
    directory: Path, name: str, authority: x509.Certificate
) -> x509.Certificate:
    path = Path(name) if name.endswith(".pem") else directory / f"{name}.pem"
    certificate = load_certificate(path, "NAME")
    if not _is_of(authority, certificate):
        raise ConfigError(
            f"NAME: {str(path)!r} is not of the authority in {str(directory)!r}; name that "
            "authority's folder by --directory"
        )
    if (kind := _kind(certificate)) != "client":
        raise ConfigError(
            f"NAME: {str(path)!r} is of kind {kind!r}; only a client's can be revoked, as only a "
            "server reads the list; make a new authority if the key of this one is lost to others"
        )
    return certificate


def _is_of(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _kind(certificate: x509.Certificate) -> str:
    constraints = _extension(certificate, x509.BasicConstraints)
    if constraints is not None and constraints.ca:
        return "authority"
    purposes = _extension(certificate, x509.ExtendedKeyUsage) or ()
    kinds = {ExtendedKeyUsageOID.SERVER_AUTH: "server", ExtendedKeyUsageOID.CLIENT_AUTH: "client"}
    return next((kinds[purpose] for purpose in purposes if purpose in kinds), "other")


def _names(certificate: x509.Certificate) -> str:
    hosts = _extension(certificate, x509.SubjectAlternativeName)
    own = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return foreign_text(", ".join(str(name.value) for name in hosts or own))


def _extension(certificate: x509.Certificate, kind: type[_Extension]) -> _Extension | None:
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except (x509.ExtensionNotFound, ValueError):  # or one that cannot be read
        return None


def _read_entries(path: Path, authority: x509.Certificate) -> _Entries:
    """Return what a list holds; nothing if there is none yet."""
    try:
        revoked = x509.load_pem_x509_crl(path.read_bytes())
        if not revoked.is_signature_valid(authority.public_key()):  # type: ignore[arg-type]
            raise ValueError(f"it is not signed by the {CA}.pem beside it")
        return {entry.serial_number: entry for entry in revoked}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{str(path)!r} holds no list of revoked certificates: {error}; put it back as "
            "`fedopt certs revoke` wrote it"
        ) from None


def _replace(path: Path, contents: bytes) -> None:
    """Write a file that a server may read at any moment: whole, or as it was."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    write(unfinished, contents, 0o644)
    os.replace(unfinished, path)
