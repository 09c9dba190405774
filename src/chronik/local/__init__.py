"""Clusters of node processes on this machine, for `chronik cluster`, the demo, tests and benchmarks."""
