"""Verification of transactions by leaders (KIP-890): the requests to the coordinators. See `verification`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from chronik.node.replicas.partition import Partition
from chronik.node.replicas.verification import ProducedTransaction, Resume, Verification
from chronik.node.runtime import Runtime
from chronik.wire.batch import BatchHeader
from chronik.wire.errors import ErrorCode, KafkaError

VERIFY_TIMEOUT_S = 10.0
"""A coordinator that does not answer within this time counts as unreachable; the producer retries."""

TopicPartition: TypeAlias = tuple[str, int]


class Transactions(Protocol):
    """The transaction coordinators of the cluster, wherever they are."""

    async def verify(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[TopicPartition],
        adds: bool,
    ) -> Mapping[TopicPartition, ErrorCode]:
        """Return for each partition whether it is in the producer's open transaction (NONE), or why it is not.

        With `adds`, add the partitions first, all at once: one transition of the transaction, not one for each.
        """


class _Producer(NamedTuple):
    """Verifications with the same key travel together."""

    transaction: ProducedTransaction
    producer_id: int
    epoch: int


class Verifier:
    """Invariant: at most one request for a producer's transaction is on its way; later partitions wait for the next.

    Owned by the loop. Call `close` before it ends.
    """

    def __init__(self, runtime: Runtime, transactions: Transactions) -> None:
        self._runtime = runtime
        self._transactions = transactions
        self._log = runtime.log.bind(component="transactions")
        self._queues: dict[_Producer, list[tuple[Partition, Verification]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def verify(
        self, partition: Partition, header: BatchHeader, transaction: ProducedTransaction, resume: Resume
    ) -> None:
        """Call `resume` when the coordinator has answered, after the producer's earlier batches in the partition."""
        verification = partition.verifications.join(header, transaction.adds)
        verification.waiting.append(resume)
        if verification.is_requested:
            return
        verification.is_requested = True
        key = _Producer(transaction, header.producer_id, header.producer_epoch)
        queue = self._queues.get(key)
        if queue is not None:
            queue.append((partition, verification))
            return
        # The task begins in the next loop turn: all partitions of a produce request travel together.
        self._queues[key] = [(partition, verification)]
        task = self._runtime.loop.create_task(self._run(key), name=f"verify-{header.producer_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, key: _Producer) -> None:
        queue = self._queues[key]
        try:
            while queue:
                requested, queue[:] = list(queue), []
                outcomes = await self._request(key, list({(p.topic, p.index): None for p, _ in requested}))
                for partition, verification in requested:
                    if verification.is_outdated and verification.void is None:
                        verification.is_outdated = False
                        queue.append((partition, verification))
                        continue
                    outcome = outcomes.get((partition.topic, partition.index), ErrorCode.unknown_server_error)
                    partition.verifications.finish(key.producer_id, verification, outcome)
        finally:
            del self._queues[key]

    async def _request(
        self, key: _Producer, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, ErrorCode]:
        (transactional_id, adds), producer_id, epoch = key
        code = ErrorCode.unknown_server_error
        try:
            async with asyncio.timeout(VERIFY_TIMEOUT_S):
                return await self._transactions.verify(transactional_id, producer_id, epoch, partitions, adds)
        except TimeoutError:
            code = ErrorCode.network_exception
        except KafkaError as error:
            code = error.code
        except Exception:
            self._log.exception("verification_failed", transactional_id=transactional_id, producer_id=producer_id)
        return dict.fromkeys(partitions, code)
