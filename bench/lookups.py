"""Lookups of a schema by its id at a fixed rate over keep-alive connections, from one process.

    python bench/lookups.py HOST PORT PATH RATE SECONDS CONNECTIONS

Lookups are due at equal intervals, whether earlier ones have been answered or not, and a latency counts from the time
at which a lookup was due: a node that falls behind shows it. Ctrl-C ends it early. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import deque

TICK_S = 0.002
LEFT_S_MAX = 10.0


class Lookups(asyncio.Protocol):
    """One connection, with one lookup at a time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._received = b""
        self._due_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, due_s: float) -> None:
        self._due_s = due_s
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        at = head.lower().index(b"content-length:") + len(b"content-length:")
        if len(body) < int(head[at:].split(b"\r\n", 1)[0]):
            return
        self._received = b""
        self._load.answered(self, self._due_s, head.startswith(b"HTTP/1.1 200"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.lost()


class Load:
    def __init__(self, host: str, port: int, path: str) -> None:
        self.request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
        self.latencies_ms: list[float] = []
        self.errors = 0
        self._free: deque[Lookups] = deque()
        self._due: deque[float] = deque()
        self._is_stopped = False

    def answered(self, connection: Lookups, due_s: float, is_found: bool) -> None:
        self.latencies_ms.append((time.perf_counter() - due_s) * 1000)
        self.errors += not is_found
        self._free.append(connection)
        self._send()

    def lost(self) -> None:
        self.errors += not self._is_stopped

    def _stop(self) -> None:
        self._is_stopped = True

    def _send(self) -> None:
        while self._due and self._free:
            self._free.popleft().send(self._due.popleft())

    async def run(self, host: str, port: int, rate: float, seconds: float, connections: int) -> float:
        """Return the seconds until the last answer."""
        loop = asyncio.get_running_loop()
        made = [await loop.create_connection(lambda: Lookups(self), host, port) for _ in range(connections)]
        self._free.extend(connection for _, connection in made)
        began_s, sent, count = time.perf_counter(), 0, int(rate * seconds)
        loop.add_signal_handler(signal.SIGINT, self._stop)
        while len(self.latencies_ms) < count and not self.errors and not self._is_stopped:
            passed_s = time.perf_counter() - began_s
            if passed_s > seconds + LEFT_S_MAX:
                break
            while sent < count and sent / rate <= passed_s:
                self._due.append(began_s + sent / rate)
                sent += 1
            self._send()
            await asyncio.sleep(TICK_S)
        took_s = time.perf_counter() - began_s
        self._is_stopped = True
        for transport, _ in made:
            transport.abort()
        return took_s


def main(host: str, port: str, path: str, rate: str, seconds: str, connections: str) -> int:
    load = Load(host, int(port), path)
    took_s = asyncio.run(load.run(host, int(port), float(rate), float(seconds), int(connections)))
    taken = sorted(load.latencies_ms)
    found = {"lookups": len(taken), "seconds": took_s, "per_s": len(taken) / took_s, "errors": load.errors}
    print(json.dumps(found | {f"p{part}_ms": taken[len(taken) * part // 100] for part in (50, 99)}))
    return 1 if load.errors else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
