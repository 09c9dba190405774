"""The secret that the nodes of a cluster share: its format, its location, and how it is created.

DATA_DIR/cluster-secret   text, mode 0600: one secret per line

A node proves the first secret of its file and accepts any of them, so that the secret can be rotated node by node.
"""

from __future__ import annotations

import base64
import hmac
from random import Random

from chronik.node.config import ConfigError, NodeConfig
from chronik.node.environment import Environment
from chronik.node.process_config import SECRET_NAME as SECRET_NAME
from chronik.storage.disk import Disk, NotPrivate, read_file, write_file_atomic

SECRET_VARIABLE = "CHRONIK_CLUSTER_SECRET"  # noqa: S105 - the name of a variable
RANDOM_BYTES = 32
CHARACTERS_MIN = 32
SECRETS_MAX = 4


class ClusterSecret:
    """The secrets that a node proves and accepts. Never printed: no representation contains the text."""

    __slots__ = ("accepted",)

    def __init__(self, text: str, source: str) -> None:
        """`source` is the file or variable that the text came from; the ConfigError for a bad secret names it."""
        words = text.split()
        if not 1 <= len(words) <= SECRETS_MAX or not all(map(_is_secret, words)):
            raise ConfigError(
                f"{source} holds no cluster secret, which is {CHARACTERS_MIN} or more ASCII characters without a space "
                f"(up to {SECRETS_MAX} secrets, each on a line of its own): copy it from a node of the cluster"
            )
        self.accepted = tuple(word.encode() for word in words)
        """The keys of which a connecting node must prove one."""

    def derived(self, purpose: bytes) -> tuple[bytes, ...]:
        """Return a key for another purpose from each accepted secret, the proven one first."""
        return tuple(hmac.digest(secret, b"chronik key for " + purpose, "sha256") for secret in self.accepted)

    @property
    def proven(self) -> bytes:
        """The key that this node proves to the nodes it connects to."""
        return self.accepted[0]


def load_secret(env: Environment, config: NodeConfig, folder: str) -> ClusterSecret:
    """Return this node's secret. A node without peers creates one if it has none. Raise ConfigError with the remedy.

    Blocks. The environment variable overrides `cluster_secret_file`, which overrides the data folder.
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
    """Read the secret from a file; None if there is no file. Raise ConfigError if unusable, OSError if unreadable."""
    try:
        data = read_file(disk, path, private=True)
    except NotPrivate:
        raise ConfigError(f"other users may read the cluster secret {path}: chmod 600 {path}") from None
    return None if data is None else ClusterSecret(data.decode(errors="replace"), path)


def make_secret(disk: Disk, path: str, random: Random) -> ClusterSecret:
    """Create a secret, durable in a file that only this user may read. `random` must be secure except in tests."""
    text = base64.urlsafe_b64encode(random.randbytes(RANDOM_BYTES)).decode().rstrip("=")
    write_file_atomic(disk, path, f"{text}\n".encode(), private=True)
    return ClusterSecret(text, path)
