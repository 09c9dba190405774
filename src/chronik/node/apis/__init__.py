"""The Kafka APIs that this node supports, one module each."""
