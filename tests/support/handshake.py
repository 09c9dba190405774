"""A node's side of the handshake on another node's internal listener, for a test that may send anything there."""

from __future__ import annotations

import asyncio

import msgspec

from chronik.client.connection import Connection
from chronik.node.membership.cluster_secret import ClusterSecret
from chronik.node.membership.internal_api import VERSION, Hello, InternalKey
from chronik.node.membership.peer_handshake import NONCE_BYTES, Caller
from chronik.wire import frames

ANSWER_S = 10.0
NONCE = bytes(range(NONCE_BYTES))


class NotProven(Exception):
    """The node did not accept the secret, or has another one."""


class Refused(Exception):
    """The node accepts the secret but rejects the connection, with this reason."""


async def proven_connection(port: int, hello: Hello, secret: ClusterSecret) -> Connection:
    """Return a connection on which both sides have proven themselves. A test needs no fresh nonce."""
    caller = Caller(secret, msgspec.structs.replace(hello, nonce=NONCE))

    async def authenticate(connection: Connection) -> None:
        _, proof = caller.prove(bytes(await connection.send(InternalKey.HELLO, VERSION, caller.hello)))
        is_proven, refusal = caller.confirms(bytes(await connection.send(InternalKey.PROOF, VERSION, proof)))
        if not is_proven:
            raise NotProven
        if refusal:
            raise Refused(refusal)

    return await Connection.open("127.0.0.1", port, authenticate=authenticate)


class Stranger:
    """A raw client of an internal listener: sends whole frames, and reads all bytes until the connection ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, port: int) -> Stranger:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, key: int, body: bytes, version: int = VERSION) -> None:
        frame = frames.write_request(key, version, 1, None, body)
        self._writer.write(frame)

    async def ask(self, key: int, body: bytes) -> bytes:
        """Send a request and return the body of the response."""
        self.send(key, body)
        async with asyncio.timeout(ANSWER_S):
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            return (await self._reader.readexactly(size))[4:]

    async def rest(self) -> bytes:
        """Return all bytes until the node closes the connection, which must happen within its timeout for strangers."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._reader.read()
        except ConnectionResetError:
            return b""
        finally:
            self.close()

    def close(self) -> None:
        self._writer.close()
