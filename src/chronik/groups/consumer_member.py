"""A member of a consumer group (KIP-848), and its ConsumerGroupHeartbeat request. Both parts of a member are immutable.

`MemberMetadata` is what the member requests, `CurrentAssignment` how far the coordinator has reconciled it; each is the
value of one kind of record in the log.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from chronik.groups.member import Protocols
from chronik.groups.topics import Assignment

JOIN_EPOCH = 0
LEAVE_EPOCH = -1
STATIC_LEAVE_EPOCH = -2


class MemberState(IntEnum):
    """Kafka's codes for the state of a member, as stored in the log."""

    STABLE = 0
    UNREVOKED_PARTITIONS = 1
    """The member still owns partitions that it must revoke."""
    UNRELEASED_PARTITIONS = 2
    """Other members still own partitions that this member will get."""


@dataclass(frozen=True, slots=True)
class ClassicMetadata:
    """Of a member that uses the classic protocol in a consumer group."""

    session_timeout_ms: int
    protocols: Protocols


@dataclass(frozen=True, slots=True)
class MemberMetadata:
    instance_id: str | None = None
    rack: str | None = None
    client_id: str = ""
    client_host: str = ""
    topics: tuple[str, ...] = ()
    """Sorted."""
    expression: str = ""
    """The RE2 expression of further topics; empty if there is none."""
    rebalance_timeout_ms: int = -1
    assignor: str | None = None
    classic: ClassicMetadata | None = None


@dataclass(frozen=True, slots=True)
class CurrentAssignment:
    """`assigned` are the partitions that the member may use. It still owns those in `revoking`, too."""

    epoch: int = 0
    previous_epoch: int = 0
    state: MemberState = MemberState.STABLE
    assigned: Assignment = frozenset()
    revoking: Assignment = frozenset()

    def is_reconciled_to(self, target_epoch: int) -> bool:
        return self.state is MemberState.STABLE and self.epoch == target_epoch


@dataclass(frozen=True, slots=True)
class ConsumerMember:
    member_id: str
    metadata: MemberMetadata = MemberMetadata()
    current: CurrentAssignment = CurrentAssignment()

    @property
    def uses_classic_protocol(self) -> bool:
        return self.metadata.classic is not None


@dataclass(frozen=True, slots=True)
class ConsumerHeartbeat:
    """A ConsumerGroupHeartbeat request, in any version. None means unchanged."""

    group_id: str
    member_id: str
    epoch: int
    client_id: str
    client_host: str
    instance_id: str | None = None
    rack: str | None = None
    rebalance_timeout_ms: int | None = None
    topics: tuple[str, ...] | None = None
    expression: str | None = None
    assignor: str | None = None
    owned: Assignment | None = None
    may_describe: Callable[[str], bool] = lambda name: True
    """Whether the client may describe a topic; others never match its expression."""
    member_id_required: bool = True
    """From version 1 the client makes its own member id (KIP-1082)."""

    @property
    def is_full(self) -> bool:
        """Whether it has all fields, as the first request and each after a failure: then it wants its assignment."""
        has_topics = self.topics is not None or self.expression is not None
        has_all = has_topics and self.rebalance_timeout_ms is not None and self.owned is not None
        return self.epoch == JOIN_EPOCH or has_all
