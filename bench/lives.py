"""One run of a server, on an empty folder, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.clients import Topic, wait_until_listening, write_to_all
from bench.servers import Setup, Side
from bench.workloads import PARTITIONS, Life, Scale


@contextlib.contextmanager
def living(side: Side, setup: Setup, scale: Scale) -> Iterator[Life]:
    """Run a server on an empty folder; yield it after its first acknowledged write, and kill it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="chronik-side-"))
    try:
        server = side.make(folder, setup)
        try:
            os.sync()  # unwritten data of the previous life must not slow down this one
            launched_s = time.monotonic()
            server.launch()
            wait_until_listening(server)
            topic = Topic(server, PARTITIONS, is_kept=True)
            topic.create()
            write_to_all(topic)
            yield Life(server, scale, time.monotonic() - launched_s, side)
        finally:
            server.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
