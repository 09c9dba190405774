"""Produce requests for partitions that another node leads, passed on to that leader."""
