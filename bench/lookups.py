"""Lookups of a schema by its id at a fixed rate over keep-alive connections, from one process.

    python bench/lookups.py HOST PORT PATH RATE SECONDS CONNECTIONS

Lookups are due at equal intervals, whether earlier ones have been answered or not, and a latency counts from the time
at which a lookup was due: a node that falls behind shows it. Ctrl-C ends it early. Prints one JSON object.

The process shares the machine with the node, so it is cheap: every TICK_S it reads the answers and sends what is due.
Latencies are up to TICK_S too long for that. `cpu_s` is its own CPU time.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import sys
import time
from collections import deque

TICK_S = 0.002
LEFT_S_MAX = 10.0
RECEIVE_BYTES = 64 * 1024


class Load:
    """Connections with one lookup at a time each."""

    def __init__(self, host: str, port: int, path: str, connections: int) -> None:
        self._request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
        self._poll = select.epoll()
        made = [socket.create_connection((host, port)) for _ in range(connections)]
        self._sockets = {each.fileno(): each for each in made}
        for number in self._sockets:
            self._poll.register(number, select.EPOLLIN)
        self._free = deque(self._sockets)
        self._due_s: dict[int, float] = {}
        """When the lookup that a connection waits for was due."""
        self._received = dict.fromkeys(self._sockets, b"")
        self._answer_bytes = 0
        self.latencies_ms: list[float] = []
        self.errors = 0
        self.is_stopped = False

    def run(self, rate: float, seconds: float) -> float:
        """Return the seconds until the last answer."""
        due: deque[float] = deque()
        count, made = int(rate * seconds), 0
        began_s = time.perf_counter()
        while len(self.latencies_ms) < count and not self.errors and not self.is_stopped:
            now_s = time.perf_counter()
            if now_s - began_s > seconds + LEFT_S_MAX:
                break
            for number, _ in self._poll.poll(0):
                self._receive(number)
            while made < count and made / rate <= now_s - began_s:
                due.append(began_s + made / rate)
                made += 1
            while due and self._free:
                number = self._free.popleft()
                self._due_s[number] = due.popleft()
                self._sockets[number].send(self._request)
            time.sleep(max(0.0, now_s + TICK_S - time.perf_counter()))
        return time.perf_counter() - began_s

    def _receive(self, number: int) -> None:
        data = self._sockets[number].recv(RECEIVE_BYTES)
        if not data:
            self.errors += 1
            return
        answer = self._received[number] + data
        if len(answer) != self._answer_bytes:
            head, end, body = answer.partition(b"\r\n\r\n")
            if not end or len(body) < _content_length(head):
                self._received[number] = answer
                return
            self._answer_bytes = len(answer)
        self._received[number] = b""
        self.errors += not answer.startswith(b"HTTP/1.1 200")
        self.latencies_ms.append((time.perf_counter() - self._due_s.pop(number)) * 1000)
        self._free.append(number)


def _content_length(head: bytes) -> int:
    at = head.lower().index(b"content-length:") + len(b"content-length:")
    return int(head[at:].split(b"\r\n", 1)[0])


def main(host: str, port: str, path: str, rate: str, seconds: str, connections: str) -> int:
    load = Load(host, int(port), path, int(connections))

    def stop(*_: object) -> None:
        load.is_stopped = True

    signal.signal(signal.SIGINT, stop)
    took_s = load.run(float(rate), float(seconds))
    taken = sorted(load.latencies_ms)
    found = {"lookups": len(taken), "seconds": took_s, "per_s": len(taken) / took_s, "errors": load.errors}
    found["cpu_s"] = time.process_time()
    print(json.dumps(found | {f"p{part}_ms": taken[len(taken) * part // 100] for part in (50, 99)}))
    return 1 if load.errors else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
