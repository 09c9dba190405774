"""Errors of a local cluster; each message is one line that tells the user what to do."""

from __future__ import annotations


class LocalClusterError(Exception):
    """The cluster on this machine cannot do what was requested."""


class UncleanStop(LocalClusterError):
    """A node did not stop in time, so it was killed."""
