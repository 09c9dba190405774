"""The node's certificates, the TLS contexts made of them, and the handshakes of its listeners.

A changed file is loaded without a restart. New connections use the new certificate and authorities; open connections
stay. A pair that cannot be loaded changes nothing and is logged once.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn

from chronik.authentication.principals import MappingRuleError, NoMatchingRule, PrincipalMapping
from chronik.client.tls_transport import NotTls, TlsBuffers, TlsTransport, WholeReads
from chronik.node.config import ConfigError, NodeConfig, Tls
from chronik.node.runtime import Runtime
from chronik.node.serving.connection import Connection
from chronik.node.serving.x509 import MalformedCertificate, read_certificate

POLL_S = 1.0
"""How often files are checked. A change is loaded when two checks in a row see the same files: both of a pair."""
FILE_BYTES_MAX = 4 * 1024 * 1024
KEPT = "the previous ones stay in use"

EXPIRY_WARNING_S = 14 * 86_400
EXPIRY_LOGGED_EVERY_S = 86_400.0

HANDSHAKES_MAX = 1_024
"""Handshakes in progress on one server. Beyond this, the one that has been silent longest is dropped."""

TICKETS = 1
"""TLS 1.3 session tickets for each connection. OpenSSL's default is 2; Kafka clients use at most one at a time."""

_VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
_CLIENT_AUTH = {"none": ssl.CERT_NONE, "requested": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


class TlsContexts(NamedTuple):
    """The contexts made of one version of the files."""

    clients: ssl.SSLContext
    """For Kafka clients."""
    web: ssl.SSLContext
    accepted_peers: ssl.SSLContext
    """For nodes that connect to this one. They need a certificate, if `security.internal_tls` is set."""
    dialed_peers: ssl.SSLContext
    """For nodes that this one connects to."""
    mapping: PrincipalMapping
    """From the subject of a client's certificate to its principal."""
    expires_s: int
    """When the node's certificate expires, in seconds since 1970."""


def build_contexts(config: NodeConfig) -> TlsContexts:
    """Load the files that the settings name. Blocks. Raise ConfigError if they cannot be used."""
    tls = config.tls
    try:
        mapping = PrincipalMapping(tls.principal_mapping_rules)
    except MappingRuleError as error:
        raise ConfigError(f"tls.{error}") from None
    clients, web, accepted_peers = (_server_context(tls) for _ in range(3))
    dialed_peers = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _restrict(dialed_peers, tls)
    contexts = (clients, web, accepted_peers, dialed_peers)
    _load_pair(tls, contexts)
    if tls.authorities:
        for context in contexts:
            _load_authorities(context, tls.authorities)
    else:
        dialed_peers.load_default_certs()
    clients.verify_mode = _CLIENT_AUTH[tls.client_auth]
    if config.security.internal_tls:
        accepted_peers.verify_mode = ssl.CERT_REQUIRED
    return TlsContexts(*contexts, mapping, _expires_s(tls.certificate))


def _server_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _restrict(context, tls)
    context.num_tickets = TICKETS
    return context


def _restrict(context: ssl.SSLContext, tls: Tls) -> None:
    versions = [_VERSIONS[name] for name in tls.protocols]
    context.minimum_version, context.maximum_version = min(versions), max(versions)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    if tls.ciphers:
        try:
            context.set_ciphers(tls.ciphers)
        except ssl.SSLError:
            raise ConfigError(f"tls.ciphers: OpenSSL knows none of {tls.ciphers!r}: see `openssl ciphers`") from None


def _load_pair(tls: Tls, contexts: Sequence[ssl.SSLContext]) -> None:
    _refuse_readable("tls.key", tls.key)
    password = None
    if tls.key_password_file is not None:
        password = _read("tls.key_password_file", tls.key_password_file, is_secret=True).strip()
    for name, path in (("tls.certificate", tls.certificate), ("tls.key", tls.key)):
        _read(name, path, is_secret=False)
    try:
        for context in contexts:
            # A callback, always: without one, OpenSSL would ask for the password on the terminal.
            context.load_cert_chain(tls.certificate, tls.key, _no_password if password is None else password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"tls.key {tls.key} does not belong to tls.certificate {tls.certificate}") from None
        wrong = "or tls.key_password_file has the wrong password" if password else "use PEM files"
        raise ConfigError(f"tls.certificate {tls.certificate} or tls.key {tls.key} cannot be read: {wrong}") from None
    except OSError as error:
        # One of the files was removed since it was read above.
        line = f"tls.certificate {tls.certificate} or tls.key {tls.key} cannot be read: {error.strerror}"
        raise ConfigError(line) from None


def _no_password() -> NoReturn:
    raise ConfigError("tls.key is encrypted: set tls.key_password_file to a file with its password")


def _load_authorities(context: ssl.SSLContext, path: str) -> None:
    _read("tls.authorities", path, is_secret=False)
    try:
        context.load_verify_locations(path)
    except OSError as error:  # SSLError is one
        reason = "it has no PEM certificate" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"tls.authorities {path} cannot be read: {reason}") from None


def _expires_s(path: str) -> int:
    text = _read("tls.certificate", path, is_secret=False).decode("ascii", "replace")
    begin, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    try:
        return read_certificate(ssl.PEM_cert_to_DER_cert(text[begin : end + len(ssl.PEM_FOOTER)])).expires_s
    except ValueError:
        raise ConfigError(f"tls.certificate {path} has no X.509 certificate: use a PEM file") from None


def _read(name: str, path: str, *, is_secret: bool) -> bytes:
    if is_secret:
        _refuse_readable(name, path)
    try:
        # Without O_NONBLOCK, a named pipe would hold the thread up forever.
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{name} {path} cannot be read: it is no regular file")
            data: bytes = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{name} {path} cannot be read: it is larger than {FILE_BYTES_MAX} bytes")
    return data


def _refuse_readable(name: str, path: str) -> None:
    with suppress(OSError):  # reading it gives the reason
        if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
            raise ConfigError(f"other users may read {name} {path}: chmod 600 {path}")


Version = tuple[tuple[int, int, int] | None, ...]


def _version(tls: Tls) -> Version:
    """Return what changes when one of the files does."""
    versions: list[tuple[int, int, int] | None] = []
    for path in (tls.certificate, tls.key, tls.authorities, tls.key_password_file):
        try:
            found = os.stat(path) if path else None
        except OSError:
            found = None
        versions.append(None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino))
    return tuple(versions)


class NodeTls:
    """The newest contexts of the node. Owned by the loop; files are read in a thread."""

    def __init__(self, runtime: Runtime, contexts: TlsContexts, version: Version) -> None:
        self.contexts = contexts
        self._runtime = runtime
        self._log = runtime.log.bind(component="node")
        self._version = self._seen = version
        self._warned_s: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._measure()

    @classmethod
    async def load(cls, runtime: Runtime) -> NodeTls:
        """Raise ConfigError if the certificates cannot be used."""
        config = runtime.config
        version = await runtime.run_blocking(lambda: _version(config.tls))
        return cls(runtime, await runtime.run_blocking(lambda: build_contexts(config)), version)

    def start(self) -> None:
        self._task = self._runtime.loop.create_task(self._poll(), name="certificates")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _poll(self) -> None:
        while True:
            self._measure()
            await asyncio.sleep(POLL_S)
            try:
                await self._reload()
            except ConfigError as error:
                self._log.error("certificates_not_reloaded", reason=str(error), then=KEPT)
            except Exception as error:
                # The next change must be noticed all the same.
                self._log.exception("certificates_not_reloaded", reason=repr(error), then=KEPT)

    async def _reload(self) -> None:
        config = self._runtime.config
        version = await self._runtime.run_blocking(lambda: _version(config.tls))
        is_stable, self._seen = version == self._seen, version
        if version == self._version or not is_stable:
            return
        self._version = version
        self.contexts = await self._runtime.run_blocking(lambda: build_contexts(config))
        self._warned_s = None
        self._log.info("certificates_reloaded", certificate=config.tls.certificate)

    def _measure(self) -> None:
        """Set the metric, and warn once a day before the certificate expires."""
        left_s = self.contexts.expires_s - self._runtime.env.wall_ms() / 1000
        self._runtime.metrics.certificate_left_s = left_s
        if left_s >= EXPIRY_WARNING_S:
            return
        now_s = self._runtime.loop.time()
        if self._warned_s is None or now_s - self._warned_s >= EXPIRY_LOGGED_EVERY_S:
            self._warned_s = now_s
            path = self._runtime.config.tls.certificate
            if left_s <= 0:
                self._log.error("certificate_expired", certificate=path, then="clients refuse this node: replace it")
            else:
                self._log.warning("certificate_expires", certificate=path, days=int(left_s // 86_400))


class TlsAcceptor:
    """The handshakes of one server's connections.

    Invariant: `_handshakes` holds each handshake in progress with its deadline, the longest silent first. Owned by the
    loop.
    """

    def __init__(
        self,
        runtime: Runtime,
        tls: NodeTls,
        choose: Callable[[TlsContexts], ssl.SSLContext],
        refused: Callable[[str, str], None],
    ) -> None:
        """`refused` is called with a client's host and the reason why its handshake failed."""
        self._loop = runtime.loop
        self._tls = tls
        self._choose = choose
        self._refused = refused
        self._config = runtime.config.tls
        self._metrics = runtime.metrics
        self._buffers = TlsBuffers()
        self._handshakes: dict[TlsTransport, asyncio.TimerHandle] = {}

    def accept(self, protocol: asyncio.BufferedProtocol) -> TlsTransport:
        """Return the protocol for a new socket. It connects `protocol` when the handshake is done."""
        if len(self._handshakes) >= HANDSHAKES_MAX:
            self._drop(next(iter(self._handshakes)), f"{HANDSHAKES_MAX} other TLS handshakes are in progress")
        transport = TlsTransport(self._choose(self._tls.contexts), protocol, self._buffers, self, is_server=True)
        timeout_s = self._config.handshake_timeout_ms / 1000
        late = f"no TLS handshake within {timeout_s:g} s"
        self._handshakes[transport] = self._loop.call_later(timeout_s, self._drop, transport, late)
        return transport

    def accept_whole_reads(self, protocol: asyncio.Protocol) -> TlsTransport:
        return self.accept(WholeReads(protocol))

    def close(self) -> None:
        for transport in list(self._handshakes):
            self._settle(transport)
            transport.abort()

    def _drop(self, transport: TlsTransport, reason: str) -> None:
        self._settle(transport)
        self._report(transport, reason)
        transport.abort()

    def _settle(self, transport: TlsTransport) -> bool:
        """Return whether the handshake was in progress."""
        deadline = self._handshakes.pop(transport, None)
        if deadline is not None:
            deadline.cancel()
        return deadline is not None

    def _report(self, transport: TlsTransport, reason: str) -> None:
        self._metrics.tls_failures += 1
        peer = transport.get_extra_info("peername")
        self._refused(str(peer[0]) if peer else "", reason)

    # -- the owner of TlsTransport -------------------------------------------------------------------------------------

    def progressed(self, transport: TlsTransport) -> None:
        deadline = self._handshakes.pop(transport, None)
        if deadline is not None:
            self._handshakes[transport] = deadline

    def handshake_done(self, transport: TlsTransport) -> bool:
        self._settle(transport)
        protocol = transport.protocol
        if isinstance(protocol, Connection):
            der = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
            if der is not None:
                try:
                    subject = read_certificate(der).subject
                    protocol.certificate_principal = self._tls.contexts.mapping.principal(subject)
                except (MalformedCertificate, NoMatchingRule) as error:
                    self._report(transport, f"the client's certificate: {error}")
                    return False
        return True

    def handshake_failed(self, transport: TlsTransport, error: Exception) -> None:
        # A peer that connects and leaves without a word is a health check or a port scan.
        if self._settle(transport) and not (isinstance(error, OSError) and not isinstance(error, ssl.SSLError)):
            self._report(transport, failure_reason(error))

    def stream_failed(self, transport: TlsTransport, error: ssl.SSLError) -> None:
        self._report(transport, failure_reason(error))


_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the client has no certificate, and this listener requires one",
    "UNSUPPORTED_PROTOCOL": "the client offers only versions of TLS that this node refuses (tls.protocols)",
    "VERSION_TOO_LOW": "the client offers only versions of TLS that this node refuses (tls.protocols)",
    "WRONG_VERSION_NUMBER": "the client offers only versions of TLS that this node refuses (tls.protocols)",
    "NO_SHARED_CIPHER": "the client and this node have no cipher in common (tls.ciphers)",
    "TLSV1_ALERT_UNKNOWN_CA": "the client does not know the authority of this node's certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the client refused this node's certificate: it has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the client refused this node's certificate: it may be for another host",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the client refused this node's certificate: unknown authority, or another host",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "the client refused this node's certificate: it is revoked",
    "TLSV1_ALERT_INTERNAL_ERROR": "the client refused this node's certificate, or failed",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the client refuses the versions of TLS that this node offers (tls.protocols)",
}


def failure_reason(error: Exception) -> str:
    """Explain a failed handshake in one line. The peer's own text is not repeated."""
    if isinstance(error, NotTls):
        return "a client speaks plaintext to a TLS listener: set its security.protocol to SSL or SASL_SSL"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate was refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return _REASONS.get(error.reason or "", f"the TLS handshake failed: {error.reason or 'protocol error'}")
    return f"the TLS handshake failed: {error}"
