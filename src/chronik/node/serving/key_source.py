"""The key set that verifies tokens: loaded from a file or a URL, and refreshed.

A token whose key id is unknown triggers a refresh, because issuers rotate their keys. At most one in REFRESH_S_MIN:
anybody may send such tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from urllib.parse import urlsplit

from chronik.authentication.oauth import KeySet, KeySetError
from chronik.node.config import ConfigError
from chronik.node.runtime import Runtime
from chronik.storage.disk import Disk, read_file

FILE_POLL_S = 5.0
URL_POLL_S = 3600.0
REFRESH_S_MIN = 30.0
RETRY_S_MIN = 1.0
RETRY_S_MAX = 300.0
LOAD_TIMEOUT_S = 10.0
SET_BYTES_MAX = 1024 * 1024
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class KeyLoadError(Exception):
    """The key set cannot be loaded now. The text says why."""


def check_source(source: str) -> None:
    """Raise ConfigError if keys may not be loaded from there: over plain HTTP anybody on the way could replace them."""
    url = urlsplit(source)
    if url.scheme == "http" and url.hostname not in LOOPBACK:
        raise ConfigError(f"sasl.jwks: {source} is not protected by TLS: use https, or a file")
    if "://" in source and url.scheme not in ("http", "https"):
        raise ConfigError(f"sasl.jwks: {source} is neither a file nor a URL with https")


def fetch_url(url: str, clock: Callable[[], float]) -> bytes:
    """Return the body. Bounded in size and time, without redirects. Blocks."""
    import http.client
    import ssl

    parts = urlsplit(url)
    target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    deadline_s = clock() + LOAD_TIMEOUT_S
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(
            parts.hostname or "", parts.port, timeout=LOAD_TIMEOUT_S, context=context
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=LOAD_TIMEOUT_S)
    try:
        connection.request("GET", target, headers={"Accept": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise KeyLoadError(f"{url} answers {response.status}")
        data = bytearray()
        while part := response.read1(64 * 1024):
            data += part
            if len(data) > SET_BYTES_MAX:
                raise KeyLoadError(f"{url} answers more than {SET_BYTES_MAX} bytes")
            if clock() > deadline_s:
                raise KeyLoadError(f"{url} takes longer than {LOAD_TIMEOUT_S:g} s")
        return bytes(data)
    except (OSError, http.client.HTTPException) as error:
        raise KeyLoadError(f"{url} cannot be read ({error})") from None
    finally:
        connection.close()


def _read(disk: Disk, path: str) -> bytes:
    try:
        if disk.exists(path) and disk.size(path) > SET_BYTES_MAX:
            raise KeyLoadError(f"{path} is larger than {SET_BYTES_MAX} bytes")
        data = read_file(disk, path)
    except OSError as error:
        raise KeyLoadError(f"{path} cannot be read ({error.strerror or error})") from None
    if data is None:
        raise KeyLoadError(f"{path} does not exist")
    return data


class KeySource:
    """The newest key set that could be loaded. Owned by the loop; loading runs in a thread, one load at a time."""

    def __init__(self, runtime: Runtime, source: str) -> None:
        check_source(source)
        self._runtime = runtime
        self._source = source
        self._is_url = "://" in source
        self._log = runtime.log.bind(component="node")
        self._digest = b""
        self._loading: asyncio.Task[None] | None = None
        self._refreshed_s = -REFRESH_S_MIN
        self._polling: asyncio.Task[None] | None = None
        self.keys = KeySet()
        """Replaced as a whole. Empty until the first load: then no token is valid."""

    async def start(self) -> None:
        """Load the keys, then watch for new ones. A file must be usable; a URL may answer later."""
        try:
            await self._load()
        except KeyLoadError as error:
            if not self._is_url:
                raise ConfigError(f"sasl.jwks: {error}") from None
            self._log.warning("jwks_not_loaded", reason=str(error))
        self._polling = self._runtime.loop.create_task(self._poll())

    def stop(self) -> None:
        for task in (self._polling, self._loading):
            if task is not None:
                task.cancel()

    async def refresh_for(self, key_id: str | None) -> None:
        """Load the keys again if this one is unknown and the last such refresh is long ago. Never raises."""
        if key_id is None or self.keys.has(key_id):
            return
        if self._loading is None:
            now_s = self._runtime.loop.time()
            if now_s < self._refreshed_s + REFRESH_S_MIN:
                return
            self._refreshed_s = now_s
            self._loading = self._runtime.loop.create_task(self._refresh())
        # Several clients wait for one load; one that goes away must not cancel it.
        await asyncio.shield(self._loading)

    async def _refresh(self) -> None:
        try:
            await self._load()
        except KeyLoadError as error:
            self._log.warning("jwks_not_loaded", reason=str(error))
        except Exception:
            self._log.exception("jwks_failed")
        finally:
            self._loading = None

    async def _poll(self) -> None:
        retry_s = RETRY_S_MIN
        while True:
            if len(self.keys) == 0 or retry_s > RETRY_S_MIN:
                await asyncio.sleep(retry_s)
            else:
                await asyncio.sleep(URL_POLL_S if self._is_url else FILE_POLL_S)
            try:
                await self._load()
                retry_s = RETRY_S_MIN
            except KeyLoadError as error:
                if retry_s == RETRY_S_MIN or self._is_url:
                    self._log.warning("jwks_not_loaded", reason=str(error))
                retry_s = min(RETRY_S_MAX, 2 * retry_s)
            except Exception:
                self._log.exception("jwks_failed")
                retry_s = min(RETRY_S_MAX, 2 * retry_s)

    async def _load(self) -> None:
        runtime, source = self._runtime, self._source
        clock, disk = runtime.loop.time, runtime.env.disk
        data = await runtime.run_blocking(lambda: fetch_url(source, clock) if self._is_url else _read(disk, source))
        digest = hashlib.sha256(data).digest()
        if digest == self._digest:
            return
        try:
            self.keys = await runtime.run_blocking(lambda: KeySet.parse(data))
        except KeySetError as error:
            raise KeyLoadError(f"{source} is not a usable key set: {error}") from None
        self._digest = digest
        self._log.info("jwks_loaded", source=source, keys=len(self.keys))
