"""Observability: metrics for Prometheus, logs as JSON lines. Names and fields are stable."""
