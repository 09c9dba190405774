"""Small text files that decide what becomes of data: one value and its checksum, on one line.

    <value> crc32c=<of the value, 8 hex digits>     and a newline

One flipped bit in such a file must not hide records, or have them deleted. Files of earlier versions have the value
alone, with its newline.
"""

from crc32c import crc32c

from chronik.storage.disk import Disk, read_file

__all__ = ["Damaged", "decode_value", "encode_value", "read_number"]


class Damaged(ValueError):
    """The file is not what this process would have written."""


def _checksum(value: str) -> str:
    # The name keeps it from passing for a part of the value, should the space between them be damaged.
    return f"crc32c={crc32c(value.encode()):08x}"


def encode_value(value: str) -> bytes:
    return f"{value} {_checksum(value)}\n".encode()


def decode_value(data: bytes) -> str:
    """The value. Raises Damaged."""
    try:
        value, separator, checksum = data.decode().removesuffix("\n").partition(" ")
    except UnicodeDecodeError:
        raise Damaged("it is no text") from None
    if not data.endswith(b"\n"):
        raise Damaged("it is cut off")
    if separator and checksum != _checksum(value):
        raise Damaged("it fails its checksum")
    return value


def read_number(disk: Disk, path: str) -> int | None:
    """The number in a file; None where there is none, or none that can be believed."""
    data = read_file(disk, path)
    try:
        return int(decode_value(data)) if data else None
    except ValueError:
        return None
