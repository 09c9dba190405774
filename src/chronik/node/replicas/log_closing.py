"""Close the logs of a stopping node: one after the other, each within the disk's time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from chronik.node.disk_watch import DiskWatch
from chronik.node.environment import Environment
from chronik.node.replicas.partition import Partition
from chronik.observe.logging import Logger
from chronik.storage.log import Log


async def close_logs(
    loop: asyncio.AbstractEventLoop, env: Environment, disk: DiskWatch, partitions: Iterable[Partition], log: Logger
) -> bool:
    """Close the logs; return whether all closed cleanly. On TimeoutError (a hanging disk) the other logs stay open."""
    is_clean = True
    for partition in partitions:
        async with asyncio.timeout(disk.patience_s):
            await partition.jobs.ended()
        error = await disk.wait(loop.run_in_executor(env.executor, close_log, partition.log))
        if error is not None:
            log.error("log_close_failed", topic=partition.topic, partition=partition.index, error=error)
            is_clean = False
    return is_clean


def close_log(log: Log) -> str | None:
    """Close the log; return the error if it did not close cleanly. Runs in a thread."""
    try:
        return None if log.close() else log.read_only_reason
    except Exception as error:
        return repr(error)
