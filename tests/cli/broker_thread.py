"""A fake broker in a thread, for commands that run in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from tests.client.fake_broker import FakeBroker

Broker = TypeVar("Broker", bound=FakeBroker)


@contextmanager
def serving(broker: Broker) -> Iterator[str]:
    """Serve until the end of the block; yield the address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(broker.__aenter__(), loop).result(10)
        host, port = broker.address
        yield f"{host}:{port}"
        asyncio.run_coroutine_threadsafe(broker.__aexit__(), loop).result(10)
        asyncio.run_coroutine_threadsafe(_settle(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _settle() -> None:
    """Let the tasks of closed connections end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.wait(others, timeout=5) if others else None
