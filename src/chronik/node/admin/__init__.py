"""Shared code of the admin APIs: configs, topic creation, and plans for partitions."""
