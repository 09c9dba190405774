"""The partitions that this node hosts: logs, syncs, replication as leader and follower, healing and housekeeping."""
