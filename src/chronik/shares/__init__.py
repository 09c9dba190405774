"""Share groups (KIP-932): the state of shared partitions and its records, without any input or output.

`share_partition` decides, on a partition's leader, which records a share group gets, and when. `coordinator` stores the
durable part of that state, for every key of the partitions of `__share_group_state` that this node leads.
"""
