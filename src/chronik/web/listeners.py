"""The listeners of a node's events, and what is pending for each: bounded, however slowly a listener reads."""

from __future__ import annotations

import asyncio

CHUNKS_WAITING_MAX = 32


class Listener:
    """One open stream. Owned by the event loop.

    For an event that carries a state, only the newest is kept. For an event that adds to earlier ones, the last
    `CHUNKS_WAITING_MAX` are kept.
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
        """Wait for pending events and return them, or None if the stream is closed."""
        await self._wake.wait()
        if self._is_closed:
            return None
        self._wake.clear()
        lines = [*self._states.values(), *self._additions]
        self._states, self._additions = {}, []
        return b"".join(lines)
