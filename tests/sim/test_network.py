"""Connections of the simulated network behave like those of TCP and asyncio, also when they break."""

from __future__ import annotations

import asyncio

import pytest
from tests.sim.machines import Machines

PORT = 9000


class Recorder(asyncio.BufferedProtocol):
    """Keeps the data it receives; echoes it if requested."""

    def __init__(self, room: int = 100, echoes: bool = False) -> None:
        self.received = bytearray()
        self.events: list[str] = []
        self.transport: asyncio.Transport
        self.closed: asyncio.Future[Exception | None]
        self._buffer = bytearray(room)
        self._echoes = echoes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.closed = asyncio.get_running_loop().create_future()
        self.events.append("made")

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self._buffer[:nbytes]
        if self._echoes:
            self.transport.write(bytes(self._buffer[:nbytes]))

    def eof_received(self) -> bool:
        self.events.append("eof")
        return False

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append("lost" if exc is None else type(exc).__name__)
        if not self.closed.done():
            self.closed.set_result(exc)


class Pair:
    """A client on machine a, connected to a server on machine b."""

    def __init__(self, machines: Machines, echoes: bool = False, room: int = 100) -> None:
        self.machines = machines
        self.accepted: list[Recorder] = []

        def accept() -> Recorder:
            self.accepted.append(Recorder(room, echoes))
            return self.accepted[-1]

        async def listen() -> None:
            await asyncio.get_running_loop().create_server(accept, "10.0.0.2", PORT)

        machines.run(listen(), 1)
        self.client = self.connect()
        machines.pass_time(1)

    def connect(self) -> Recorder:
        async def connect() -> Recorder:
            _, protocol = await asyncio.get_running_loop().create_connection(Recorder, "10.0.0.2", PORT)
            return protocol

        return self.machines.run(connect())

    @property
    def server(self) -> Recorder:
        return self.accepted[0]

    def write(self, data: bytes | bytearray) -> None:
        """Let the client write, in an iteration of its loop."""
        self.machines.process().loop.call_soon_threadsafe(self.client.transport.write, data)
        self.machines.pass_time(1e-4)


def test_bytes_arrive_in_order_for_any_buffer_and_segment_size(machines: Machines) -> None:
    pair = Pair(machines, echoes=True)
    sent = bytes(range(256)) * 2000
    pair.write(sent)
    machines.pass_time(60)
    assert bytes(pair.server.received) == sent
    assert bytes(pair.client.received) == sent


def test_both_ends_know_the_address_of_their_peer(machines: Machines) -> None:
    pair = Pair(machines)
    assert pair.server.transport.get_extra_info("peername") == pair.client.transport.get_extra_info("sockname")
    assert pair.client.transport.get_extra_info("peername") == ("10.0.0.2", PORT)


def test_a_port_without_a_server_refuses_connections(machines: Machines) -> None:
    async def connect() -> None:
        await asyncio.get_running_loop().create_connection(Recorder, "10.0.0.2", PORT)

    with pytest.raises(ConnectionRefusedError):
        machines.run(connect())


def test_a_bound_port_is_in_use_and_refuses_connections_until_it_serves(machines: Machines) -> None:
    async def bind() -> asyncio.AbstractServer:
        return await asyncio.get_running_loop().create_server(Recorder, "10.0.0.2", PORT, start_serving=False)

    async def connect() -> None:
        await asyncio.get_running_loop().create_connection(Recorder, "10.0.0.2", PORT)

    server = machines.run(bind(), 1)
    with pytest.raises(ConnectionRefusedError):
        machines.run(connect())
    with pytest.raises(OSError, match="in use"):
        machines.run(bind(), 1)
    machines.run(server.start_serving(), 1)
    machines.run(connect())
    server.close()
    with pytest.raises(ConnectionRefusedError):
        machines.run(connect())


def test_data_sent_into_a_cut_link_arrives_in_order_after_the_link_heals(machines: Machines) -> None:
    pair = Pair(machines)
    here, there = machines.hosts
    machines.network.cut(here, there)
    pair.write(b"held ")
    pair.write(b"and then ")
    machines.pass_time(30)
    assert pair.server.received == b""
    machines.network.heal(here, there)
    pair.write(b"sent")
    machines.pass_time(2)
    assert pair.server.received == b"held and then sent"


def test_held_data_does_not_overtake_a_packet_that_was_in_flight_before_the_cut(machines: Machines) -> None:
    """Single-node seed 414460749: a producer's second batch arrived before its first, on one connection."""
    pair = Pair(machines)
    here, there = machines.hosts
    link = machines.network.link(here, there)
    quick_s, link.latency_s = link.latency_s, 1.0
    pair.write(b"sent twice, ")
    link.latency_s = quick_s
    machines.network.cut(here, there)
    pair.write(b"held, ")
    machines.network.heal(here, there)
    machines.pass_time(0.5)
    pair.write(b"sent")
    machines.pass_time(2)
    assert pair.server.received == b"sent twice, held, sent"


def test_a_cut_affects_one_direction(machines: Machines) -> None:
    pair = Pair(machines, echoes=True)
    machines.network.cut(machines.hosts[1], machines.hosts[0])
    pair.write(b"x")
    machines.pass_time(10)
    assert (bytes(pair.server.received), bytes(pair.client.received)) == (b"x", b"")


def test_a_killed_process_closes_its_connections(machines: Machines) -> None:
    pair = Pair(machines)
    machines.hosts[1].kill()
    machines.pass_time(1)
    assert pair.client.events == ["made", "eof", "lost"]
    with pytest.raises(ConnectionRefusedError):
        pair.connect()


def test_a_machine_without_power_sends_nothing_until_it_restarts(machines: Machines) -> None:
    pair = Pair(machines)
    machines.hosts[1].power_off()
    machines.pass_time(30)
    assert pair.client.events == ["made"]
    pair.write(b"is anybody there")
    machines.pass_time(30)
    assert pair.client.events == ["made"]
    machines.restart(1)
    machines.pass_time(5)
    assert pair.client.events == ["made", "ConnectionResetError"]


def test_a_connect_to_a_machine_without_power_times_out(machines: Machines) -> None:
    machines.hosts[1].power_off()

    async def connect() -> None:
        async with asyncio.timeout(3):
            await asyncio.get_running_loop().create_connection(Recorder, "10.0.0.2", PORT)

    with pytest.raises(TimeoutError):
        machines.run(connect())


def test_a_paused_process_receives_connections_and_bytes_and_answers_after_resuming(machines: Machines) -> None:
    pair = Pair(machines, echoes=True)
    machines.hosts[1].pause()
    second = pair.connect()
    pair.write(b"x")
    machines.pass_time(5)
    assert pair.client.received == b"" and len(pair.accepted) == 1
    machines.hosts[1].resume()
    machines.pass_time(1)
    assert pair.client.received == b"x" and len(pair.accepted) == 2
    assert second.events == ["made"]


def test_a_slow_reader_pauses_the_writer_until_it_reads_again(machines: Machines) -> None:
    pair = Pair(machines)
    pair.server.transport.pause_reading()
    pair.write(bytes(1_000_000))
    machines.pass_time(5)
    assert pair.client.events[-1] == "pause"
    assert pair.client.transport.get_write_buffer_size() >= 1_000_000 - 128 * 1024
    pair.server.transport.resume_reading()
    machines.pass_time(60)
    assert pair.client.events[-1] == "resume"
    assert len(pair.server.received) == 1_000_000


def test_closing_sends_the_buffered_data_first(machines: Machines) -> None:
    pair = Pair(machines)
    pair.write(bytes(500_000))
    machines.process().loop.call_soon_threadsafe(pair.client.transport.close)
    machines.pass_time(60)
    assert len(pair.server.received) == 500_000
    assert pair.server.events == ["made", "eof", "lost"]
    assert pair.client.events[-1] == "lost"


def test_a_buffer_that_changes_after_it_was_written_is_a_violation(machines: Machines) -> None:
    pair = Pair(machines)
    data = bytearray(300_000)
    pair.write(data)
    data[-1] = 1
    machines.pass_time(60)
    assert "changed a buffer" in (machines.world.violation or "")


def test_a_reset_closes_the_connection_at_both_ends(machines: Machines) -> None:
    pair = Pair(machines)
    machines.network.reset_some(machines.hosts[0], 1.0)
    machines.pass_time(1)
    assert pair.client.events == pair.server.events == ["made", "ConnectionResetError"]


def test_a_silenced_connection_stays_open_and_carries_nothing(machines: Machines) -> None:
    pair = Pair(machines, echoes=True)
    machines.network.silence_some(machines.hosts[0], 1.0)
    pair.write(b"x")
    machines.pass_time(100)
    assert pair.server.received == b"" and pair.client.events == ["made"]
