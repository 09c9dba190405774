"""The running node: sockets, timers and threads around the pure rooms; `apis` has one module per Kafka API."""
