"""The jars of Spark's own Kafka connector, which scripts/test-tools downloads if Maven is reachable."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".tools" / "spark-kafka-4.2"
MISSING = "the jars of Spark's own connector are missing: scripts/test-tools gets them where Maven is reachable"


def connector_jars() -> str:
    """Return them in the format of `spark.jars`; empty if there are none."""
    return ",".join(str(jar) for jar in sorted(FOLDER.glob("*.jar")))
