"""What the cluster agrees on: topics, partitions, brokers and their configs.

A pure room. A *command* (`commands`) is applied to an immutable *image* (`image`) by `apply`, which returns the next
image and typed *events* (`events`). Commands carry every random or time value they need, so each node that applies the
same commands in the same order holds the same image. Who orders and stores them is the business of `node.metadata_log`.

The `controller` decides on the commands that keep the image true to which brokers are there; `elections` has the rules
that make it safe. Brokers talk to it by `calls`.
"""
