"""Replication: pure state machines that decide what counts as committed. No socket, no file, no clock."""
