"""The partitions that this node hosts: logs, syncs, both sides of replication, healing and housekeeping."""
