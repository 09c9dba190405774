"""Finished micro-batches into a consumer group, as soon as they are finished: so every lag tool sees the query.

The source commits a micro-batch when the next is asked for, which with a long trigger interval is late; this listener
does it at once. Spark tells it positions alone, so these say which group of which cluster they belong to.
"""

from __future__ import annotations

import json
import logging
from threading import Lock
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from chronik.pipeline.blocking import BlockingCluster
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.positions import Position

__all__ = ["GroupCommitter", "commit_position"]

logger = logging.getLogger(__name__)


class GroupCommitter(StreamingQueryListener):
    """Commits for every query of a session that reads with `kafka.group.id`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._committed: dict[tuple[str, int], str] = {}

    def onQueryStarted(self, event: Any) -> None:
        pass

    def onQueryProgress(self, event: Any) -> None:
        for index, source in enumerate(event.progress.sources):
            place, end = (str(event.progress.id), index), source.endOffset
            with self._lock:
                if end is None or self._committed.get(place) == end:
                    continue
                if commit_position(end):
                    self._committed[place] = end

    def onQueryIdle(self, event: Any) -> None:
        pass

    def onQueryTerminated(self, event: Any) -> None:
        with self._lock:
            for place in [place for place in self._committed if place[0] == str(event.id)]:
                del self._committed[place]


def commit_position(written: str) -> bool:
    """Commits a position to the group that it names. False where it names none, or where that failed."""
    try:
        told = json.loads(written)
    except ValueError:
        return False
    if not isinstance(told, dict) or not {"version", "topics", "bootstrap", "group"} <= told.keys():
        return False
    try:
        with BlockingCluster(told["bootstrap"]) as cluster:
            cluster.commit(told["group"], Position.from_json(told).offsets)
    except PipelineError as error:
        logger.warning("offsets were not committed to group %s: %s", told["group"], error)
        return False
    return True
