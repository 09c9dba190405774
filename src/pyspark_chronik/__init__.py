"""Lets Spark find the format `chronik` by itself: it looks for top-level modules whose names start with pyspark_."""

from chronik.pipeline.sink.spark_sink import ChronikFormat as DefaultSource

__all__ = ["DefaultSource"]
