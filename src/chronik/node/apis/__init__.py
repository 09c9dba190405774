"""The Kafka APIs that this node answers, one module each."""
