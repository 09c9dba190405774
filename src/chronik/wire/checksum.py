"""A checksum of a record's content, to compare producers, consumers and tables without the record's bytes.

CRC-32C (Castagnoli) over:

    key            int32 length (-1: null), then the bytes
    value          int32 length (-1: null), then the bytes
    header count   int32
    each header    int32 length of its name, the name in UTF-8; int32 length of its value (-1: null), the bytes

All integers are big-endian. Null and empty differ; the order of headers matters.
"""

from collections.abc import Sequence
from struct import Struct

from crc32c import crc32c

_LENGTH = Struct(">i").pack
_NULL = _LENGTH(-1)
_NO_HEADERS = _LENGTH(0)


class _Lengths(dict[int, bytes]):
    """Packed lengths. Most keys and values hit this cache, which is faster than packing again."""

    def __missing__(self, length: int) -> bytes:
        return _LENGTH(length)


_LENGTHS = _Lengths((length, _LENGTH(length)) for length in range(2048))


def record_checksum(key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]] = ()) -> int:
    """Return the checksum that ledgers, receipts and audits store for a record."""
    if not headers:
        # The common case, and a producer's ledger needs it for each record: a quarter of the general path's time.
        if key is not None and value is not None:
            return crc32c(b"".join((_LENGTHS[len(key)], key, _LENGTHS[len(value)], value, _NO_HEADERS)))
        return crc32c(b"".join((*_field(key), *_field(value), _NO_HEADERS)))
    parts = [*_field(key), *_field(value)]
    parts.append(_LENGTH(len(headers)))
    for name, content in headers:
        parts += _field(name.encode())
        parts += _field(content)
    return crc32c(b"".join(parts))


def _field(content: bytes | None) -> tuple[bytes, ...]:
    return (_NULL,) if content is None else (_LENGTH(len(content)), content)
