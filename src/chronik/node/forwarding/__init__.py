"""Forwards produce requests for partitions that another node leads to that leader."""
