"""Listeners and connections: frames in, requests to their API handlers, replies out in order."""
