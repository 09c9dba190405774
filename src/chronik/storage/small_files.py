"""Small files whose content decides the fate of data, each with a checksum. As text, one value or several lines:

    <value> crc32c=<of the value, 8 hex digits>     and a newline

    <version>
    <number of the following lines, without the last one>
    <line>...
    crc32c=<of all lines before this one, with their newlines>

As numbers, which are overwritten in place:

    int64..., crc32c of the bytes before it uint32; big-endian

One flipped bit in such a file must not hide records or cause their deletion. Files of earlier versions have only the
value and a newline.
"""

import struct
from collections.abc import Iterable
from contextlib import closing

from crc32c import crc32c

from chronik.storage.disk import Disk, read_file, write_file_atomic


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
    found_version, count, *lines = text.splitlines()
    if found_version != version or count != str(len(lines)):
        raise Damaged(f"it is of version {found_version}")
    return lines


def read_number(disk: Disk, path: str) -> int | None:
    """Return the number in a file; None if there is no file or no valid number."""
    data = read_file(disk, path)
    try:
        return int(decode_value(data)) if data else None
    except ValueError:
        return None


def write_number(disk: Disk, path: str, number: int) -> None:
    write_file_atomic(disk, path, encode_value(str(number)))


def read_numbers(disk: Disk, path: str, count: int) -> tuple[int, ...] | None:
    """Return the `count` numbers that `write_numbers` wrote; None if the file is missing or damaged."""
    data = read_file(disk, path) or b""
    layout = struct.Struct(f">{count}qI")
    if len(data) != layout.size:
        return None
    *numbers, checksum = layout.unpack(data)
    return tuple(numbers) if checksum == crc32c(data[:-4]) else None


def write_numbers(disk: Disk, path: str, *numbers: int, durably: bool) -> None:
    """Overwrite the file in place. Unless `durably`, a power loss may leave older numbers, or none."""
    data = struct.pack(f">{len(numbers)}q", *numbers)
    with closing(disk.open(path, create=True)) as file:
        file.pwrite(data + struct.pack(">I", crc32c(data)), 0)
        if durably:
            file.datasync()
