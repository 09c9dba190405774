"""The schema registry as pure functions and a state machine: schemas in, compatibility out; records in, state out.

Parsers are imported when a schema is parsed: a node without schemas does not load them.
"""
