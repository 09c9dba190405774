"""Audits and stalls as self-contained HTML pages with charts."""
