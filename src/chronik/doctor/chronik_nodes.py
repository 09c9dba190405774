"""What only Chronik nodes report, over HTTP: rejections, log end offsets and damage of replicas, and traces."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from chronik.client.node_http import TIMEOUT_S, Caller, HttpError, get, get_json
from chronik.doctor.observations import DamageSeen, Observations, RejectionSample, ShareSeen
from chronik.observe.traces import Trace, decode_page

REJECTIONS = "chronik_leadership_rejections_total"
LAG_AGE = "chronik_watermark_lag_seconds"
TRACES_PER_PAGE = 1_000
SILENT_TIMEOUT_S = 0.3
TRACES_KEPT_MAX = 5_000

_SAMPLE = re.compile(rf"^({REJECTIONS}|{LAG_AGE})\{{(.*)\}} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


async def all_http_addresses(known: Mapping[int, str], caller: Callable[[], Caller] = Caller) -> dict[int, str]:
    """Return all nodes' HTTP addresses. Any node can list them, so this includes nodes that are down."""
    for address in known.values():
        try:
            view = await get_json(address, "/api/cluster", 1.0, caller())
        except HttpError:
            continue
        nodes = view.get("nodes", [])
        return {**{int(node["id"]): str(node["http"]) for node in nodes if node.get("http")}, **known}
    return dict(known)


class ChronikNodes:
    """The nodes' HTTP APIs, queried in parallel. Nodes that do not answer are skipped."""

    def __init__(self, addresses: Mapping[int, str], topic: str, caller: Callable[[], Caller] = Caller) -> None:
        self._caller = caller
        self.addresses = dict(addresses)
        self._topic = topic
        self._silent: set[int] = set()

    async def read_metrics(self, seen: Observations, at_s: float) -> None:
        """Record the rejection counts so far, and how long each partition's high watermark has lagged."""
        texts = await asyncio.gather(*(self._metrics(node) for node in self.addresses))
        counts: dict[tuple[int, int], int] = {}
        ages: dict[int, float] = {}
        for node, text in zip(self.addresses, texts, strict=True):
            for name, partition, value in _samples(text, self._topic):
                if name == REJECTIONS:
                    counts[(node, partition)] = int(value)
                else:
                    ages[partition] = max(value, ages.get(partition, 0.0))
        known = seen.rejections[-1].counts if seen.rejections else {}
        # Carry forward the counts of a node that does not answer.
        seen.rejections.append(RejectionSample(at_s, {**known, **counts}))
        seen.watermark_age_s = ages

    async def read_replicas(self, seen: Observations) -> None:
        """Record the log end of each node's replica, the damage found in it, and the share groups that it serves."""
        views = await asyncio.gather(*(self._topic_view(node) for node in self.addresses))
        ends: dict[int, dict[int, int]] = {}
        damages: list[DamageSeen] = []
        shares: list[ShareSeen] = []
        for node, view in zip(self.addresses, views, strict=True):
            for partition in view.get("partitions", []):
                end = partition.get("log_end_offset")
                if isinstance(end, int):
                    ends.setdefault(int(partition["partition"]), {})[node] = end
            damages += [msgspec.convert({**damage, "node": node}, DamageSeen) for damage in view.get("damages", [])]
            shares += [msgspec.convert({**share, "node": node}, ShareSeen) for share in view.get("shares", [])]
        seen.replica_ends = ends
        seen.damages = damages
        seen.shares = shares

    async def read_traces(self, seen: Observations) -> None:
        rings = await asyncio.gather(*(self._ring(node) for node in self.addresses))
        seen.traces = [event for events, _ in rings for event in events]
        seen.node_clocks_ms = {node: clock_ms for node, (_, clock_ms) in zip(self.addresses, rings, strict=True)}

    async def _metrics(self, node: int) -> str:
        try:
            text = (await get(self.addresses[node], "/metrics", self._timeout_s(node), self._caller())).body
        except HttpError:
            self._silent.add(node)
            return ""
        self._silent.discard(node)
        return text.decode("utf-8", "replace")

    async def _topic_view(self, node: int) -> dict[str, Any]:
        try:
            path = f"/api/topics/{self._topic}"
            return await get_json(self.addresses[node], path, self._timeout_s(node), self._caller())
        except HttpError:
            return {}

    def _timeout_s(self, node: int) -> float:
        """Shorten the timeout of a node that timed out last time, because every round waits for it."""
        return SILENT_TIMEOUT_S if node in self._silent else TIMEOUT_S

    async def _ring(self, node: int) -> tuple[Sequence[Trace], float]:
        """Return one node's latest trace events, and its clock."""
        pages = TracePages(self.addresses[node], self._topic, timeout_s=self._timeout_s(node), caller=self._caller)
        return await pages.latest(TRACES_KEPT_MAX), pages.clock_ms


class TracePages:
    """A node's trace ring, page by page. Polling resumes when an unresponsive or restarted node answers again."""

    def __init__(
        self,
        address: str,
        topic: str,
        partition: int | None = None,
        timeout_s: float = TIMEOUT_S,
        caller: Callable[[], Caller] = Caller,
    ) -> None:
        self._timeout_s = timeout_s
        self._caller = caller
        self.address = address
        self.answers = True
        self.has_changed = False
        """Whether the last page showed that the node stopped or resumed answering."""
        self.reason = ""
        self.clock_ms = 0.0
        self._topic = topic
        self._partition = partition
        self._after = 0

    async def latest(self, count: int) -> Sequence[Trace]:
        """Return the latest events; `next` continues after them."""
        return await self._request(last=count)

    async def next(self) -> Sequence[Trace]:
        return await self._request(after=self._after, limit=TRACES_PER_PAGE)

    async def _request(self, **query: Any) -> Sequence[Trace]:
        before = self.answers
        topic, partition = self._topic, self._partition
        try:
            page_of = {"topic": topic, "partition": partition, **query}
            answer = await get(self.address, "/api/traces", self._timeout_s, self._caller(), **page_of)
            page = decode_page(answer.body)
        except (HttpError, ValueError) as error:
            self.answers, self.has_changed, self.reason = False, before, str(error)
            return ()
        self.answers, self.has_changed = True, not before
        self._after, self.clock_ms = page.next, answer.clock_ms
        return page.events


def _samples(text: str, topic: str) -> list[tuple[str, int, float]]:
    """Return the name, partition and value of each of the topic's samples."""
    samples = ((name, dict(_LABEL.findall(labels)), value) for name, labels, value in _SAMPLE.findall(text))
    return [
        (name, int(labels["partition"]), float(value))
        for name, labels, value in samples
        if labels.get("topic") == topic and labels.get("partition", "").isdigit()
    ]
