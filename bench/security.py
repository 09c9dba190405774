"""Security rows: SASL_SSL throughput, new and idle TLS connections, and the cost of 10,000 ACLs.

Clients authenticate by SCRAM-SHA-512. The rows of ACLs have no TLS: it would make a request dearer, and the share of
the authorizer smaller.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

from bench.clients import NotMeasured, Topic, drive, drive_single_requests
from bench.lives import living
from bench.processes import Usage, usage_of
from bench.samples import Figure
from bench.secure_clients import RawClient, check_tls, open_and_close
from bench.servers import MECHANISM, Server
from bench.workloads import CONSUMERS, KILOBYTE_RECORD, MEGABYTE, PARTITIONS, SETTLE_S, Life, figure_of, warm_up
from chronik.authentication.scram import ITERATIONS_MIN
from chronik.authorization.acl_filter import AclFilter
from chronik.authorization.acls import AclBinding, Operation, PatternType, Permission, ResourceType
from chronik.cli.options import with_cluster
from chronik.client.acls import Acls
from chronik.client.cluster import Cluster
from chronik.client.properties import ClientSettings
from chronik.client.users import Users

CONNECTING_PROCESSES = 6
IDLE_CONNECTIONS = 1_000
ACLS = 10_000
ACLS_AT_ONCE = 500
ACLS_KNOWN_S_MAX = 60.0
POLL_S = 0.1
CLIENT = "bench"
TOPICS = "bench-"
"""How the names of all measured topics begin."""
TURNS = 6


def produce(life: Life) -> Iterator[Figure]:
    """One idempotent producer with librdkafka's own batching."""
    check_tls(life.server)
    records = life.scale.records(400_000 if life.setup.nodes == 1 else 200_000)
    with Topic(life.server, PARTITIONS) as topic:
        figures = drive(topic, "produce", records, KILOBYTE_RECORD)
    workload = f"produce 1 KB, acks=all, {life.setup}"
    yield figure_of(figures, workload, "records", "1/s", figures["records_per_s"], ">= 1.0")
    yield figure_of(figures, workload, "server CPU", "ms/MB", figures["broker_cpu_ms_per_mb"], "<= 1.0")


def consume(life: Life) -> Iterator[Figure]:
    """Read records that were written just before, so that they come from the page cache."""
    records = life.scale.records(400_000 if life.setup.nodes == 1 else 200_000)
    with Topic(life.server, CONSUMERS) as topic:
        drive(topic, "produce", records, KILOBYTE_RECORD)
        for clients in (1, CONSUMERS):
            figures = drive(topic, "consume", topic.available(), KILOBYTE_RECORD, clients=clients)
            workload = f"consume 1 KB, {clients} consumer{'s' if clients > 1 else ''}, {life.setup}"
            yield figure_of(figures, workload, "records", "1/s", figures["records_per_s"], ">= 1.0")
            yield figure_of(figures, workload, "server CPU", "ms/MB", figures["broker_cpu_ms_per_mb"], "<= 1.0")


def new_connections(life: Life) -> Iterator[Figure]:
    """Each connection: TLS handshake, SCRAM, Metadata, close. The first round is not measured."""
    check_tls(life.server)
    settings = ClientSettings.of(life.server.target)
    seconds = life.scale.seconds(5.0)
    open_and_close(settings, CONNECTING_PROCESSES, seconds)
    before: list[Usage] = []
    connected = open_and_close(
        settings, CONNECTING_PROCESSES, seconds, lambda: before.append(usage_of(life.server.pids))
    )
    after = usage_of(life.server.pids)
    life.server.check()
    cpu_s = after.cpu_s - before[0].cpu_s
    workload = f"new TLS and SCRAM connections, {CONNECTING_PROCESSES} clients, {life.setup.nodes} node"
    resident_mb = after.resident_bytes / MEGABYTE
    yield Figure(workload, "connections", "1/s", connected.per_s, ">= 1.0", cpu_s=cpu_s, resident_mb=resident_mb)
    yield Figure(workload, "server CPU", "ms/connection", cpu_s * 1000 / max(1, connected.count))


def idle_connections(life: Life) -> Iterator[Figure]:
    """Each connection has authenticated and asked for metadata. A JVM may touch more of its heap meanwhile."""
    settings = ClientSettings.of(life.server.target)
    client = RawClient(settings, settings.endpoints[0])
    count = 100 if life.scale.quick else IDLE_CONNECTIONS
    for _ in range(20):  # what the first connections load stays, however many follow
        client.connect().close()
    time.sleep(life.scale.seconds(SETTLE_S))
    before = usage_of(life.server.pids)
    connections = [client.connect() for _ in range(count)]
    try:
        time.sleep(life.scale.seconds(SETTLE_S))
        life.server.check()
        after = usage_of(life.server.pids)
    finally:
        for connection in connections:
            connection.close()
    added_mb = (after.resident_bytes - before.resident_bytes) / MEGABYTE
    workload = f"{IDLE_CONNECTIONS:,} idle TLS connections, {life.setup.nodes} node"
    scaled_mb = added_mb * IDLE_CONNECTIONS / count
    yield Figure(workload, "resident memory added", "MB", scaled_mb, "<= 60.0", is_own_goal=True)


def acl_cost(life: Life) -> Iterator[Figure]:
    """A second server has the same settings and an authorizer with 10,000 ACLs; the load takes turns between both."""
    cost_us: dict[bool, list[float]] = {False: [], True: []}
    with living(life.side, replace(life.setup, has_authorizer=True), life.scale) as guarded:
        warm_up(guarded)
        topics = {False: _topic_of_client(life.server), True: _topic_of_client(guarded.server)}
        with_cluster(guarded.server.target, _create_acls)
        turns = 1 if life.scale.quick else TURNS
        # The first pair of turns is not measured: caches fill.
        for turn in range(turns + 1):
            for has_authorizer in (False, True) if turn % 2 else (True, False):
                figures = drive_single_requests(topics[has_authorizer], 10, 5, life.scale.seconds(4.0))
                if turn:
                    cost_us[has_authorizer].append(figures["broker_cpu_us_per_record"])
    without, with_acls = (statistics.median(cost_us[has_authorizer]) for has_authorizer in (False, True))
    workload = f"one-record requests, 10 connections, {life.setup}"
    yield Figure(f"{workload}, no authorizer", "server CPU", "us/request", without)
    workload = f"{workload}, {ACLS:,} ACLs"
    yield Figure(workload, "server CPU", "us/request", with_acls)
    yield Figure(workload, "server CPU by that without", "ratio", with_acls / without, "<= 1.03", is_own_goal=True)


def _topic_of_client(server: Server) -> Topic:
    """Create a user that is no super user, and a topic; return the topic as the user reaches it."""
    settings = ClientSettings.of(server.target)
    password = secrets.token_urlsafe()
    with_cluster(settings, lambda cluster: Users(cluster).upsert(CLIENT, MECHANISM, password, ITERATIONS_MIN))
    topic = Topic(server, PARTITIONS, is_kept=True)
    with topic:
        topic.bootstrap = replace(settings, security=replace(settings.security, username=CLIENT, password=password))
    return topic


async def _create_acls(cluster: Cluster) -> None:
    """Create the ACLs, and wait until the authorizer has them all."""
    acls = Acls(cluster)
    bindings = list(itertools.islice(_bindings(), ACLS))
    for first in range(0, ACLS, ACLS_AT_ONCE):
        await acls.create(bindings[first : first + ACLS_AT_ONCE])
    deadline_s = time.monotonic() + ACLS_KNOWN_S_MAX
    while (known := len(await acls.list(AclFilter()))) < ACLS:
        if time.monotonic() > deadline_s:
            raise NotMeasured(f"the authorizer has {known} of {ACLS} ACLs after {ACLS_KNOWN_S_MAX:g} s")
        await asyncio.sleep(POLL_S)


def _bindings() -> Iterator[AclBinding]:
    """Yield the right of the measured client, then ACLs of other users and on other topics, as large clusters have."""
    topic, group = ResourceType.TOPIC, ResourceType.GROUP
    literal, prefixed = PatternType.LITERAL, PatternType.PREFIXED
    allow, deny = Permission.ALLOW, Permission.DENY
    yield AclBinding(topic, TOPICS, prefixed, f"User:{CLIENT}", "*", Operation.WRITE, allow)
    for number in itertools.count():
        user = f"User:service-{number % 1_000}"
        yield AclBinding(topic, f"orders-{number}", literal, user, "*", Operation.READ, allow)
        yield AclBinding(topic, f"orders-{number}", literal, user, "*", Operation.WRITE, allow)
        yield AclBinding(topic, f"{'team-' * (number % 4 + 1)}{number}-", prefixed, user, "*", Operation.READ, allow)
        yield AclBinding(topic, f"{TOPICS}{number}-private", literal, user, "*", Operation.WRITE, deny)
        yield AclBinding(group, f"readers-{number}", prefixed, user, f"10.0.0.{number % 250}", Operation.READ, allow)
        if number < 100:
            yield AclBinding(topic, f"own-{number}", literal, f"User:{CLIENT}", "*", Operation.READ, allow)
