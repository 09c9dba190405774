"""The errors of the wire: Kafka's error codes, and the exceptions that carry them."""

from collections.abc import Sequence

from kio.schema.errors import ErrorCode

__all__ = ["ErrorCode", "KafkaError", "MalformedRequest"]


class KafkaError(Exception):
    """A failure that has a Kafka error code, and so becomes an answer to the client."""

    def __init__(self, code: ErrorCode, message: str = "", record_errors: Sequence[tuple[int, str]] = ()) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.record_errors = record_errors
        """Where single records of a batch are to blame: their places in it, and why."""

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}" if self.message else self.code.name


class MalformedRequest(Exception):
    """Bytes that do not parse. There is no answer to them: the connection is closed."""
