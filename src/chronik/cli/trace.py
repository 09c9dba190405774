"""`chronik trace`: switch a topic's traces on and off, and watch them live."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from datetime import UTC, datetime
from typing import Annotated

import typer

from chronik.cli.errors import CliError, say
from chronik.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Topic, with_controller
from chronik.client.cluster import Cluster
from chronik.client.properties import ClientSettings, Target
from chronik.client.topics import Topics
from chronik.doctor.brokers import FIRST_TIMEOUT_S, Brokers
from chronik.doctor.chronik_nodes import TracePages, all_http_addresses
from chronik.doctor.means import Means
from chronik.observe import traces
from chronik.wire.errors import ErrorCode, KafkaError

app = typer.Typer(no_args_is_help=True, help="Fetch, produce and watermark traces of a topic.")

TRACE = "chronik.trace"
INTERVAL_S = 0.3
NODES_LISTED_EVERY_S = 5.0
EVENTS_SHOWN_BEFORE = 10
"""How many past events are shown for each node."""


@app.command()
def on(topic: Topic, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP) -> None:
    """Start tracing a topic. Tracing costs a few per cent of throughput."""
    with_controller(bootstrap, lambda cluster: Topics(cluster).alter_configs(topic, {TRACE: "true"}))
    say(f"tracing {topic}: see chronik trace tail {topic}")


@app.command()
def off(topic: Topic, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP) -> None:
    """Stop tracing a topic. Earlier traces stay in the nodes' rings and in __chronik_traces."""
    with_controller(bootstrap, lambda cluster: Topics(cluster).alter_configs(topic, {TRACE: "false"}))
    say(f"stopped tracing {topic}")


@app.command()
def tail(
    topic: Topic,
    partition: Annotated[int | None, typer.Option("--partition", min=0, help="This partition only.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as one line of JSON.")] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Show a topic's traces from all nodes as they happen, until Ctrl-C."""
    if with_controller(bootstrap, lambda cluster: _is_off(cluster, topic)):
        say(f"{topic} is not traced: start with chronik trace on {topic}")

    def show(event: traces.Trace) -> None:
        print(traces.encode_trace(event).decode() if as_json else line_of(event))

    try:
        asyncio.run(follow(bootstrap, topic, partition, show))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


async def _is_off(cluster: Cluster, topic: str) -> bool:
    configs = {entry.name: entry.value for entry in await Topics(cluster).configs(topic)}
    if TRACE not in configs:
        raise CliError("this is not a Chronik cluster: its brokers keep no traces")
    return configs[TRACE] != "true"


async def follow(
    target: Target,
    topic: str,
    partition: int | None,
    show: Callable[[traces.Trace], None],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Show events sorted by time within each poll; a node that is down is polled again later."""
    settings = ClientSettings.of(target)
    means = Means.of(settings.security)
    addresses = await _addresses(settings, topic, means)
    if not addresses:
        raise CliError("no node reports its HTTP address: is this a Chronik cluster, and is its HTTP port reachable?")
    pages = {node: TracePages(address, topic, partition, caller=means.caller) for node, address in addresses.items()}
    listed_s = 0.0
    batches = await asyncio.gather(*(page.latest(EVENTS_SHOWN_BEFORE) for page in pages.values()))
    while True:
        for event in sorted((event for batch in batches for event in batch), key=lambda event: event.time_ms):
            show(event)
        sys.stdout.flush()
        for node, page in pages.items():
            if page.has_changed:
                say(f"node {node} {'answers again' if page.answers else 'does not answer: ' + page.reason}")
        await pause(INTERVAL_S)
        listed_s += INTERVAL_S
        if listed_s >= NODES_LISTED_EVERY_S:
            listed_s = 0.0
            # A node may have joined since.
            answering = {node: page.address for node, page in pages.items() if page.answers}
            for node, address in (await all_http_addresses(answering, means.caller)).items():
                pages.setdefault(node, TracePages(address, topic, partition, caller=means.caller))
        batches = await asyncio.gather(*(page.next() for page in pages.values()))


async def _addresses(settings: ClientSettings, topic: str, means: Means) -> dict[int, str]:
    with closing(Brokers(settings.endpoints, means.connect)) as brokers:
        layout = await brokers.layout(topic, FIRST_TIMEOUT_S)
        known = layout.topics.get(topic)
        if known is None or known.error is ErrorCode.unknown_topic_or_partition:
            raise KafkaError(ErrorCode.unknown_topic_or_partition, f"topic {topic} does not exist")
        return await all_http_addresses(await brokers.http_addresses(), means.caller)


def line_of(event: traces.Trace) -> str:
    """Return `12:00:01.250 node 1 orders-0 fetch-served ...`: common columns first, then the details of the kind."""
    time = datetime.fromtimestamp(event.time_ms / 1000, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
    return f"{time} node {event.node} {event.topic}-{event.partition} {event.kind:<20} {_about(event)}".rstrip()


def _about(event: traces.Trace) -> str:
    match event:
        case traces.FetchStarted():
            waits = f"waits up to {event.max_wait_ms} ms for {event.min_bytes} bytes"
            return f"#{event.fetch} {event.client_id} from {event.offset}, {waits}"
        case traces.WatermarkSeen():
            return f"#{event.fetch} watermark {event.high_watermark}, log end {event.log_end_offset}"
        case traces.NoData():
            return f"#{event.fetch} waits"
        case traces.DataAvailable():
            return f"#{event.fetch} {event.bytes} bytes"
        case traces.FetchServed():
            outcome = event.error or f"{event.bytes} bytes, watermark {event.high_watermark}"
            return f"#{event.fetch} {event.client_id} from {event.offset}: {outcome} after {event.elapsed_ms:.1f} ms"
        case traces.ProduceAppended():
            span = f"{event.base_offset} to {event.last_offset}"
            return f"{event.client_id} {span}, {event.bytes} bytes, acks={event.acks}"
        case traces.ProduceAcknowledged():
            span = f"{event.base_offset} to {event.last_offset}"
            return f"{event.client_id} {span}, acks={event.acks}, after {event.elapsed_ms:.1f} ms"
        case traces.ProduceForwarded():
            return f"{event.client_id} to node {event.to}, {event.bytes} bytes"
        case traces.ProduceRejected():
            return f"{event.client_id} {event.error}: {event.reason}"
        case traces.WatermarkUpdated():
            acks = "" if event.acks is None else f", acks={event.acks}"
            return f"{event.old} to {event.new} by {event.why}{acks}"
        case traces.IsrChanged():
            old, new = (", ".join(map(str, isr)) for isr in (event.old, event.new))
            return f"{old} to {new}, leader {event.leader} in epoch {event.leader_epoch}"
