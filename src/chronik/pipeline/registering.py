"""Register the source `chronik` in a Spark session, and commit its queries' offsets to their groups."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["commit_to_groups", "register", "register_active"]

_registered: WeakSet[SparkSession] = WeakSet()
_committing: WeakSet[SparkSession] = WeakSet()


def register(spark: SparkSession) -> None:
    """Do both, once per session. Repeated calls do nothing."""
    from chronik.pipeline.source import ChronikSource

    if spark not in _registered:
        spark.dataSource.register(ChronikSource)
        _registered.add(spark)
    commit_to_groups(spark)


def commit_to_groups(spark: SparkSession) -> None:
    """Only add the listener: Spark finds the source by itself, but not the listener."""
    from chronik.pipeline.committing import GroupCommitter

    if spark not in _committing:
        spark.streams.addListener(GroupCommitter())
        _committing.add(spark)


def register_active() -> None:
    """Register in this process's active session, if any. Spark's workers import this package too, and have none."""
    sql, core = sys.modules.get("pyspark.sql"), sys.modules.get("pyspark.core.context")
    if sql is None or core is None or core.SparkContext._active_spark_context is None:
        return
    session = sql.SparkSession.getActiveSession()
    if session is not None:
        register(session)
