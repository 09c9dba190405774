"""Observability: Prometheus metrics, JSON logs, traces, watermark lag, SVG charts. Names and fields are stable."""
