"""A member of a share group (KIP-932), and its ShareGroupHeartbeat request. A member is immutable.

`ShareMetadata` is what the member requests, `ShareAssignment` what it was assigned; each is the value of one kind of
record in the log. Members share partitions, so that a new assignment needs no revocation.
"""

from dataclasses import dataclass

from chronik.groups.topics import Assignment


@dataclass(frozen=True, slots=True)
class ShareMetadata:
    rack: str | None = None
    client_id: str = ""
    client_host: str = ""
    topics: tuple[str, ...] = ()
    """Sorted."""


@dataclass(frozen=True, slots=True)
class ShareAssignment:
    epoch: int = 0
    previous_epoch: int = 0
    partitions: Assignment = frozenset()


@dataclass(frozen=True, slots=True)
class ShareMember:
    member_id: str
    metadata: ShareMetadata = ShareMetadata()
    current: ShareAssignment = ShareAssignment()


@dataclass(frozen=True, slots=True)
class ShareHeartbeat:
    """A ShareGroupHeartbeat request. None means unchanged."""

    group_id: str
    member_id: str
    epoch: int
    client_id: str
    client_host: str
    rack: str | None = None
    topics: tuple[str, ...] | None = None
