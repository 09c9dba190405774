"""Spark's own Kafka connector, for `--source kafka`: the version to request, and the error message if it is missing."""

from __future__ import annotations

import re
from collections.abc import Mapping

PACKAGE = "org.apache.spark:spark-sql-kafka-0-10_2.13"
NEWEST = "4.2.0"
"""The newest version when this was written (4.3.0 was unpublished). A test checks that it works with Spark 4.3."""
GIVEN = ("spark.jars", "spark.jars.packages")

_UNRESOLVED = re.compile(r"unresolved dependency: (\S+?)#(\S+?);([^:\s]+)")


def with_connector(conf: Mapping[str, str], spark_version: str) -> dict[str, str]:
    """Return settings that make Spark get its connector from Maven, unless the jars are given."""
    if any(name in conf for name in GIVEN):
        return dict(conf)
    version = min(spark_version, NEWEST, key=_numbers)
    return {**conf, "spark.jars.packages": f"{PACKAGE}:{version}"}


def connector_fault(log: str) -> str | None:
    """Return an error for packages that Maven did not supply according to Spark's log; None if it supplied all."""
    missing = dict.fromkeys(":".join(found) for found in _UNRESOLVED.findall(log))
    if not missing:
        return None
    return (
        f"Spark cannot get {', '.join(missing)} from Maven: pass --conf spark.jars=FILE.jar,... with the connector, "
        "its token provider, kafka-clients and commons-pool2, or another version with --conf spark.jars.packages="
        f"{PACKAGE}:VERSION"
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
