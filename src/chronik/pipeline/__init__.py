"""Spark jobs over topics: read and write them, land them in tables exactly once, and verify that nothing is missing.

They need only the Kafka protocol, so they work on any Kafka cluster, except `stalls`, which reads traces of Chronik.
On Chronik, the audit also lists batches over HTTP. Importing this package registers the format
`chronik` in the active Spark session; a session created later finds the format by itself.
"""

from chronik.pipeline.session import register, register_active

__all__ = ["register"]

register_active()
