"""Spark jobs over topics: read them, land them in tables exactly once, and prove that nothing is missing.

Plain Kafka protocol all the way, so it works on any Kafka cluster.
"""
