"""Compare acknowledged, readable, delivered and landed records."""
