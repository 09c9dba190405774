"""Chronik: a Kafka-compatible streaming platform whose promise is that every acknowledged record is read."""
