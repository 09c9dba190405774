"""Spark jobs over topics: read them, land them in tables exactly once, and prove that nothing is missing.

Plain Kafka protocol all the way, so it works on any Kafka cluster. Importing this registers the source `chronik` in
the Spark session that is active; a session made later finds the source by itself.
"""

from chronik.pipeline.registering import register, register_active

__all__ = ["register"]

register_active()
