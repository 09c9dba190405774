"""Coordinators that store their state in an internal topic: consumer groups and transactions."""
