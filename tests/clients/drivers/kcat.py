"""kcat, the command-line client, which includes an older librdkafka.

It cannot set timestamps, and treats an empty key or value as null (`-Z`), so its records have no empty ones. Its output
format has lengths for keys and values but not for headers, so its header values are plain words.
"""

from __future__ import annotations

import itertools
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from io import BufferedReader

from tests.clients.drivers.base import (
    FETCH_WAIT_MS,
    HEARTBEAT_INTERVAL_MS,
    READ_TIMEOUT_S,
    SESSION_TIMEOUT_MS,
    ClientError,
    Headers,
    Received,
    Sent,
)

KEY_DELIMITER = "|"
FORMAT = r"%p %o %T %K %S %h\n%k%s\n"


class Kcat:
    name = "kcat"
    sets_timestamps = False

    def __init__(self) -> None:
        path = shutil.which("kcat")
        if path is None:
            raise FileNotFoundError("kcat is not on the PATH")
        self._path = path

    def produce(
        self, bootstrap: str, topic: str, records: Sequence[Sent], *, codec: str = "none", idempotent: bool = False
    ) -> None:
        for (partition, headers), same in itertools.groupby(
            records, key=lambda record: (record.partition, record.headers)
        ):
            lines = [(record.key or b"") + KEY_DELIMITER.encode() + (record.value or b"") for record in same]
            flags = ["-P", "-t", topic, "-p", str(partition), "-z", codec, "-K", KEY_DELIMITER, "-Z"]
            flags += ["-X", f"enable.idempotence={str(idempotent).lower()}", "-X", "message.timeout.ms=5000"]
            flags += ["-X", "message.max.bytes=4194304", "-X", "topic.metadata.propagation.max.ms=2000"]
            for name, value in headers:
                flags += ["-H", name if value is None else f"{name}={value.decode()}"]
            self.run(bootstrap, flags, b"\n".join(lines) + b"\n")

    def read(self, bootstrap: str, topic: str, count: int, *, partitions: Sequence[int] = (0,)) -> list[Received]:
        """Run kcat for each partition, to its end: kcat reads either all partitions or one."""
        got: list[Received] = []
        for partition in partitions:
            flags = ["-C", "-q", "-e", "-t", topic, "-p", str(partition), "-o", "beginning", "-f", FORMAT]
            flags += ["-X", f"fetch.wait.max.ms={FETCH_WAIT_MS}"]
            got += parse(self.run(bootstrap, flags))
        if len(got) < count:
            raise ClientError(None, f"kcat read {len(got)} of {count} records of {topic}")
        return got

    def join(self, bootstrap: str, topic: str, group: str, *, assignor: str = "range") -> KcatMember:
        return KcatMember(self._path, bootstrap, topic, group, assignor)

    def offset_at(self, bootstrap: str, topic: str, timestamp_ms: int) -> int | None:
        printed = self.run(bootstrap, ["-Q", "-t", f"{topic}:0:{timestamp_ms}"]).decode()
        found = re.search(r"offset (-?\d+)", printed)
        if found is None:
            raise ClientError(None, f"kcat printed {printed!r}")
        return None if int(found[1]) < 0 else int(found[1])

    def run(self, bootstrap: str, flags: Sequence[str], stdin: bytes = b"") -> bytes:
        done = subprocess.run(
            [self._path, "-b", bootstrap, *flags], input=stdin, capture_output=True, timeout=READ_TIMEOUT_S, check=False
        )
        complaint = done.stderr.decode(errors="replace")
        if done.returncode != 0 or "failed" in complaint:
            raise ClientError(None, f"kcat {' '.join(flags)} exited {done.returncode}: {complaint}")
        return done.stdout


class KcatMember:
    """kcat in a group. It commits printed records by itself, at the latest when it leaves."""

    def __init__(self, path: str, bootstrap: str, topic: str, group: str, assignor: str) -> None:
        settings = {
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": "100",
            "heartbeat.interval.ms": str(HEARTBEAT_INTERVAL_MS),
            "session.timeout.ms": str(SESSION_TIMEOUT_MS),
            "partition.assignment.strategy": assignor,
        }
        flags = [flag for name, value in settings.items() for flag in ("-X", f"{name}={value}")]
        self._process = subprocess.Popen(
            [path, "-b", bootstrap, "-u", *flags, "-f", FORMAT, "-G", group, topic],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._done: list[Received] = []
        self._partitions: frozenset[int] = frozenset()
        self._threads = [
            threading.Thread(target=read, daemon=True) for read in (self._read_records, self._read_notices)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def done(self) -> Sequence[Received]:
        return self._done

    @property
    def partitions(self) -> frozenset[int]:
        return self._partitions

    def leave(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(READ_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise ClientError(None, f"kcat did not leave within {READ_TIMEOUT_S} s") from None
        finally:
            for thread in self._threads:
                thread.join(READ_TIMEOUT_S)
            for stream in (self._process.stdout, self._process.stderr):
                if stream is not None:
                    stream.close()
            self._partitions = frozenset()

    def _read_records(self) -> None:
        stream = self._process.stdout
        assert isinstance(stream, BufferedReader)
        while line := stream.readline():
            self._done.append(_read_record(line, stream))

    def _read_notices(self) -> None:
        stream = self._process.stderr
        assert stream is not None
        for line in stream:
            notice = line.decode(errors="replace")
            if "rebalanced" in notice:
                owned = frozenset(int(found) for found in re.findall(r"\[(\d+)\]", notice))
                self._partitions = owned if "assigned" in notice else self._partitions - owned


class _Bytes:
    """A minimal stream to read records from the output of one run."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def read(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]

    def readline(self) -> bytes:
        end = self._data.find(b"\n", self._at) + 1 or len(self._data)
        return self.read(end - self._at)


def parse(printed: bytes) -> list[Received]:
    stream = _Bytes(printed)
    got = []
    while line := stream.readline():
        got.append(_read_record(line, stream))
    return got


def _read_record(line: bytes, stream: BufferedReader | _Bytes) -> Received:
    partition, offset, timestamp, key_size, value_size, headers = line.decode().rstrip("\n").split(" ", 5)
    key = _sized(int(key_size), stream)
    value = _sized(int(value_size), stream)
    stream.read(1)
    return Received(int(partition), int(offset), int(timestamp), key, value, _headers(headers))


def _sized(size: int, stream: BufferedReader | _Bytes) -> bytes | None:
    return None if size < 0 else stream.read(size)


def _headers(text: str) -> Headers:
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    return tuple((name, None if value == "NULL" else value.encode()) for name, _, value in pairs)
