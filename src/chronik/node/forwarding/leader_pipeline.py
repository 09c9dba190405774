"""A leader pipeline: the connection that forwards batches to one leader, in order, with one response per request."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from chronik.client.connection import Connection as PeerConnection
from chronik.client.errors import ClientError
from chronik.node.forwarding.lanes import ForwardedBatch
from chronik.node.membership.peers import Peers
from chronik.wire.api import ApiKey
from chronik.wire.errors import MalformedRequest
from chronik.wire.produce import (
    ProducePartitionResponse,
    ProduceRequest,
    ProduceTopic,
    produce_request_buffers,
    read_produce_response,
)

PURPOSE = "produce"
VERSION = 13
CONNECT_TIMEOUT_S = 2.0
ACKS_FOR_NONE = 1
"""Used for acks=0: without a response, the leader could not report that it does not lead."""


class Outcomes(Protocol):
    """Receives the outcome of each batch."""

    def answered(self, batch: ForwardedBatch, answer: ProducePartitionResponse) -> None:
        """The leader answered."""

    def not_sent(self, batch: ForwardedBatch, reason: str) -> None:
        """The leader could not be reached."""

    def in_doubt(self, batch: ForwardedBatch, reason: str) -> None:
        """The batch was sent but not answered: it may or may not be appended."""


class LeaderPipeline:
    """Invariant: batches are sent in the order in which they were passed to `send`. Owned by the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, peers: Peers, outcomes: Outcomes, leader: int) -> None:
        self._loop = loop
        self._peers = peers
        self._outcomes = outcomes
        self._leader = leader
        self._unsent: deque[list[ForwardedBatch]] = deque()
        self._connecting: asyncio.Task[None] | None = None

    def send(self, batches: list[ForwardedBatch]) -> None:
        """Send these batches in one request."""
        connection = self._peers.open_connection(self._leader, PURPOSE)
        if connection is not None and self._connecting is None:
            self._write(connection, batches)
            return
        self._unsent.append(batches)
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._connect(), name=f"forward-{self._leader}")

    async def _connect(self) -> None:
        reason = ""
        connection: PeerConnection | None = None
        try:
            connection = await self._peers.connection(self._leader, PURPOSE, CONNECT_TIMEOUT_S)
        except ClientError as error:
            reason = str(error)
        self._connecting = None
        unsent, self._unsent = self._unsent, deque()
        for batches in unsent:
            if connection is not None:
                self._write(connection, batches)
                continue
            for batch in batches:
                self._outcomes.not_sent(batch, reason)

    def _write(self, connection: PeerConnection, batches: list[ForwardedBatch]) -> None:
        sent = [batch for batch in batches if not batch.is_over]
        if not sent:
            return
        first = sent[0]
        left_ms = max(1, int((first.deadline_s - self._loop.time()) * 1000))
        topics: list[ProduceTopic] = []
        for batch in sent:
            batch.is_sent = True
            if not topics or topics[-1].topic_id != batch.topic.id:
                topics.append(ProduceTopic(None, batch.topic.id, []))
            topics[-1].partitions.append((batch.response.partition, batch.records))
        request = ProduceRequest(None, first.request.acks or ACKS_FOR_NONE, left_ms, topics)
        body = b"".join(produce_request_buffers(VERSION, request))
        answer = connection.send(ApiKey.PRODUCE, VERSION, body)
        answer.add_done_callback(lambda done: self._answered(sent, done))

    def _answered(self, sent: list[ForwardedBatch], answer: asyncio.Future[memoryview]) -> None:
        if answer.cancelled() or (failure := answer.exception()) is not None:
            reason = "the connection to the leader was given up" if answer.cancelled() else str(failure)
            for batch in sent:
                self._outcomes.in_doubt(batch, reason)
            return
        try:
            response = read_produce_response(VERSION, answer.result())
        except MalformedRequest as error:
            for batch in sent:
                self._outcomes.in_doubt(batch, str(error))
            return
        outcomes = {
            (topic_id, partition.partition): partition
            for _, topic_id, partitions in response.topics
            for partition in partitions
        }
        for batch in sent:
            outcome = outcomes.get((batch.topic.id, batch.response.partition))
            if outcome is None:
                self._outcomes.in_doubt(batch, "the leader's answer does not name it")
            else:
                self._outcomes.answered(batch, outcome)
