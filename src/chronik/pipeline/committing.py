"""Commit finished micro-batches to a consumer group at once, so that every lag tool sees the query.

The source commits a micro-batch only when Spark requests the next one, which is late with a long trigger interval. This
listener commits immediately. Spark passes it nothing but positions, so each position names its cluster and group.
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
    """Commit a position to the group that it names. Return False if it names none, or if the commit failed."""
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
