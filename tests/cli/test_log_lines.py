"""A node's log consists of whole JSON lines, even if its disk was full for a while."""

from __future__ import annotations

import errno
import json

from chronik.cli.start import LogLines


class Disk:
    """A disk with room for `room` bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.content = b""

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = data[: self.room]
        self.room -= len(taken)
        self.content += taken
        return len(taken)


def line(number: int) -> str:
    return json.dumps({"number": number}) + "\n"


def test_a_truncated_log_line_does_not_corrupt_the_next_line() -> None:
    disk = Disk(room=len(line(1)) + 5)
    write = LogLines(disk.write)
    for number in (1, 2, 3):
        write(line(number))
    disk.room = 1_000
    write(line(4))
    write(line(5))
    lines = disk.content.decode().splitlines()
    assert [json.loads(found)["number"] for found in (lines[0], *lines[2:])] == [1, 4, 5]
    assert lines[1] == line(2)[:5]


def test_a_broken_pipe_does_not_stop_the_writer() -> None:
    def gone(data: bytes) -> int:
        raise BrokenPipeError

    LogLines(gone)("x\n")
