"""Certificates for development and tests: an authority, and the certificates that it issues to nodes and clients.

    ca.pem, ca.key          the authority; with ca.key, an attacker can become any node or client
    NAME.pem, NAME.key      a certificate and its private key (PKCS#8, so that Java reads it too)

All files are PEM, keys have mode 0600, and each file is replaced at once: a node that reloads never reads half of one.
A certificate serves as a server's and as a client's, because nodes are both to each other.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from chronik.local.errors import LocalClusterError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY_NAME = "ca"
AUTHORITY_DAYS = 10 * 365
CERTIFICATE_DAYS = 365
CLOCK_SKEW_S = 300
"""A new certificate is valid a little earlier: the clocks of other machines may be late."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Authority:
    """A certificate authority with its private key."""

    def __init__(self, folder: Path, certificate: x509.Certificate, key: EllipticCurvePrivateKey) -> None:
        self.certificate_path = folder / f"{AUTHORITY_NAME}.pem"
        self._certificate = certificate
        self._key = key

    def issue(
        self,
        folder: str | os.PathLike[str],
        name: str,
        hosts: Sequence[str],
        *,
        days: int = CERTIFICATE_DAYS,
        since: datetime.datetime | None = None,
    ) -> tuple[Path, Path]:
        """Write a new key and its certificate to `folder`; return the paths of the certificate and of the key.

        The subject is CN=`name`. `hosts` are host names and IP addresses; a client's certificate needs none.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        if not _NAME.fullmatch(name) or name == AUTHORITY_NAME:
            raise LocalClusterError(f"{name!r} cannot name a certificate: use letters, digits, dots and dashes")
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        authority_id = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(
            self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        )
        builder = (
            _builder(name, self._certificate.subject, key, since, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(is_authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(authority_id, critical=False)
        )
        if hosts:
            alternatives = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(alternatives, critical=False)
        return _write_pair(Path(folder), name, builder.sign(self._key, hashes.SHA256()), key)


def create_authority(folder: str | os.PathLike[str]) -> Authority:
    """Create an authority in `folder`. An existing one is not replaced: certificates that it issued would be lost."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    place = Path(folder)
    if (place / f"{AUTHORITY_NAME}.key").exists():
        raise LocalClusterError(f"{place} already has an authority: use it, or choose another folder")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject("Chronik development authority")
    certificate = (
        _builder("Chronik development authority", subject, key, None, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(is_authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write_pair(place, AUTHORITY_NAME, certificate, key)
    return Authority(place, certificate, key)


def load_authority(folder: str | os.PathLike[str]) -> Authority:
    """Load the authority that `create_authority` wrote to `folder`."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    place = Path(folder)
    try:
        certificate = x509.load_pem_x509_certificate((place / f"{AUTHORITY_NAME}.pem").read_bytes())
        key = load_pem_private_key((place / f"{AUTHORITY_NAME}.key").read_bytes(), password=None)
    except OSError as error:
        raise LocalClusterError(f"{place} has no authority ({error.strerror}): create one first") from None
    except (ValueError, TypeError):
        raise LocalClusterError(f"the authority in {place} is not readable as PEM: choose another folder") from None
    if not isinstance(key, EllipticCurvePrivateKey) or certificate.public_key() != key.public_key():
        raise LocalClusterError(f"ca.pem and ca.key in {place} do not belong together: choose another folder")
    return Authority(place, certificate, key)


def _subject(name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    name: str, issuer: x509.Name, key: EllipticCurvePrivateKey, since: datetime.datetime | None, days: int
) -> x509.CertificateBuilder:
    from cryptography import x509

    start = since or datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=CLOCK_SKEW_S)
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, is_authority: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _write_pair(
    folder: Path, name: str, certificate: x509.Certificate, key: EllipticCurvePrivateKey
) -> tuple[Path, Path]:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    folder.mkdir(parents=True, exist_ok=True)
    certificate_path, key_path = folder / f"{name}.pem", folder / f"{name}.key"
    _replace(key_path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    _replace(certificate_path, certificate.public_bytes(Encoding.PEM), 0o644)
    return certificate_path, key_path


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Write a file under another name, then rename it. `mkstemp` creates it with mode 0600."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
