"""The transaction coordinator: one state machine for each transactional id. Pure: events in, actions out.

`coordinator` holds every transactional id of the partitions of `__transaction_state` that this node leads,
`transaction` is the state of one id and its transitions, `records` is the format of that topic.
"""
