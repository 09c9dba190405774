"""All services of a node that its API handlers use."""

from dataclasses import dataclass

from chronik.node.admin.topics import Topics
from chronik.node.coordinators.group_service import GroupService
from chronik.node.forwarding.forwarding import Forwarding
from chronik.node.membership.controller_client import ProducerIds
from chronik.node.membership.controller_service import ControllerService
from chronik.node.membership.departures import Departures
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.deadlines import Deadlines
from chronik.node.serving.fetch_sessions import FetchSessions
from chronik.node.serving.server import Server


@dataclass(frozen=True, slots=True)
class Services:
    """Passed to every handler; a handler uses only what its API needs."""

    runtime: Runtime
    metadata: MetadataLog
    controller: ControllerService
    departures: Departures
    producer_ids: ProducerIds
    host: PartitionHost
    groups: GroupService
    topics: Topics
    forwarding: Forwarding
    server: Server
    deadlines: Deadlines
    fetch_sessions: FetchSessions
