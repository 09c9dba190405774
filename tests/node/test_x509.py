"""Compared with the library `cryptography`, and with Java's RFC 2253 names."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from chronik.node.serving.x509 import MalformedCertificate, read_certificate


def certificate(*relative: x509.RelativeDistinguishedName, expires: datetime.datetime) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name(relative)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "issuer")]))
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(1980, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(expires)
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.DER)
    )


def rdn(*pairs: tuple[x509.ObjectIdentifier, str]) -> x509.RelativeDistinguishedName:
    return x509.RelativeDistinguishedName([x509.NameAttribute(kind, value) for kind, value in pairs])


@pytest.mark.parametrize("year", [1999, 2026, 2049, 2050, 2999])
def test_expiry_is_read_from_both_forms_of_time(year: int) -> None:
    expires = datetime.datetime(year, 3, 4, 5, 6, 7, tzinfo=datetime.UTC)
    fields = read_certificate(certificate(rdn((NameOID.COMMON_NAME, "a")), expires=expires))
    assert fields.expires_s == expires.timestamp()


@pytest.mark.parametrize(
    ("relative", "expected"),
    [
        ([rdn((NameOID.COUNTRY_NAME, "DE")), rdn((NameOID.COMMON_NAME, "alice"))], "CN=alice,C=DE"),
        ([rdn((NameOID.COMMON_NAME, 'a,b+c"d\\e<f>;g'))], r"CN=a\,b\+c\"d\\e\<f\>\;g"),
        ([rdn((NameOID.COMMON_NAME, " #a=b "))], r"CN=\ \#a\=b\ "),
        ([rdn((NameOID.COMMON_NAME, "Zoë"))], "CN=Zoë"),
        ([rdn((NameOID.USER_ID, "u"), (NameOID.ORGANIZATION_NAME, "o"))], None),
        ([rdn((NameOID.EMAIL_ADDRESS, "a@b"))], "1.2.840.113549.1.9.1=#1603614062"),
        ([], ""),
    ],
)
def test_subject_is_written_as_java_does(relative: list[x509.RelativeDistinguishedName], expected: str | None) -> None:
    subject = read_certificate(
        certificate(*relative, expires=datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC))
    ).subject
    if expected is None:
        assert sorted(subject.split("+")) == ["O=o", "UID=u"]
    else:
        assert subject == expected


def test_bytes_that_are_no_certificate_are_refused(tmp_path: Path) -> None:
    der = certificate(rdn((NameOID.COMMON_NAME, "a")), expires=datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC))
    for end in range(0, 200, 7):
        with pytest.raises(MalformedCertificate):
            read_certificate(der[:end])
