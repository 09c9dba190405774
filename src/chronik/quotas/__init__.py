"""Kafka's client quotas: which limit applies to a client, how rates are measured, and how long a client is throttled.

Pure: the caller passes the time. `node.serving` measures and enforces.
"""
