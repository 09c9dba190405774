"""The running node: sockets, timers and threads around the pure packages; `apis` has one module per Kafka API."""
