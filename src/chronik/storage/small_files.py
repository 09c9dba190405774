"""Small text files whose content decides the fate of data: one value or several lines, with a checksum.

    <value> crc32c=<of the value, 8 hex digits>     and a newline

    <version>
    <number of the following lines, without the last one>
    <line>...
    crc32c=<of all lines before this one, with their newlines>

One flipped bit in such a file must not hide records or cause their deletion. Files of earlier versions have only the
value and a newline.
"""

from collections.abc import Iterable

from crc32c import crc32c

from chronik.storage.disk import Disk, read_file

__all__ = ["Damaged", "decode_lines", "decode_value", "encode_lines", "encode_value", "read_number"]


class Damaged(ValueError):
    """The file is damaged or not in the expected format."""


def _checksum(value: str) -> str:
    # The prefix keeps the checksum from being read as part of the value if the space between them is damaged.
    return f"crc32c={crc32c(value.encode()):08x}"


def encode_value(value: str) -> bytes:
    return f"{value} {_checksum(value)}\n".encode()


def decode_value(data: bytes) -> str:
    """Return the value. Raises Damaged."""
    try:
        value, separator, checksum = data.decode().removesuffix("\n").partition(" ")
    except UnicodeDecodeError:
        raise Damaged("it is no text") from None
    if not data.endswith(b"\n"):
        raise Damaged("it is cut off")
    if separator and checksum != _checksum(value):
        raise Damaged("it fails its checksum")
    return value


def encode_lines(version: str, lines: Iterable[str]) -> bytes:
    lines = list(lines)
    text = "\n".join([version, str(len(lines)), *lines]) + "\n"
    return f"{text}{_checksum(text)}\n".encode()


def decode_lines(version: str, data: bytes) -> list[str]:
    """Return the lines of a file of this version. Raises Damaged."""
    try:
        text, separator, checksum = data.decode().removesuffix("\n").rpartition("\n")
    except UnicodeDecodeError:
        raise Damaged("it is no text") from None
    text += separator
    if not data.endswith(b"\n") or checksum != _checksum(text):
        raise Damaged("it is cut off, or fails its checksum")
    found, count, *lines = text.splitlines()
    if found != version or count != str(len(lines)):
        raise Damaged(f"it is of version {found}")
    return lines


def read_number(disk: Disk, path: str) -> int | None:
    """Return the number in a file; None if there is no file or no valid number."""
    data = read_file(disk, path)
    try:
        return int(decode_value(data)) if data else None
    except ValueError:
        return None
