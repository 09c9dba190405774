"""What groups whose members send heartbeats share (KIP-848 and KIP-932): their image, and how it is written.

The kinds are `consumer_group.ConsumerGroup` and `share_group.ShareGroup`.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from chronik.groups.any_group import AnyGroup
from chronik.groups.records import Record
from chronik.groups.step import Action, Moment, Step, Write, group_write_error
from chronik.wire.errors import ErrorCode


class Image(Protocol):
    """The state of a group that is in the log. A copy is cheap, because members are immutable."""

    epoch: int
    """Rises with each change of members, subscriptions or topics."""

    @property
    def assignment_epoch(self) -> int:
        """The group epoch for which the target assignment was computed."""

    @property
    def members(self) -> Mapping[str, Any]: ...

    def copy(self) -> Self: ...


I = TypeVar("I", bound=Image)  # noqa: E741


class WaitingReply(NamedTuple):
    """The answer to a request, which is sent once the change is durable; `refused` is the same with an error."""

    token: int
    values: dict[str, Any]
    refused: dict[str, Any]


class QueuedRequest(NamedTuple):
    """A request that waits for a write of the group; then it is handled as if it had just arrived."""

    token: int | None
    """None for an event that no request waits for."""
    refuse: Callable[[ErrorCode, str], dict[str, Any]]
    """Returns the response with an error."""
    run: Callable[[Moment], list[Action]]
    release: Callable[[], None] = lambda: None
    """Called if the request is refused."""


@dataclass(slots=True, eq=False)
class ImageGroup(AnyGroup, Generic[I]):
    """A group with an image.

    `image` is what requests change; `durable` is what is known to be in the log. They differ only while a write is
    pending, and during a step. One write is pending at a time: requests that may change the group wait for it in
    `queue`, and then share the next write. If the write fails, `image` returns to `durable`. Checks of offsets,
    heartbeats of the classic protocol and descriptions read `durable`.

    Timeouts are not in the log: loading starts all of them again. A deadline of a member that has left is ignored.
    Subclasses name themselves in `super`, because a dataclass with slots is another class than its body.
    """

    image: I = field(kw_only=True)
    durable: I = field(kw_only=True)
    is_persisted: bool = False
    """Whether the log has a record of the group."""
    is_writing: bool = False
    is_uncertain: bool = False
    """Whether the last write timed out: `durable` is in the log, but perhaps not committed. The next step writes."""
    queue: list[QueuedRequest] = field(default_factory=list)
    """At most one request of each connection."""
    is_draining: bool = False
    """Whether the requests of `queue` are handled now; the step is concluded once, after the last of them."""
    continuations: list[Callable[[], WaitingReply]] = field(default_factory=list)
    """Compute the answers of this step's requests, once the target assignment is known."""
    effects: list[Callable[[ErrorCode, Step], None]] = field(default_factory=list)
    """What follows this step's write, with its outcome."""
    subscriptions_changed: bool = True
    """Whether the topics must be computed again: topics or subscriptions have changed, or it was just loaded."""
    session_deadlines: dict[str, int] = field(default_factory=dict)
    assigned_ms: int | None = None
    """When this coordinator last computed the target assignment."""
    assignment_due_ms: int | None = None
    """When the target assignment may be computed that the assignment interval delays."""

    def change(self) -> I:
        """Return the image to change. The durable one stays as it is."""
        if self.image is self.durable:
            self.image = self.durable.copy()
        return self.image

    @property
    def base_epoch(self) -> int:
        """The epoch before this step."""
        return self.durable.epoch

    def bump_epoch(self) -> None:
        """Start a new epoch, unless this step has started one already."""
        self.change().epoch = self.base_epoch + 1

    def must_assign(self, interval_ms: int, now_ms: int) -> bool:
        """Whether the target assignment is to be computed in this step. If it is too early, set the time for that."""
        self.assignment_due_ms = None
        if self.image.epoch <= self.image.assignment_epoch:
            return False
        if not self.image.members:
            return True
        if self.assigned_ms is not None and now_ms < self.assigned_ms + interval_ms:
            self.assignment_due_ms = self.assigned_ms + interval_ms
            return False
        self.assigned_ms = now_ms
        return True

    @property
    def is_replaced(self) -> bool:
        """Whether a group of another kind replaces this one once that is durable."""
        return False

    @property
    def is_idle(self) -> bool:
        """Whether there are no members, and no request or write is pending."""
        is_changing = self.is_writing or self.is_draining or self.is_locked
        return not is_changing and not self.queue and not self.image.members

    @property
    def is_hollow(self) -> bool:
        return self.is_idle and not self.is_persisted and self.offsets.is_empty

    @abstractmethod
    def records_since(self, old: I) -> Iterable[Record]:
        """Return the records that lead from an older image to the current one."""

    def _records(self, *, is_awaited: bool) -> list[Record]:
        """Return what has changed. After a write that timed out there must be a record before a request is answered."""
        records = [] if self.image is self.durable else list(self.records_since(self.durable))
        if self.is_uncertain and is_awaited and not records:
            self.change()
            other = self.durable.copy()
            other.epoch = -1
            records = list(self.records_since(other))
        return records

    def write(self, step: Step) -> None:
        """End a step: write what has changed, and answer its requests when that is durable."""
        replies = [answer() for answer in self.continuations]
        effects = list(self.effects)
        self.continuations.clear()
        self.effects.clear()
        records = self._records(is_awaited=bool(replies or effects))
        if records:
            self.is_writing = True
            step.append(records, ImageWrite(self, replies, effects))
            return
        self.image = self.durable
        for reply in replies:
            step.reply(reply.token, reply.values)
        for effect in effects:
            effect(ErrorCode.none, step)

    def written(self, step: Step) -> None:
        """The image is in the log."""
        if self.image.epoch > self.durable.epoch and self.image.members and not self.is_replaced:
            step.rebalanced(self.group_id, self.image.epoch, len(self.image.members))
        self.durable = self.image
        self.is_persisted = True

    def revert(self, step: Step) -> None:
        """The write has failed: return to the durable image. Members that the step had removed are still there."""
        self.image = self.durable
        self.subscriptions_changed = True


@dataclass(slots=True)
class ImageWrite(Write):
    """A pending write of a group's image. The requests of the step wait for it."""

    group: ImageGroup[Any]
    replies: Sequence[WaitingReply]
    effects: Sequence[Callable[[ErrorCode, Step], None]]

    def finish(self, error: ErrorCode, step: Step) -> None:
        group = self.group
        group.is_writing = False
        # After a timeout the records are in the log: they are committed, or another node leads it.
        if error in (ErrorCode.none, ErrorCode.request_timed_out):
            group.written(step)
            group.is_uncertain = error is not ErrorCode.none
        else:
            group.revert(step)
        if error is ErrorCode.none:
            for reply in self.replies:
                step.reply(reply.token, reply.values)
        else:
            is_timeout = error is ErrorCode.request_timed_out
            error = ErrorCode.coordinator_not_available if is_timeout else group_write_error(error)
            self._answer_refused(error, step)
        for effect in self.effects:
            effect(error, step)

    def refuse(self, error: ErrorCode, step: Step) -> None:
        self._answer_refused(error, step)
        for effect in self.effects:
            effect(error, step)

    def _answer_refused(self, error: ErrorCode, step: Step) -> None:
        for reply in self.replies:
            step.reply(reply.token, {**reply.refused, "error_code": error})
