"""The ordered, durable log of metadata commands, and the image that results from it.

`MetadataLog` is the seam: whoever wants metadata changed proposes a command and gets the events once it is durable and
applied here. `LocalMetadataLog` serves a single node from one SQLite file. A cluster orders the same commands by
agreement behind the same seam.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from chronik.metadata.apply import apply
from chronik.metadata.commands import Command, CreateCluster, decode_command, encode_command
from chronik.metadata.events import Event
from chronik.metadata.image import ClusterImage, decode_image, encode_image
from chronik.node.environment import Environment
from chronik.node.metadata_store import MetadataStore, MetadataStoreError
from chronik.wire.errors import ErrorCode, KafkaError

SNAPSHOT_COMMANDS = 1000
"""A snapshot replaces the log once it holds this many commands: replay at start stays in the tens of milliseconds."""

BATCH_COMMANDS_MAX = 512
"""At most this many waiting commands share one transaction."""

WAITING_COMMANDS_MAX = 10_000
"""Beyond this many waiting commands a proposal is refused rather than queued."""

Proposal: TypeAlias = Command | Callable[[ClusterImage], Command]
Listener: TypeAlias = Callable[[ClusterImage, Sequence[Event]], None]


class MetadataLog(Protocol):
    """Where metadata changes are proposed and seen. Owned by the node's loop."""

    @property
    def image(self) -> ClusterImage:
        """The image after every command that is durable and applied here."""

    async def propose(self, proposal: Proposal) -> list[Event]:
        """Makes one command durable, applies it, and returns what it changed.

        A function gets the image with all earlier proposals applied and returns the command, or raises: that is where
        validation belongs, since no other command can come between. What it raises is raised here, and nothing is
        written. KAFKA_STORAGE_ERROR where the command could not be made durable.
        """

    def subscribe(self, listener: Listener) -> None:
        """Calls `listener(image, events)` on the loop after each applied command, before its proposer goes on."""

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Waiting:
    """One proposal on its way to the disk, with what it will lead to."""

    command: bytes
    image: ClusterImage
    events: list[Event]
    done: asyncio.Future[list[Event]]


class LocalMetadataLog:
    """A node's own metadata log: one writer, commands applied in the order in which they were proposed.

    Invariant: `image` holds exactly the commands that the store has made durable; `_projected` holds these and all that
    wait, so each proposal is checked against everything before it. Store calls run in the executor, one at a time.
    """

    def __init__(self, env: Environment, store: MetadataStore, image: ClusterImage, logged: int) -> None:
        self._env = env
        self._store = store
        self._image = image
        self._projected = image
        self._logged = logged
        self._waiting: list[_Waiting] = []
        self._listeners: list[Listener] = []
        self._writer: asyncio.Task[None] | None = None
        self._is_closed = False

    @classmethod
    async def open(
        cls, env: Environment, store: MetadataStore, cluster_id: str | None = None, *, may_be_new: bool = True
    ) -> LocalMetadataLog:
        """Replays the store; a new one gets `cluster_id`, or a random one. MetadataStoreError says why it cannot be.

        A store of another cluster than `cluster_id` is refused: it came from another data folder. So is an empty one
        where it may not be new: it was lost, and every log would look like that of a deleted topic.
        """
        loop = asyncio.get_running_loop()
        image, logged = await loop.run_in_executor(env.executor, _replay, store)
        log = cls(env, store, image, logged)
        if not image.cluster_id and not may_be_new:
            await log.close()
            raise MetadataStoreError(
                f"{store.path} is empty though there are logs beside it: put back the file that was there, "
                "or start with an empty data folder"
            )
        if not image.cluster_id:
            await log.propose(CreateCluster(cluster_id or new_cluster_id(env)))
        elif cluster_id is not None and cluster_id != image.cluster_id:
            await log.close()
            raise MetadataStoreError(
                f"{store.path} belongs to cluster {image.cluster_id}, its folder to {cluster_id}: "
                "put back the file that was there"
            )
        return log

    @property
    def image(self) -> ClusterImage:
        return self._image

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    async def propose(self, proposal: Proposal) -> list[Event]:
        if self._is_closed:
            raise KafkaError(ErrorCode.kafka_storage_error, "the metadata log is closed")
        if len(self._waiting) >= WAITING_COMMANDS_MAX:
            raise KafkaError(ErrorCode.request_timed_out, "too many metadata changes are waiting")
        command = proposal(self._projected) if callable(proposal) else proposal
        image, events = apply(self._projected, command)
        loop = asyncio.get_running_loop()
        waiting = _Waiting(encode_command(command), image, events, loop.create_future())
        self._projected = image
        self._waiting.append(waiting)
        if self._writer is None:
            self._writer = loop.create_task(self._write(), name="metadata-log")
        # Shielded: a proposer that gives up must not take back a command that later ones were checked against.
        return await asyncio.shield(waiting.done)

    async def close(self) -> None:
        """Waits for what was proposed, then closes the store."""
        self._is_closed = True
        while self._writer is not None:
            await self._writer
        await asyncio.get_running_loop().run_in_executor(self._env.executor, self._store.close)

    async def _write(self) -> None:
        """Commits what waits, batch by batch, until nothing does."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch = self._waiting[:BATCH_COMMANDS_MAX]
            commands = [waiting.command for waiting in batch]
            try:
                await loop.run_in_executor(self._env.executor, self._store.append, self._image.version + 1, commands)
            except Exception as error:
                # Whatever went wrong, nobody may wait for it forever.
                self._refuse_waiting(error)
                continue
            del self._waiting[: len(batch)]
            self._logged += len(batch)
            for waiting in batch:
                self._applied(waiting)
            if self._logged >= SNAPSHOT_COMMANDS:
                await self._take_snapshot()
        self._writer = None

    def _applied(self, waiting: _Waiting) -> None:
        self._image = waiting.image
        failure: Exception | None = None
        for listener in self._listeners:
            try:
                listener(waiting.image, waiting.events)
            except Exception as error:
                # The command stands; its proposer is told, and the other listeners and commands go on.
                failure = error
        if waiting.done.done():
            return
        if failure is None:
            waiting.done.set_result(waiting.events)
        else:
            waiting.done.set_exception(failure)

    def _refuse_waiting(self, error: Exception) -> None:
        """Everything that waits builds on the commands that could not be written, so all of it fails."""
        refused, self._waiting = self._waiting, []
        self._projected = self._image
        for waiting in refused:
            if not waiting.done.done():
                waiting.done.set_exception(KafkaError(ErrorCode.kafka_storage_error, str(error)))

    async def _take_snapshot(self) -> None:
        image = self._image
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._env.executor, _store_snapshot, self._store, image)
        except MetadataStoreError:
            # The log is whole without it; the next batch tries again.
            return
        self._logged = 0


def new_cluster_id(env: Environment) -> str:
    """A random id as Kafka writes it: 16 bytes in URL-safe base64 without padding, not starting with a dash."""
    while True:
        cluster_id = base64.urlsafe_b64encode(env.new_uuid().bytes).decode().rstrip("=")
        if not cluster_id.startswith("-"):
            return cluster_id


def _replay(store: MetadataStore) -> tuple[ClusterImage, int]:
    """The image that the store's snapshot and commands lead to, and the number of commands. Runs in the executor."""
    try:
        return _replayed(store)
    except MetadataStoreError:
        store.close()
        raise


def _replayed(store: MetadataStore) -> tuple[ClusterImage, int]:
    snapshot, commands = store.load()
    image = ClusterImage()
    try:
        if snapshot is not None:
            image = decode_image(snapshot)
    except ValueError as error:
        raise MetadataStoreError(f"{store.path} holds a snapshot that cannot be read: {error}") from error
    for data in commands:
        try:
            image, _ = apply(image, decode_command(data))
        except (ValueError, KafkaError) as error:
            raise MetadataStoreError(
                f"{store.path} holds a command {image.version + 1} that cannot be applied ({error}): "
                "was it written by a newer version?"
            ) from error
    return image, len(commands)


def _store_snapshot(store: MetadataStore, image: ClusterImage) -> None:
    store.replace_by_snapshot(image.version, encode_image(image))
