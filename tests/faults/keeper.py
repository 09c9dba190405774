"""Own the machine resources of a fault campaign, and release them when the parent process ends, for any reason.

    python keeper.py SUBNET SEED        SUBNET such as 198.18.7

For each node the program creates a network namespace with one TUN device. It forwards the packets between the nodes and
the host itself, so it can drop or delay single packets, in one or both directions, in the middle of real TCP
connections. `tc netem` does the same, but many kernels lack it. The namespaces have no names: they are open files of
this process, at /proc/PID/fd/N, and disappear with it. Disks are in-memory file systems that can be filled.

It reads JSON lines from standard input and answers each with one line:

    {"node": 3}                                             {"namespace": "/proc/123/fd/9"}
    {"links": [[3, 0, {"loss": 1.0}], ...]}                 {}         0 is the host; others are healthy again
    {"disk": "/path", "size_bytes": 1000000}                {}
    {"counts": true}                                        {"passed": 1000, "dropped": 10}
    any request that fails                                  {"error": "one line"}

Uses only the standard library, because it runs as root.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from itertools import count
from typing import Any

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PACKET_BYTES_MAX = 65_536
PACKETS_AT_ONCE = 64
HELD_MAX = 20_000
"""Maximum number of delayed packets; a router's buffer is bounded, too."""
HOST = 0
HOST_ADDRESS = 254
HEALTHY: tuple[float, float, float] = (0.0, 0.0, 0.0)

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


class Keeper:
    """Owns the devices, the namespaces and the mounts. Single-threaded; only `select` blocks."""

    def __init__(self, subnet: str, seed: int) -> None:
        self._subnet = subnet
        self._chance = random.Random(seed)
        self._links: dict[tuple[int, int], tuple[float, float, float]] = {}
        self._devices: dict[int, int] = {}
        self._nodes: dict[int, int] = {}
        self._namespaces: dict[int, int] = {}
        self._disks: list[str] = []
        self._held: list[tuple[float, int, int, bytes]] = []
        self._numbers = count()
        self._due_s: dict[tuple[int, int], float] = {}
        self.passed = self.dropped = 0
        self._host_namespace = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._device(HOST, HOST_ADDRESS)

    # -- requests ------------------------------------------------------------------------------------------------------

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "node" in request:
            return {"namespace": f"/proc/{os.getpid()}/fd/{self._namespace(int(request['node']))}"}
        if "links" in request:
            self._links = {
                (source, target): (fault.get("loss", 0.0), fault.get("delay_ms", 0.0), fault.get("jitter_ms", 0.0))
                for source, target, fault in request["links"]
            }
            return {}
        if "disk" in request:
            run("mount", "-t", "tmpfs", "-o", f"size={int(request['size_bytes'])}", "chronik-test", request["disk"])
            self._disks.append(request["disk"])
            return {}
        if "counts" in request:
            return {"passed": self.passed, "dropped": self.dropped}
        raise ValueError(f"unknown request: {request}")

    def close(self) -> None:
        """Unmount the disks. Namespaces and devices end with the process; mounts do not."""
        for path in self._disks:
            subprocess.run(["umount", "-l", path], capture_output=True, check=False)

    def _namespace(self, node: int) -> int:
        if node not in self._namespaces:
            check(libc.unshare(CLONE_NEWNET), "a network namespace")
            try:
                self._namespaces[node] = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                run("ip", "link", "set", "lo", "up")
                self._device(node, node)
            finally:
                check(libc.setns(self._host_namespace, CLONE_NEWNET), "back to the host's network")
        return self._namespaces[node]

    def _device(self, node: int, last: int) -> None:
        """Open a TUN device in the current namespace; this process holds its other end."""
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        wanted = struct.pack("16sH22x", b"chronik%d", IFF_TUN | IFF_NO_PI)
        name = fcntl.ioctl(device, TUNSETIFF, wanted)[:16].rstrip(b"\0").decode()
        run("ip", "addr", "add", f"{self._subnet}.{last}/24", "dev", name)
        run("ip", "link", "set", name, "up")
        self._devices[node] = device
        self._nodes[device] = node

    # -- packets -------------------------------------------------------------------------------------------------------

    def serve(self, orders: int) -> None:
        """Serve until the parent closes its end."""
        pending = b""
        while True:
            wait_s = max(0.0, self._held[0][0] - time.monotonic()) if self._held else None
            ready, _, _ = select.select([orders, *self._nodes], [], [], wait_s)
            self._release()
            for file in ready:
                if file != orders:
                    self._forward(file)
            if orders in ready:
                data = os.read(orders, 65_536)
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._answer_line(line)

    def _answer_line(self, line: bytes) -> None:
        try:
            answer = self.answer(json.loads(line))
        except (OSError, ValueError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)

    def _forward(self, device: int) -> None:
        source = self._nodes[device]
        for _ in range(PACKETS_AT_ONCE):
            try:
                packet = os.read(device, PACKET_BYTES_MAX)
            except OSError:
                return  # no more packets
            if len(packet) < 20 or packet[0] >> 4 != 4:
                continue  # IPv6 neighbour discovery
            target = HOST if packet[19] == HOST_ADDRESS else packet[19]
            if target not in self._devices:
                continue
            loss, delay_ms, jitter_ms = self._links.get((source, target), HEALTHY)
            if loss and self._chance.random() < loss:
                self.dropped += 1
            elif not delay_ms and (source, target) not in self._due_s:
                self._send(target, packet)
            else:
                self._hold(source, target, packet, (delay_ms + self._chance.uniform(0.0, jitter_ms)) / 1000)

    def _hold(self, source: int, target: int, packet: bytes, delay_s: float) -> None:
        """Delay a packet. Packets in one direction keep their order, as on a cable."""
        if len(self._held) >= HELD_MAX:
            self.dropped += 1
            return
        now_s = time.monotonic()
        due_s = max(now_s + delay_s, self._due_s.get((source, target), 0.0))
        self._due_s[(source, target)] = due_s
        heapq.heappush(self._held, (due_s, next(self._numbers), target, packet))

    def _release(self) -> None:
        now_s = time.monotonic()
        while self._held and self._held[0][0] <= now_s:
            _, _, target, packet = heapq.heappop(self._held)
            self._send(target, packet)
        for link in [link for link, due_s in self._due_s.items() if due_s <= now_s]:
            del self._due_s[link]

    def _send(self, target: int, packet: bytes) -> None:
        try:
            os.write(self._devices[target], packet)
            self.passed += 1
        except OSError:
            self.dropped += 1


def main() -> int:
    try:
        keeper = Keeper(sys.argv[1], int(sys.argv[2]))
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    print("{}", flush=True)
    try:
        keeper.serve(sys.stdin.fileno())
    finally:
        keeper.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
