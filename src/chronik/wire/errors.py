"""Protocol errors: Kafka's error codes, and the exceptions that carry them."""

from collections.abc import Sequence

from kio.schema.errors import ErrorCode

__all__ = ["ErrorCode", "KafkaError", "MalformedRequest"]


class KafkaError(Exception):
    """A failure with a Kafka error code, which the client receives in the response."""

    def __init__(self, code: ErrorCode, message: str = "", record_errors: Sequence[tuple[int, str]] = ()) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.record_errors = record_errors
        """If single records of a batch caused the error: their index in the batch, and the reason."""

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}" if self.message else self.code.name


class MalformedRequest(Exception):
    """Bytes that cannot be parsed. The connection is closed without a response."""
