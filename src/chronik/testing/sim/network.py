"""The network between machines: links with latency that can be cut in one direction, listeners, and connections.

Bytes arrive as over TCP: in order, or not at all. A cut link holds what is sent and delivers it after the link heals,
as retransmission would. A machine without power receives nothing; when it is back, its kernel sends a reset for packets
that belong to no connection.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING

from chronik.testing.sim.transport import SimTransport
from chronik.testing.sim.world import World

if TYPE_CHECKING:
    from chronik.testing.sim.host import Host, Process

EPHEMERAL_PORTS_FROM = 40_000
RETRANSMIT_S_MAX = 0.4
SYN_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Link:
    """One direction between two machines."""

    latency_s: float
    jitter_s: float
    is_cut: bool = False
    held: list[tuple[Callable[[], None], float]] = field(default_factory=list)
    """Deliveries held until the link heals, each with its earliest time: it must not overtake a retransmission."""
    not_before_s: float = 0.0
    """All held packets have arrived by this time; later packets do not overtake them."""


class Listener(asyncio.AbstractServer):
    """A bound port; refuses connections until `start_serving`."""

    def __init__(
        self, network: Network, process: Process, factory: Callable[[], asyncio.BaseProtocol], port: int
    ) -> None:
        self.process = process
        self.factory = factory
        self.address = (process.host.address, port)
        self.sockets = (SimpleNamespace(getsockname=lambda: self.address),)
        self._network = network
        self._is_serving = False

    async def start_serving(self) -> None:
        self._is_serving = True

    def is_serving(self) -> bool:
        return self._is_serving and self.process.is_alive

    def close(self) -> None:
        self._is_serving = False
        self._network.unbind(self)

    def accept(self, transport: SimTransport) -> None:
        """Accept a new connection from the kernel; runs in the process's loop."""
        if self._is_serving:
            transport.attach(self.factory())
        else:
            transport.close_socket()


class Network:
    """All machines, links, listeners and connections."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random: Random = world.random("network")
        self.base_latency_s = self.random.choice((30e-6, 200e-6, 1e-3))
        self._hosts: dict[str, Host] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._listeners: dict[tuple[str, int], Listener] = {}
        self._next_port = EPHEMERAL_PORTS_FROM
        self._transports: dict[SimTransport, None] = {}

    # -- machines and links --------------------------------------------------------------------------------------------

    def add(self, host: Host) -> None:
        self._hosts[host.address] = host

    def link(self, source: Host, target: Host) -> Link:
        key = (source.address, target.address)
        if key not in self._links:
            latency_s = 10e-6 if source is target else self.base_latency_s * (0.5 + self.random.random())
            self._links[key] = Link(latency_s, latency_s * self.random.random())
        return self._links[key]

    def carry(self, source: Host, target: Host, arrive: Callable[[], None], not_before_s: float = 0.0) -> float:
        """Call `arrive` after the link's latency; hold it while the link is cut. Return the earliest arrival time."""
        link = self.link(source, target)
        if link.is_cut or link.held:
            link.held.append((arrive, not_before_s))
            return max(not_before_s, self.world.now)
        # Sometimes a packet is lost and arrives by retransmission.
        lost_s = 0.2 if self.random.random() < 0.0005 else 0.0
        latency_s = link.latency_s + self.random.random() * link.jitter_s + lost_s
        when_s = max(not_before_s, link.not_before_s, self.world.now + latency_s)
        self.world.at(when_s, arrive)
        return when_s

    def cut(self, source: Host, target: Host) -> None:
        self.link(source, target).is_cut = True
        self.world.note(f"link {source.name} -> {target.name} is cut")

    def heal(self, source: Host, target: Host) -> None:
        link = self.link(source, target)
        if not link.is_cut:
            return
        link.is_cut = False
        self.world.note(f"link {source.name} -> {target.name} is healed, {len(link.held)} held")
        self.world.after(self.random.random() * RETRANSMIT_S_MAX, self._release, link)

    def _release(self, link: Link) -> None:
        if link.is_cut:
            return
        held, link.held = link.held, []
        # Deliver held packets one by one in order; packets sent meanwhile arrive after them.
        for number, (arrive, not_before_s) in enumerate(held):
            soonest_s = self.world.now + link.latency_s + number * 1e-6
            link.not_before_s = max(link.not_before_s, not_before_s, soonest_s)
            self.world.at(link.not_before_s, arrive)

    # -- listening and connecting --------------------------------------------------------------------------------------

    def bind(self, process: Process, factory: Callable[[], asyncio.BaseProtocol], address: str, port: int) -> Listener:
        if address != process.host.address:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        if (address, port) in self._listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        listener = Listener(self, process, factory, port)  # type: ignore[abstract]  # as much as node code uses
        self._listeners[address, port] = listener
        return listener

    def listener(self, address: str, port: int) -> Listener | None:
        """Return the listener that accepts connections at this address, if any."""
        listener = self._listeners.get((address, port))
        return listener if listener is not None and listener.is_serving() else None

    def unbind(self, listener: Listener) -> None:
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]

    async def connect(self, process: Process, address: str, port: int) -> SimTransport:
        """Connect the process to an address and return the transport, without a protocol. Raises as connect(2) does."""
        target = self._hosts.get(address)
        if target is None:
            raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
        source = process.host
        connected: asyncio.Future[SimTransport] = process.loop.create_future()
        self._next_port += 1
        local = (source.address, self._next_port)

        def answer(transport: SimTransport | OSError) -> None:
            process.loop.call_soon_threadsafe(settle, transport)

        def settle(transport: SimTransport | OSError) -> None:
            if connected.done():
                if isinstance(transport, SimTransport):
                    transport.close_socket()
            elif isinstance(transport, OSError):
                connected.set_exception(transport)
            else:
                connected.set_result(transport)

        def syn_arrives() -> None:
            if not target.is_powered or connected.done() or not process.is_alive:
                return
            listener = self.listener(address, port)
            if listener is None:
                refused = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
                self.carry(target, source, lambda: answer(refused))
                return
            here = SimTransport(self, process, local, (address, port))
            there = SimTransport(self, listener.process, (address, port), local)
            here.peer, there.peer = there, here
            listener.process.loop.call_soon_threadsafe(listener.accept, there)
            self.carry(target, source, lambda: answer(here))

        self.carry(source, target, syn_arrives)
        timeout = process.loop.call_later(
            SYN_TIMEOUT_S, answer, TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        )
        try:
            return await connected
        finally:
            timeout.cancel()

    # -- closing connections -------------------------------------------------------------------------------------------

    def opened(self, transport: SimTransport) -> None:
        self._transports[transport] = None

    def closed(self, transport: SimTransport) -> None:
        self._transports.pop(transport, None)

    def _transports_of(self, host: Host) -> list[SimTransport]:
        return [each for each in self._transports if each.process.host is host]

    def process_ended(self, host: Host) -> None:
        """Close the sockets of the machine's dead process, as the kernel does."""
        self._drop_listeners(host)
        for transport in self._transports_of(host):
            transport.close_socket()

    def machine_lost(self, host: Host) -> None:
        """Drop the connections of a machine that lost power, without notice to its peers."""
        self._drop_listeners(host)
        for transport in self._transports_of(host):
            transport.vanish()

    def _drop_listeners(self, host: Host) -> None:
        self._listeners = {key: each for key, each in self._listeners.items() if each.process.host is not host}

    def machine_back(self, host: Host) -> None:
        """Reset peers with unacknowledged data in flight: they retransmit, and the machine's kernel sends a reset."""
        for transport in list(self._transports):
            peer = transport.peer
            if peer is not None and peer.process.host is host and peer.is_gone and transport.in_flight_bytes:
                self.world.after(self.random.random() * RETRANSMIT_S_MAX, transport.arrived_reset)

    def reset_some(self, host: Host, share: float) -> int:
        """Reset some connections of this machine at both ends, as a middlebox does that forgets them."""
        count = 0
        for transport in self._transports_of(host):
            if self.random.random() < share and not transport.is_gone:
                transport.arrived_reset()
                if transport.peer is not None:
                    transport.peer.arrived_reset()
                count += 1
        return count

    def silence_some(self, host: Host, share: float) -> int:
        """Silence some connections: they stay open at both ends, but carry no more data."""
        count = 0
        for transport in self._transports_of(host):
            if self.random.random() < share and transport.peer is not None:
                transport.is_silenced = transport.peer.is_silenced = True
                count += 1
        return count
