"""Small text files that decide what becomes of data: one value or several lines, with a checksum.

    <value> crc32c=<of the value, 8 hex digits>     and a newline

    <version>
    <count of the lines that follow, without the last one>
    <line>...
    crc32c=<of all lines before this one, with their newlines>

One flipped bit in such a file must not hide records, or have them deleted. Files of earlier versions have the value
alone, with its newline.
"""

from collections.abc import Iterable

from crc32c import crc32c

from chronik.storage.disk import Disk, read_file

__all__ = ["Damaged", "decode_lines", "decode_value", "encode_lines", "encode_value", "read_number"]


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


def encode_lines(version: str, lines: Iterable[str]) -> bytes:
    lines = list(lines)
    text = "\n".join([version, str(len(lines)), *lines]) + "\n"
    return f"{text}{_checksum(text)}\n".encode()


def decode_lines(version: str, data: bytes) -> list[str]:
    """The lines of a file of this version. Raises Damaged."""
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
    """The number in a file; None where there is none, or none that can be believed."""
    data = read_file(disk, path)
    try:
        return int(decode_value(data)) if data else None
    except ValueError:
        return None
