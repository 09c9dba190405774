"""The secret that the nodes of a cluster share: its form, where it is kept, and who makes it.

DATA_DIR/cluster-secret   text, mode 0600: one secret per line

A node proves the first secret of its file and accepts each of them, so that nodes can change to another one by one.
"""

from __future__ import annotations

import base64
from random import Random

from chronik.node.config import ConfigError, NodeConfig
from chronik.node.environment import Environment
from chronik.storage.disk import Disk, NotPrivate, read_file, write_file_atomic

SECRET_NAME = "cluster-secret"
SECRET_VARIABLE = "CHRONIK_CLUSTER_SECRET"
RANDOM_BYTES = 32
CHARACTERS_MIN = 32
SECRETS_MAX = 4


class ClusterSecret:
    """What a node proves and what it accepts. Never printed: its text appears in no representation of it."""

    __slots__ = ("_keys",)

    def __init__(self, text: str, source: str) -> None:
        """`source` is the file or variable that the text came from, for the ConfigError about a bad one."""
        words = text.split()
        if not 1 <= len(words) <= SECRETS_MAX or not all(map(_is_secret, words)):
            raise ConfigError(
                f"{source} holds no cluster secret, which is {CHARACTERS_MIN} or more ASCII characters without a space "
                f"(up to {SECRETS_MAX} secrets, each on a line of its own): copy it from a node of the cluster"
            )
        self._keys = tuple(word.encode() for word in words)

    @property
    def proven(self) -> bytes:
        """The key that this node proves to the nodes that it calls."""
        return self._keys[0]

    @property
    def accepted(self) -> tuple[bytes, ...]:
        """The keys of which a caller must prove one."""
        return self._keys


def load_secret(env: Environment, config: NodeConfig, folder: str) -> ClusterSecret:
    """The secret of this node. A node without peers makes its own if it has none. ConfigError says what to do.

    Blocks. The environment variable wins over `cluster_secret_file`, which wins over the data folder.
    """
    if env.cluster_secret:
        return ClusterSecret(env.cluster_secret, SECRET_VARIABLE)
    path = config.cluster_secret_file or f"{folder}/{SECRET_NAME}"
    try:
        secret = read_secret(env.disk, path)
        if secret is not None:
            return secret
        if config.cluster_secret_file is None and not config.peers:
            return make_secret(env.disk, path, env.random)
    except OSError as error:
        raise ConfigError(
            f"the cluster secret {path} cannot be used ({error.strerror or error}): "
            f"let this user read it and write beside it, or set {SECRET_VARIABLE}"
        ) from None
    raise ConfigError(
        f"node {config.node_id} has no cluster secret, which nodes prove to each other, and {path} does not exist: "
        f"copy {SECRET_NAME} from the data folder of a node of the cluster to there, or set {SECRET_VARIABLE} "
        "(a new cluster: see docs/operations.md)"
    )


def _is_secret(word: str) -> bool:
    return len(word) >= CHARACTERS_MIN and word.isascii() and word.isprintable()


def read_secret(disk: Disk, path: str) -> ClusterSecret | None:
    """The secret in a file; None where there is none. ConfigError where it is unusable, OSError where unreadable."""
    try:
        data = read_file(disk, path, private=True)
    except NotPrivate:
        raise ConfigError(f"other users may read the cluster secret {path}: chmod 600 {path}") from None
    return None if data is None else ClusterSecret(data.decode(errors="replace"), path)


def make_secret(disk: Disk, path: str, random: Random) -> ClusterSecret:
    """A new secret, durable in a file that only this user may read. `random` must be cryptographic, but in tests."""
    text = base64.urlsafe_b64encode(random.randbytes(RANDOM_BYTES)).decode().rstrip("=")
    write_file_atomic(disk, path, f"{text}\n".encode(), private=True)
    return ClusterSecret(text, path)
