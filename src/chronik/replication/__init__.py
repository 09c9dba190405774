"""Replication: pure state machines that decide what counts as committed. No socket, no file, no clock.

`isr` is what a leader may count on, `leader` and `follower` are one partition as each of the two sees it, `divergence`
is how they find out where their logs part.
"""
