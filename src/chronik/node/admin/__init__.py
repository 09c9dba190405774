"""Shared code of the APIs: configs, topic creation, and the outcomes of single topics and partitions."""
