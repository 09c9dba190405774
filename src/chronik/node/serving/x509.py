"""The two parts of an X.509 certificate that a node needs: its subject, and when it expires.

Certificate     SEQUENCE { tbsCertificate, signatureAlgorithm, signature }
tbsCertificate  SEQUENCE { [0] version, serialNumber, signature, issuer, validity, subject, ... }
Name            SEQUENCE OF relative name: SET OF SEQUENCE { type OBJECT IDENTIFIER, value string }

Read here, because `ssl` does not expose them for the node's own certificate, its names of attributes are not Java's,
and loading `cryptography` costs an idle node memory.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Iterator
from typing import NamedTuple

INTEGER, OBJECT_ID, UTC_TIME, GENERALIZED_TIME, SEQUENCE, VERSION = 0x02, 0x06, 0x17, 0x18, 0x30, 0xA0

_ENCODINGS = {
    0x0C: "utf-8",
    0x12: "ascii",
    0x13: "ascii",
    0x14: "latin-1",
    0x16: "ascii",
    0x1C: "utf-32-be",
    0x1E: "utf-16-be",
}
"""By ASN.1 string type: UTF8, Numeric, Printable, Teletex, IA5, Universal, BMP."""

_TYPES = {
    "2.5.4.3": "CN",
    "2.5.4.6": "C",
    "2.5.4.7": "L",
    "2.5.4.8": "ST",
    "2.5.4.9": "STREET",
    "2.5.4.10": "O",
    "2.5.4.11": "OU",
    "0.9.2342.19200300.100.1.25": "DC",
    "0.9.2342.19200300.100.1.1": "UID",
}
"""The attribute types that RFC 2253 names, as Java does. Others are written as numbers, their values as #HEX."""


class CertificateFields(NamedTuple):
    subject: str
    """As Java's X500Principal.getName() writes it, by RFC 2253: the last relative name first."""
    expires_s: int


class MalformedCertificate(ValueError):
    """Bytes that are not a certificate."""


def read_certificate(der: bytes) -> CertificateFields:
    try:
        (certificate,) = _items(der)
        fields = list(_items(next(_items(certificate.value)).value))
        if fields[0].tag == VERSION:
            del fields[0]
        _, _, _, validity, subject = fields[:5]
        _, not_after = _items(validity.value)
        return CertificateFields(_distinguished_name(subject.value), _time_s(not_after))
    except (ValueError, IndexError, StopIteration, RuntimeError):
        raise MalformedCertificate("not an X.509 certificate") from None


class _Item(NamedTuple):
    tag: int
    value: bytes
    encoded: bytes
    """The value with its tag and length."""


def _items(der: bytes) -> Iterator[_Item]:
    at = 0
    while at < len(der):
        tag, size, begin = der[at], der[at + 1], at + 2
        if size & 0x80:
            count = size & 0x7F
            size = int.from_bytes(der[begin : begin + count], "big")
            begin += count
        end = begin + size
        if end > len(der):
            raise ValueError("truncated")
        yield _Item(tag, der[begin:end], der[at:end])
        at = end


def _time_s(item: _Item) -> int:
    text = item.value.decode("ascii")
    if item.tag == UTC_TIME:
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    year, *rest = (int(part) for part in (text[:4], text[4:6], text[6:8], text[8:10], text[10:12], text[12:14]))
    return calendar.timegm((year, *rest))


def _distinguished_name(der: bytes) -> str:
    names = [
        "+".join(_attribute(*_items(attribute.value)) for attribute in _items(relative.value))
        for relative in _items(der)
    ]
    return ",".join(reversed(names))


def _attribute(kind: _Item, value: _Item) -> str:
    number = _object_id(kind.value)
    name, encoding = _TYPES.get(number), _ENCODINGS.get(value.tag)
    if name is None or encoding is None:
        return f"{name or number}=#{value.encoded.hex()}"
    return f"{name}={_escaped(value.value.decode(encoding))}"


def _object_id(der: bytes) -> str:
    numbers, number = [], 0
    for byte in der:
        number = number << 7 | byte & 0x7F
        if not byte & 0x80:
            numbers.append(number)
            number = 0
    first = min(numbers[0] // 40, 2)
    return ".".join(map(str, (first, numbers[0] - 40 * first, *numbers[1:])))


def _escaped(text: str) -> str:
    inner = text.strip(" ")
    if not inner:
        return "\\ " * len(text)
    before, after = len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))
    escaped = _SPECIAL.sub(r"\\\1", inner).replace("\0", "\\00")
    return "\\ " * before + escaped + "\\ " * after


_SPECIAL = re.compile(r'([,=+<>#;"\\])')
"""The characters that Java escapes anywhere in a value."""
