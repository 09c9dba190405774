"""Consumer groups: membership, rebalances and committed offsets, as a pure state machine.

It takes events with their time and returns actions, which `chronik.node.coordinators` carries out. It uses no socket or
file; the caller passes in time and randomness. One group is a `group.Group`. `rebalance` and `membership` hold the
rules of the classic protocol, `commits` those for offsets, `offsets` those for offsets in transactions, `records` the
format of `__consumer_offsets`, and `coordinator.GroupCoordinator` all groups of the partitions that a node leads.
"""
