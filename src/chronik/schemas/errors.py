"""Errors of the registry, with the codes of Confluent's REST API. The HTTP status is the code's first three digits."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """Error codes that clients know."""

    SUBJECT_NOT_FOUND = 40401
    VERSION_NOT_FOUND = 40402
    SCHEMA_NOT_FOUND = 40403
    SUBJECT_SOFT_DELETED = 40404
    SUBJECT_NOT_SOFT_DELETED = 40405
    VERSION_SOFT_DELETED = 40406
    VERSION_NOT_SOFT_DELETED = 40407
    NO_SUBJECT_COMPATIBILITY = 40408
    NO_SUBJECT_MODE = 40409
    INCOMPATIBLE = 40901
    INVALID_SCHEMA = 42201
    INVALID_VERSION = 42202
    INVALID_COMPATIBILITY = 42203
    INVALID_MODE = 42204
    NOT_PERMITTED = 42205
    REFERENCE_EXISTS = 42206
    ID_DOES_NOT_MATCH = 42207
    INVALID_SUBJECT = 42208
    TOO_LARGE = 42209
    STORE = 50001
    TIMED_OUT = 50002
    FORWARDING_FAILED = 50003
    UNKNOWN_LEADER = 50004


MISSING = frozenset({Code.SUBJECT_NOT_FOUND, Code.VERSION_NOT_FOUND, Code.SCHEMA_NOT_FOUND, Code.INVALID_SCHEMA})
"""Codes that a replica which lags behind could answer wrongly. A schema is invalid if its references are missing."""


class Refused(Exception):
    """The registry refuses a request."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = int(code)
        self.message = message

    @property
    def status(self) -> int:
        return self.code if self.code < 1000 else self.code // 100


class InvalidSchema(Refused):
    """A text is not a schema, or one of its references is missing."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INVALID_SCHEMA, message)


def subject_not_found(subject: str) -> Refused:
    return Refused(Code.SUBJECT_NOT_FOUND, f"Subject '{subject}' not found.")


def version_not_found(version: object) -> Refused:
    return Refused(Code.VERSION_NOT_FOUND, f"Version {version} not found.")


def schema_not_found(schema_id: object = None) -> Refused:
    return Refused(Code.SCHEMA_NOT_FOUND, "Schema not found" if schema_id is None else f"Schema {schema_id} not found")
