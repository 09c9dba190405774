"""Test support: the simulator that runs the real node code on virtual time, and clusters for tests."""
