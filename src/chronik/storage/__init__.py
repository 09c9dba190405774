"""One partition's log on disk, and the data folder that holds all logs.

`disk` is the interface to the operating system. `log.Log` is one partition's log: segments in Kafka's batch format with
sparse indexes, group commit, recovery, retention and compaction. `folder.DataFolder` is a node's data on disk.
"""
