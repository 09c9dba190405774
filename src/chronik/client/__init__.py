"""Speaking to Kafka brokers: connections, the cluster's layout, admin calls, raw batches, ledgers of what they took.

For our own tools and nodes, not for applications: those have their Kafka clients. Everything here runs on the caller's
event loop, opens sockets by `loop.create_connection` and measures time by `loop.time()` only, so the simulator can
run it.
"""
