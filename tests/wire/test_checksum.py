"""The checksum of ledgers and receipts."""

from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from chronik.wire.checksum import record_checksum

Maybe = st.none() | st.binary(max_size=20)
Headers = st.lists(st.tuples(st.text(max_size=5), Maybe), max_size=3)


def test_null_and_empty_have_different_checksums() -> None:
    seen = {
        record_checksum(None, None),
        record_checksum(b"", None),
        record_checksum(None, b""),
        record_checksum(b"", b""),
        record_checksum(b"", b"", [("", None)]),
        record_checksum(b"", b"", [("", b"")]),
    }
    assert len(seen) == 6


def test_the_checksum_covers_the_documented_layout() -> None:
    lengths = b"\x00\x00\x00\x01k" + b"\xff\xff\xff\xff" + b"\x00\x00\x00\x01" + b"\x00\x00\x00\x01h\x00\x00\x00\x02hv"
    assert record_checksum(b"k", None, [("h", b"hv")]) == crc32c(lengths)


@given(Maybe, Maybe, Headers, Maybe, Maybe, Headers)
def test_different_records_have_different_checksums(
    key: bytes | None,
    value: bytes | None,
    headers: list[tuple[str, bytes | None]],
    other_key: bytes | None,
    other_value: bytes | None,
    other_headers: list[tuple[str, bytes | None]],
) -> None:
    same = (key, value, headers) == (other_key, other_value, other_headers)
    assert (record_checksum(key, value, headers) == record_checksum(other_key, other_value, other_headers)) is same
