"""The peer of a typed landing: Spark's own Kafka connector, `from_avro` and Delta's own writer, as one streaming job.

    PYTHONPATH=.tools/spark-4.2 python bench/peer_avro.py BOOTSTRAP TOPIC SCHEMA TABLE CHECKPOINT ROWS_PER_BATCH CONF

SCHEMA is a file; CONF are Spark's settings as a JSON object. The script needs the Spark that Delta was built for, and
nothing of Chronik. `from_avro` takes one schema, and no header: the 5 bytes with the schema's id are cut off. The table
has the columns of `chronik pipeline land --format avro` and is partitioned by date like it. The job ends when it has
caught up.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.avro.functions import from_avro


def main(bootstrap: str, topic: str, schema: str, table: str, checkpoint: str, rows_per_batch: str, conf: str) -> None:
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.appName("peer").master("local[2]")
    for name, value in json.loads(conf).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    options = {"subscribe": topic, "startingOffsets": "earliest", "includeHeaders": "true"}
    read = spark.readStream.format("kafka").options(**options, maxOffsetsPerTrigger=rows_per_batch)
    decoded = from_avro(sql.expr("substring(value, 6)"), Path(schema).read_text())
    rows = read.option("kafka.bootstrap.servers", bootstrap).load().withColumn("typed", decoded)
    own = ("key", "value", "headers", "partition", "offset", "timestamp")
    rows = rows.select(*own, sql.to_date("timestamp").alias("date"), "typed.*")
    writer = rows.writeStream.format("delta").option("checkpointLocation", checkpoint).partitionBy("date")
    writer.trigger(availableNow=True).start(table).awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
