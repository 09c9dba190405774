"""The one place that commits a query's offsets to its group, so that lag tools see the query.

No query resumes from these offsets: Spark's checkpoint has its own. So a failure stops nothing. It is logged once, and
again when it has passed.

Each query has one committer: the driver for a landing, the listener for a query of a registered session (`session`),
and the source itself for all other queries.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from chronik.client.properties import Target
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.pipeline.source.ranges import Partition

RETRY_S = 30.0

logger = logging.getLogger(__name__)


class GroupOffsets:
    """One query's offsets in one group. Used by one thread."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._committed: Mapping[Partition, int] = {}
        self._failed_s: float | None = None

    def commit(self, target: Target | BlockingCluster, offsets: Mapping[Partition, int], now_s: float) -> None:
        """Commit the offsets unless they are committed. After a failure, wait some time before the next attempt."""
        if not self._group or not offsets or offsets == self._committed:
            return
        if self._failed_s is not None and now_s - self._failed_s < RETRY_S:
            return
        try:
            if isinstance(target, BlockingCluster):
                target.commit(self._group, offsets)
            else:
                with BlockingCluster(target) as cluster:
                    cluster.commit(self._group, offsets)
        except PipelineError as error:
            if self._failed_s is None:
                logger.warning("offsets are not committed to group %s: %s", self._group, error)
            self._failed_s = now_s
            return
        if self._failed_s is not None:
            logger.warning("offsets are committed to group %s again", self._group)
        self._failed_s, self._committed = None, dict(offsets)
