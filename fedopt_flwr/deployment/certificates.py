"""A small certificate authority for one federation, made with the `cryptography` package."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import ConfigError

CA = "ca"
SERVER = "server"
_BACKDATED = timedelta(minutes=5)  # clocks of two machines differ


def create_authority(directory: Path, hosts: Sequence[str], days: int) -> list[Path]:
    """Write ca and server (.pem and .key) into `directory`; return the four paths.

    `hosts` are the names and addresses under which clients reach the server. Existing files are
    never written over: ConfigError names the first.
    """
    if not hosts:
        raise ConfigError("--host: none given; name every host name and IP address of the server")
    alternatives = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
    paths = _free_paths(directory, CA, SERVER)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name("fedopt-flwr CA")
    authority = _builder(subject, subject, key.public_key(), days, signs_certificates=True)
    _write_pair(directory / CA, authority.sign(key, hashes.SHA256()), key)
    _issue(directory, SERVER, hosts[0], ExtendedKeyUsageOID.SERVER_AUTH, days, alternatives)
    return paths


def create_client(directory: Path, name: str, days: int) -> list[Path]:
    """Write NAME.pem and NAME.key, signed by the authority in `directory`; return their paths.

    The common name is the identity: one client id, or several as in "0-24".
    """
    if name in (CA, SERVER) or "/" in name or name.startswith(".") or not 0 < len(name) <= 64:
        raise ConfigError(
            f"NAME: got {name!r}; must be a client id (or several, as 0-24) of at most 64 letters, "
            "without '/', and neither 'ca' nor 'server'"
        )
    paths = _free_paths(directory, name)
    _issue(directory, name, name, ExtendedKeyUsageOID.CLIENT_AUTH, days, None)
    return paths


def _issue(
    directory: Path,
    stem: str,
    common_name: str,
    purpose: x509.ObjectIdentifier,
    days: int,
    alternatives: x509.SubjectAlternativeName | None,
) -> None:
    authority, authority_key = _load_authority(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(common_name)
    builder = (
        _builder(subject, authority.subject, key.public_key(), days, signs_certificates=False)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
    )
    if alternatives is not None:
        builder = builder.add_extension(alternatives, critical=False)
    _write_pair(directory / stem, builder.sign(authority_key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    days: int,
    *,
    signs_certificates: bool,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    path_length = 0 if signs_certificates else None
    usage = x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.BasicConstraints(signs_certificates, path_length), critical=True)
        .add_extension(usage, critical=True)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternative(host: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    try:
        return x509.DNSName(host)
    except ValueError:
        raise ConfigError(
            f"--host: got {host!r}; must be a host name in ASCII or an IP address"
        ) from None


def _load_authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate = directory / f"{CA}.pem"
    key = directory / f"{CA}.key"
    try:
        loaded = serialization.load_pem_private_key(key.read_bytes(), password=None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError("its key is not of the kind that `fedopt certs init` makes")
        return x509.load_pem_x509_certificate(certificate.read_bytes()), loaded
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--directory: no authority in {str(directory)!r}: {error}; run `fedopt certs init`"
        ) from None


def _free_paths(directory: Path, *names: str) -> list[Path]:
    """Return certificate and key of each name; ConfigError for the first that exists."""
    paths = [directory / f"{name}{end}" for name in names for end in (".pem", ".key")]
    for path in paths:
        if path.exists():
            raise ConfigError(
                f"{str(path)!r} exists already and is not written over; name another folder or "
                "remove it"
            )
    return paths


def _write_pair(stem: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    _write(stem.with_name(stem.name + ".key"), private, 0o600)
    public = certificate.public_bytes(serialization.Encoding.PEM)
    _write(stem.with_name(stem.name + ".pem"), public, 0o644)


def _write(path: Path, contents: bytes, mode: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(path, "xb", opener=partial(os.open, mode=mode)) as file:
            file.write(contents)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error}") from error
