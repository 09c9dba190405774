"""Raw clients of the security rows, the same for both sides: connect, TLS handshake, SCRAM, Metadata.

They are as cheap as they can be, because they share the processors with the server. They do not verify the server's
certificate, resume no TLS session, and derive the keys of a password once for each salt, as RFC 5802 allows.

    SaslHandshake 1 response     error code int16, mechanisms [string]
    SaslAuthenticate 1 response  error code int16, error message string, bytes int32 + bytes, session lifetime int64
    Metadata 5 response          throttle time int32, brokers int32 + [...], ...
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import multiprocessing
import os
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from struct import Struct

from bench.clients import NotMeasured
from bench.servers import TLS_CIPHER, TLS_VERSION, Server
from chronik.authentication.scram import HASHES, salted_password
from chronik.client.endpoint import Endpoint
from chronik.client.properties import ClientSettings
from chronik.wire import frames, messages
from chronik.wire.api import ApiKey

TIMEOUT_S = 20.0
READY_S_MAX = 60.0
NONCE_BYTES = 18
CLIENT_ID = "chronik-bench"
METADATA_VERSION = 5
_INT16, _INT32 = Struct(">h"), Struct(">i")
_ERROR_AND_LENGTH = Struct(">hh")


class RawClient:
    """Opens authenticated connections to one broker, one at a time. Raises NotMeasured if the broker refuses one."""

    def __init__(self, settings: ClientSettings, endpoint: Endpoint) -> None:
        security = settings.security
        self._endpoint = endpoint
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE
        self._mechanism, self._digest = security.mechanism, HASHES[security.mechanism]
        self._user, self._password = security.username, security.password
        self._keys: dict[tuple[str, int], tuple[bytes, bytes, bytes]] = {}
        values = {"topics": [], "allow_auto_topic_creation": False}
        self._metadata = messages.write_request(ApiKey.METADATA, METADATA_VERSION, values)

    def connect(self) -> ssl.SSLSocket:
        """Return a connection that has authenticated and received one Metadata response."""
        connection = self.handshake()
        try:
            self._authenticate(connection)
            response = _call(connection, ApiKey.METADATA, METADATA_VERSION, self._metadata)
            if _INT32.unpack_from(response, 4)[0] < 1:
                raise NotMeasured("the metadata has no broker")
        except BaseException:
            connection.close()
            raise
        return connection

    def handshake(self) -> ssl.SSLSocket:
        raw = socket.create_connection(self._endpoint, TIMEOUT_S)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._context.wrap_socket(raw)

    def _authenticate(self, connection: ssl.SSLSocket) -> None:
        name = self._mechanism.encode()
        response = _call(connection, ApiKey.SASL_HANDSHAKE, 1, _INT16.pack(len(name)) + name)
        if error := _INT16.unpack_from(response)[0]:
            raise NotMeasured(f"SaslHandshake was answered with error {error}")
        nonce = base64.b64encode(os.urandom(NONCE_BYTES)).decode()
        first = f"n={self._user},r={nonce}"
        server_first = _exchange(connection, f"n,,{first}".encode()).decode()
        server_nonce, salt, iterations = (part[2:] for part in server_first.split(",")[:3])
        without_proof = f"c=biws,r={server_nonce}"
        client_key, stored_key, server_key = self._keys_of(salt, int(iterations))
        signed = f"{first},{server_first},{without_proof}".encode()
        signature = hmac.digest(stored_key, signed, self._digest)
        proof = int.from_bytes(client_key, "big") ^ int.from_bytes(signature, "big")
        encoded = base64.b64encode(proof.to_bytes(len(client_key), "big")).decode()
        final = _exchange(connection, f"{without_proof},p={encoded}".encode())
        expected = b"v=" + base64.b64encode(hmac.digest(server_key, signed, self._digest))
        if not hmac.compare_digest(final, expected):
            raise NotMeasured("the server's signature is wrong")

    def _keys_of(self, salt: str, iterations: int) -> tuple[bytes, bytes, bytes]:
        keys = self._keys.get((salt, iterations))
        if keys is None:
            salted = salted_password(self._mechanism, self._password.encode(), base64.b64decode(salt), iterations)
            client_key = hmac.digest(salted, b"Client Key", self._digest)
            stored_key = hashlib.new(self._digest, client_key).digest()
            keys = client_key, stored_key, hmac.digest(salted, b"Server Key", self._digest)
            self._keys[salt, iterations] = keys
        return keys


def _exchange(connection: ssl.SSLSocket, message: bytes) -> bytes:
    response = _call(connection, ApiKey.SASL_AUTHENTICATE, 1, _INT32.pack(len(message)) + message)
    error, length = _ERROR_AND_LENGTH.unpack_from(response)
    if error:
        raise NotMeasured(f"SaslAuthenticate was answered with error {error}")
    at = _ERROR_AND_LENGTH.size + max(0, length)
    end = at + 4 + _INT32.unpack_from(response, at)[0]
    return response[at + 4 : end]


def _call(connection: ssl.SSLSocket, key: ApiKey, version: int, body: bytes) -> bytes:
    connection.sendall(frames.write_request(key, version, 0, CLIENT_ID, body))
    received = bytearray()
    while len(received) < 4 or len(received) < 4 + _INT32.unpack_from(received)[0]:
        part = connection.recv(65536)
        if not part:
            raise NotMeasured(f"the server closed the connection at {key.name}")
        received += part
    return bytes(received[8:])  # after the size and the correlation id


def check_tls(server: Server) -> None:
    """Raise NotMeasured unless each broker negotiates the version of TLS and the cipher of the comparison."""
    settings = ClientSettings.of(server.target)
    for endpoint in settings.endpoints:
        with closing(RawClient(settings, endpoint).handshake()) as connection:
            cipher = connection.cipher()
            if cipher is None or (cipher[0], cipher[1]) != (TLS_CIPHER, TLS_VERSION):
                raise NotMeasured(f"{endpoint} negotiates {cipher}, not {TLS_VERSION} with {TLS_CIPHER}")


@dataclass(frozen=True, slots=True)
class Connected:
    """The connections that all workers opened and closed in the time of the measurement."""

    count: int
    seconds: float

    @property
    def per_s(self) -> float:
        return self.count / self.seconds


def open_and_close(
    settings: ClientSettings, workers: int, seconds: float, started: Callable[[], None] = lambda: None
) -> Connected:
    """Let so many processes open and close connections, each one after the other. `started` runs as they begin."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    for _ in range(workers):
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(settings, seconds, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            _receive(pipe, READY_S_MAX)
        started()
        started_s = time.monotonic()
        for pipe in pipes:
            pipe.send("go")
        counts = [_receive(pipe, seconds + TIMEOUT_S) for pipe in pipes]
        return Connected(sum(counts), time.monotonic() - started_s)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()


def _receive(pipe: Connection, timeout_s: float) -> int:
    try:
        if not pipe.poll(timeout_s):
            raise NotMeasured(f"a client did not answer within {timeout_s:g} s")
        answer: int | str = pipe.recv()
    except EOFError:
        raise NotMeasured("a client ended without a result") from None
    if isinstance(answer, str):
        raise NotMeasured(f"a client failed: {answer}")
    return answer


def _work(settings: ClientSettings, seconds: float, pipe: Connection) -> None:
    """The entry point of a worker: report 0 when it is ready, then the number of its connections."""
    try:
        client = RawClient(settings, settings.endpoints[0])
        client.connect().close()
        pipe.send(0)
        pipe.recv()
        until_s, count = time.monotonic() + seconds, 0
        while time.monotonic() < until_s:
            client.connect().close()
            count += 1
        pipe.send(count)
    except EOFError:
        return
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
