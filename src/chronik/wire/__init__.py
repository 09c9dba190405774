"""Kafka's wire formats: frames, messages, record batches, codecs and error codes.

Nothing here opens a socket or a file, reads a clock or keeps state between calls. `produce` and `fetch` are on the hot
path and written by hand; every other API goes through `messages`, which takes the layouts from kio's schema.
"""
