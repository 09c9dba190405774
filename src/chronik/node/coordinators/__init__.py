"""Coordinators that keep their state in a topic: consumer groups."""
