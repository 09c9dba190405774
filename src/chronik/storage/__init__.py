"""One partition's log on disk, and the data folder that holds them all.

`disk` is the seam to the operating system. `log.Log` is one partition's log: segments in Kafka's own batch format with
sparse indexes, group commit, recovery, retention and compaction. `folder.DataFolder` is what a node owns on disk.
"""
