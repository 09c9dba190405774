"""The classes of Spark that a JVM would load again at each start, in a file that it maps instead (Java's CDS archive).

It halves the CPU that the start of a Spark session takes. `make test` creates it once: `python -m
tests.support.spark_archive FILE`. A JVM ignores an archive that does not fit its version or its jars.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from chronik.pipeline.session import java_fault, spark_session

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

ARCHIVE = Path(__file__).resolve().parents[2] / ".tools" / "spark.jsa"
# A test's JVM lives for seconds: the second compiler would take more CPU than it saves.
SHORT_LIVED = "-XX:TieredStopAtLevel=1"
NO_JVM_LOG = "-Xlog:disable"
"""Otherwise the JVM prints why it ignores an archive, or some classes, to the standard output of the command."""


def jvm_flags() -> str:
    """Return what SPARK_SUBMIT_OPTS should hold in tests."""
    archive = f' {NO_JVM_LOG} "-XX:SharedArchiveFile={ARCHIVE}"' if ARCHIVE.exists() else ""
    return f"{SHORT_LIVED}{archive}"


def use_spark(spark: SparkSession, folder: str) -> None:
    """Load the classes that our jobs use: aggregation, Arrow and Python workers, micro-batches with a checkpoint."""

    def unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return batches

    def count(frame: DataFrame, _: int) -> None:
        frame.mapInArrow(unchanged, frame.schema).groupBy("value").count().orderBy("value").collect()

    count(spark.range(10).withColumnRenamed("id", "value"), 0)
    stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    writer = stream.writeStream.foreachBatch(count).option("checkpointLocation", folder)
    writer.trigger(availableNow=True).start().awaitTermination()


def main(archive: str) -> None:
    fault = java_fault()
    if fault is not None:
        print(f"chronik: no archive of Spark's classes: {fault}")
        return
    from pyspark import SparkContext

    os.environ["SPARK_SUBMIT_OPTS"] = f'{SHORT_LIVED} {NO_JVM_LOG} "-XX:ArchiveClassesAtExit={Path(archive).resolve()}"'
    spark = spark_session("chronik-archive", "local[2]")
    with tempfile.TemporaryDirectory() as folder:
        use_spark(spark, folder)
    jvm = SparkContext._gateway.proc  # type: ignore[union-attr]
    spark.stop()
    jvm.stdin.close()  # the JVM ends, and writes the archive
    jvm.wait()


if __name__ == "__main__":
    main(sys.argv[1])
