"""Who listens to a node's events, and what waits to be sent to each: bounded, however slowly somebody reads."""

from __future__ import annotations

import asyncio

CHUNKS_WAITING_MAX = 32


class Listener:
    """One open stream. Owned by the loop.

    Of an event that tells a state only the newest waits; of one that adds to what was told before, the last
    `CHUNKS_WAITING_MAX`.
    """

    def __init__(self) -> None:
        self._states: dict[str, bytes] = {}
        self._additions: list[bytes] = []
        self._is_closed = False
        self._wake = asyncio.Event()

    def tell(self, event: str, data: bytes, *, adds: bool = False) -> None:
        line = b"event: %b\ndata: %b\n\n" % (event.encode(), data)
        if adds:
            self._additions.append(line)
            del self._additions[:-CHUNKS_WAITING_MAX]
        else:
            self._states[event] = line
        self._wake.set()

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()

    async def take(self) -> bytes | None:
        """What waits, as soon as anything does; None when the stream is over."""
        await self._wake.wait()
        if self._is_closed:
            return None
        self._wake.clear()
        lines = [*self._states.values(), *self._additions]
        self._states, self._additions = {}, []
        return b"".join(lines)
