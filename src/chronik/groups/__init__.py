"""Consumer groups: membership, rebalances and committed offsets, as a pure state machine.

Events go in with their time, actions come out; `chronik.node.coordinators` carries them out. There is no socket, file,
clock or randomness in here that was not handed in. One group is a `group.Group`; `rebalance` and `membership` hold the
rules of the classic protocol, `commits` those of offsets, `records` the format of `__consumer_offsets`, and
`coordinator.GroupCoordinator` all groups of the partitions that a node leads.
"""
