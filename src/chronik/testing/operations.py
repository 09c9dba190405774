"""What clients did and saw, operation by operation: the history that `chronik.testing.history` checks.

A history is a sequence of operations in real-time order: an operation is placed at its end, an invocation at its start.
Values are unique: each is sent once. On disk a history is JSON Lines, one operation per line, named by its `op`:

    {"op":"send","at_s":0.1,"producer":"p1","value":"p1/0","partition":"t-0"}
    {"op":"send-ok","at_s":0.2,"producer":"p1","value":"p1/0","partition":"t-0","offset":0}
    {"op":"send-fail",...}      it was certainly not appended
    {"op":"send-info",...}      it may or may not have been appended
    {"op":"assign","at_s":0.1,"consumer":"c1","positions":{"t-0":0,"t-1":null}}
    {"op":"assign",...,"group":"g1"}      the same by a group; a revocation assigns the remaining partitions
    {"op":"poll","at_s":0.3,"invoked_s":0.2,"consumer":"c1","records":[["t-0",0,"p1/0"]]}
    {"op":"commit-ok","at_s":0.4,"invoked_s":0.3,"consumer":"c1","group":"g1","offsets":{"t-0":1}}
    {"op":"offsets","at_s":0.5,"invoked_s":0.4,"group":"g1","offsets":{"t-0":1}}

A transaction has a name of its own, never used again: a transactional id has one transaction after another.

    {"op":"send",...,"transaction":"p1/7"}                                     a send inside a transaction
    {"op":"assign",...,"is_read_committed":true}                               a read_committed consumer
    {"op":"poll",...,"transaction":"p1/7"}                                     its records are the transaction's input
    {"op":"txn-offsets","at_s":0.6,"producer":"p1","transaction":"p1/7","group":"g1","offsets":{"t-0":1}}
    {"op":"txn-end","at_s":0.7,"producer":"p1","transaction":"p1/7","is_commit":true}
    {"op":"txn-ended","at_s":0.8,"producer":"p1","transaction":"p1/7","outcome":"commit"}
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec


class _Operation(msgspec.Struct, frozen=True, tag_field="op", omit_defaults=True):
    at_s: float


class SendInvoked(_Operation, frozen=True, tag="send"):
    """A producer was given a value to send. `partition` is None if the client chooses it.

    `transaction` is None outside transactions.
    """

    producer: str
    value: str
    partition: str | None = None
    transaction: str | None = None


class SendAcknowledged(_Operation, frozen=True, tag="send-ok"):
    """The producer received an acknowledgement for the value. `offset` is None if it carries none (acks=0)."""

    producer: str
    value: str
    partition: str
    offset: int | None = None


class SendFailed(_Operation, frozen=True, tag="send-fail"):
    """The value was certainly not stored."""

    producer: str
    value: str
    reason: str = ""


class SendUnknown(_Operation, frozen=True, tag="send-info"):
    """The producer gave up; the value may or may not be stored."""

    producer: str
    value: str
    reason: str = ""


class Assigned(_Operation, frozen=True, tag="assign"):
    """From here on the consumer reads only these partitions, by its own choice or by its group's.

    A position is the offset that it must read next. None means to continue from the previous position, or anywhere for
    a newly assigned partition. `group` is None if the consumer assigned the partitions itself. A consumer has the same
    isolation level in all its assignments.
    """

    consumer: str
    positions: dict[str, int | None]
    group: str | None = None
    is_read_committed: bool = False


class Polled(_Operation, frozen=True, tag="poll"):
    """One poll, invoked at `invoked_s` and answered at `at_s`, with its records: (partition, offset, value).

    `transaction` names the transaction whose sends were made from these records (consume, transform, produce).
    """

    invoked_s: float
    consumer: str
    records: tuple[tuple[str, int, str], ...]
    transaction: str | None = None


class Committed(_Operation, frozen=True, tag="commit-ok"):
    """The group's coordinator acknowledged a member's commit, requested at `invoked_s`: the offsets to read next."""

    invoked_s: float
    consumer: str
    group: str
    offsets: dict[str, int]


class OffsetsFetched(_Operation, frozen=True, tag="offsets"):
    """The coordinator returned the group's committed offsets of some partitions; None if a partition has none.

    They were requested at `invoked_s` with `require_stable`.
    """

    invoked_s: float
    group: str
    offsets: dict[str, int | None]


class OffsetsSent(_Operation, frozen=True, tag="txn-offsets"):
    """The producer sends the group's offsets inside its transaction: they are committed if and only if it commits."""

    producer: str
    transaction: str
    group: str
    offsets: dict[str, int]


class TransactionEndInvoked(_Operation, frozen=True, tag="txn-end"):
    """The application asks the producer to commit or to abort. A commit that failed may be followed by an abort.

    It commits only if every send and every OffsetsSent of the transaction was acknowledged.
    """

    producer: str
    transaction: str
    is_commit: bool


class TransactionEnded(_Operation, frozen=True, tag="txn-ended"):
    """The outcome as the producer knows it. It is unknown if the producer ended or was fenced before it was notified.

    A transaction without this operation ends unknown, too; without a request to commit, it can only abort.
    """

    producer: str
    transaction: str
    outcome: Literal["commit", "abort", "unknown"]


Operation = (
    SendInvoked
    | SendAcknowledged
    | SendFailed
    | SendUnknown
    | Assigned
    | Polled
    | Committed
    | OffsetsFetched
    | OffsetsSent
    | TransactionEndInvoked
    | TransactionEnded
)

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Operation] = msgspec.json.Decoder(Operation)


class HistoryError(Exception):
    """A history that cannot be checked: it does not parse, or it violates the rules of a history."""


def to_lines(operations: Iterable[Operation]) -> Iterator[bytes]:
    """Yield each operation as a line of JSON, with its newline."""
    for operation in operations:
        yield _ENCODER.encode(operation) + b"\n"


def from_lines(lines: Iterable[bytes | str]) -> Iterator[Operation]:
    """Yield the operations of JSON lines; skip empty lines."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield _DECODER.decode(line)
            except msgspec.MsgspecError as error:
                raise HistoryError(f"line {number} is no operation: {error}") from None


def write_history(path: str | os.PathLike[str], operations: Iterable[Operation]) -> None:
    with open(path, "wb") as opened:
        opened.writelines(to_lines(operations))


def read_history(path: str | os.PathLike[str]) -> list[Operation]:
    with open(path, "rb") as opened:
        return list(from_lines(opened))
