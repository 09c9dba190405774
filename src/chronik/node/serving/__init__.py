"""Listeners and connections: read frames, run their API handlers, and send responses in order."""
