"""Cluster metadata: topics, partitions, brokers and their configs.

A pure package. `apply` applies a *command* (`commands`) to an immutable *image* (`image`) and returns the next image
and typed *events* (`events`). Commands carry every random or time value they need, so nodes that apply the same
commands in the same order hold the same image. `node.membership.metadata_log` orders and stores the commands.

The `controller` decides which commands keep the image in line with the state of the brokers; `elections` has the rules
that make this safe. Brokers reach the controller through `calls`.
"""
