"""A Kafka client: connections, cluster metadata, admin calls, raw batches, and ledgers of acknowledged records.

For Chronik's own tools and nodes; applications use their Kafka clients. Everything here runs on the caller's event
loop, opens sockets only with `loop.create_connection` and measures time only with `loop.time()`, so that the simulator
can run it.
"""
