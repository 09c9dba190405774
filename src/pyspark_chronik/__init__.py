"""Lets Spark find the source `chronik` by itself: it looks for top-level modules whose names start with pyspark_."""

from chronik.pipeline.source.spark_source import ChronikSource as DefaultSource

__all__ = ["DefaultSource"]
