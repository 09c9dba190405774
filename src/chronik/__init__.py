"""Chronik: a Kafka-compatible streaming platform whose promise is that every acknowledged record is read."""

__all__ = ["__version__"]

__version__ = "0.1.0"
