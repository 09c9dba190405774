"""What the cluster agrees on: topics, partitions, brokers and their configs.

A pure room. A *command* (`commands`) is applied to an immutable *image* (`image`) by `apply`, which returns the next
image and typed *events* (`events`). Commands carry every random or time value they need, so each node that applies the
same commands in the same order holds the same image. Who orders and stores them is the business of `node.metadata_log`.
"""
