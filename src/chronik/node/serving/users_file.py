"""The users file: users that exist on this node without the cluster's metadata.

    # comment
    NAME:PASSWORD          one user on each line; the password is everything after the first colon

Passwords are hashed when the file is read, and not kept.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping

from chronik.authentication.credentials import UserCredentials, local_user
from chronik.node.config import ConfigError
from chronik.node.runtime import Runtime
from chronik.storage.disk import Disk, NotPrivate, read_file

POLL_S = 5.0
FILE_BYTES_MAX = 1024 * 1024
USERS_MAX = 1_000
"""More users belong into the metadata: each start of a node hashes the passwords of this file."""


def parse_users(text: str, path: str) -> dict[str, str]:
    """Return the password of each user. Raise ConfigError, which names the line but not its content."""
    users: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, password = line.partition(":")
        name = name.strip()
        if not colon or not name or not password or "\0" in line:
            raise ConfigError(f"{path}, line {number} is not NAME:PASSWORD")
        if name in users:
            raise ConfigError(f"{path}, line {number} repeats a user")
        users[name] = password
    if len(users) > USERS_MAX:
        raise ConfigError(
            f"{path} has {len(users)} users; at most {USERS_MAX}: create others with `chronik user create`"
        )
    return users


def read_users(disk: Disk, path: str) -> bytes:
    """Return the file's content. Raise ConfigError if it is missing, too large, or readable by others. Blocks."""
    try:
        if disk.exists(path) and disk.size(path) > FILE_BYTES_MAX:
            raise ConfigError(f"the users file {path} is larger than {FILE_BYTES_MAX} bytes")
        data = read_file(disk, path, private=True)
    except NotPrivate:
        raise ConfigError(f"other users may read the users file {path}: chmod 600 {path}") from None
    except OSError as error:
        raise ConfigError(f"the users file {path} cannot be read ({error.strerror or error})") from None
    if data is None:
        raise ConfigError(f"the users file {path} does not exist: create it with lines NAME:PASSWORD, mode 0600")
    return data


class UsersFile:
    """The users of the file as it was when it was last valid. A changed file is loaded within POLL_S or so.

    Owned by the loop; reading and hashing run in threads.
    """

    def __init__(self, runtime: Runtime, path: str, secret: bytes) -> None:
        self._runtime = runtime
        self._path = path
        self._secret = secret
        self._log = runtime.log.bind(component="node")
        self._digest = b""
        self._fault = ""
        self._polling: asyncio.Task[None] | None = None
        self.users: Mapping[str, UserCredentials] = {}
        """Replaced as a whole when the file changes."""

    async def start(self) -> None:
        """Load the file; raise ConfigError if it cannot be used. Then watch it."""
        await self._load()
        self._polling = self._runtime.loop.create_task(self._poll())

    def stop(self) -> None:
        if self._polling is not None:
            self._polling.cancel()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._load()
                self._fault = ""
            except ConfigError as error:
                # The node continues with the users that it has. Logged once, not at each poll.
                if str(error) != self._fault:
                    self._fault = str(error)
                    self._log.error("users_file_refused", reason=self._fault)
            except Exception as error:
                self._log.error("users_file_failed", error=type(error).__name__)

    async def _load(self) -> None:
        run_blocking, path, secret = self._runtime.run_blocking, self._path, self._secret
        data = await run_blocking(lambda: read_users(self._runtime.env.disk, path))
        # Compared by content: a time of modification may repeat.
        digest = hashlib.sha256(data).digest()
        if digest == self._digest:
            return
        try:
            passwords = parse_users(data.decode(), path)
        except UnicodeDecodeError:
            raise ConfigError(f"the users file {path} is not UTF-8") from None
        users: dict[str, UserCredentials] = {}
        for name, password in passwords.items():
            # One thread's job for each user: other jobs need not wait for all of them.
            users[name] = await run_blocking(lambda name=name, password=password: local_user(secret, name, password))  # type: ignore[misc]
        self.users = users
        self._digest = digest
        self._log.info("users_file_loaded", path=path, users=len(users))
