"""Carries out on the controller what the pure controller decides, and answers the calls of brokers.

Every node has one; it acts while this node leads the Raft group and has applied all that earlier leaders committed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chronik.metadata.calls import AlterIsrCall, HeartbeatCall, HeartbeatResult, RegisterBrokerCall
from chronik.metadata.commands import AllocateProducerIds, RegisterBroker
from chronik.metadata.events import ProducerIdsAllocated
from chronik.node.internal_api import (
    AllocateProducerIdsCall,
    Call,
    CallReply,
    CreateTopicCall,
    Done,
    ProducerIdsResult,
    RegisteredResult,
    Result,
    TopicCreatedResult,
)
from chronik.node.metadata_log import NotController
from chronik.wire.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    from chronik.node.broker import Broker
    from chronik.node.metadata_log import RaftMetadataLog
    from chronik.node.peers import Peers
    from chronik.node.raft_service import RaftService


class ControllerService:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def attach(self, raft: RaftService, metadata: RaftMetadataLog, peers: Peers) -> None: ...

    def broker_gone(self, broker_id: int) -> None: ...

    def close(self) -> None: ...

    async def answer(self, call: Call) -> CallReply:
        """What the controller says to a broker's call; where this node is not it, who may be."""
        metadata = self._broker.metadata
        if not metadata.is_controller:
            return CallReply(False, metadata.controller_id)
        try:
            result = await self._carry_out(call)
        except NotController as error:
            return CallReply(False, error.controller_id)
        except KafkaError as error:
            return CallReply(True, self._broker.node_id, metadata.version, error.code, error.message)
        except Exception:
            self._broker.log.exception("controller_call_failed", call=type(call).__name__)
            code = ErrorCode.unknown_server_error
            return CallReply(True, self._broker.node_id, metadata.version, code, "unexpected error at the controller")
        return CallReply(True, self._broker.node_id, metadata.version, result=result)

    async def _carry_out(self, call: Call) -> Result:
        metadata = self._broker.metadata
        match call:
            case RegisterBrokerCall():
                await metadata.propose(
                    RegisterBroker(
                        call.broker_id, call.incarnation, call.host, call.port, call.rack, internal=call.internal
                    )
                )
                return RegisteredResult(metadata.image.brokers[call.broker_id].epoch)
            case HeartbeatCall():
                return HeartbeatResult(2000, False, call.wants_shutdown)
            case AllocateProducerIdsCall(broker_id=broker_id, count=count):
                for event in await metadata.propose(AllocateProducerIds(broker_id, count)):
                    if isinstance(event, ProducerIdsAllocated):
                        return ProducerIdsResult(event.first, event.count)
                raise AssertionError
            case CreateTopicCall():
                from chronik.node.topic_creation import NewTopic, create_topic

                new = NewTopic(call.name, call.num_partitions, call.replication_factor, call.assignments, call.configs)
                created = await create_topic(self._broker, new, by_broker=call.by_broker)
                return TopicCreatedResult(created.id)
            case AlterIsrCall():
                return Done()
            case _:
                return Done()
