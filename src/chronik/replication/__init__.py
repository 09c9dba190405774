"""Replication: pure state machines that decide which records are committed. No socket, no file, no clock.

`isr` tracks the in-sync replicas. `leader` and `follower` are one partition as each role sees it.
"""
