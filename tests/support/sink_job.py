"""A Spark driver that copies one topic to another through the sink: python -m tests.support.sink_job ARGUMENTS.

Spark splits each partition into several tasks, so the rows of a target partition come from more than one task. Failed
tasks run again.
"""

from __future__ import annotations

import sys

from chronik.pipeline.session import spark_session

TASKS = 5


def main(bootstrap: str, source: str, target: str, checkpoint: str, rows_per_batch: str, until: str) -> None:
    """Copy until the end of the source, or, if `until` is `killed`, for ever."""
    spark = spark_session("sink", "local[2,4]")
    where = {"kafka.bootstrap.servers": bootstrap}
    reading = {"subscribe": source, "startingOffsets": "earliest", "maxOffsetsPerTrigger": rows_per_batch}
    rows = spark.readStream.format("chronik").options(**where, **reading, minPartitions=str(TASKS)).load()
    writer = rows.select("key", "value").writeStream.format("chronik").options(**where, topic=target)
    trigger = {"processingTime": "0 seconds"} if until == "killed" else {"availableNow": True}
    query = writer.option("checkpointLocation", checkpoint).trigger(**trigger).start()
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
