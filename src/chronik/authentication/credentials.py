"""The credentials of all users, and decoys for names that are no users.

A decoy looks like a credential: its salt depends on the name and a secret, so it is the same in every attempt and on
every node of the cluster. No password matches it. Its iterations and the length of its salt are those of most users, so
that they do not distinguish it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from chronik.authentication.sasl import SCRAM_SHA_256, SCRAM_SHA_512
from chronik.authentication.scram import HASHES, ITERATIONS_MIN, SALT_BYTES, ScramCredential, new_credential

UserCredentials: TypeAlias = Mapping[str, ScramCredential]
"""The credentials of one user, by mechanism."""

PASSWORD_MECHANISMS = (SCRAM_SHA_512, SCRAM_SHA_256)
"""Which credential a password is compared with, if the user has several."""

_MAC = hashlib.sha512
SALT_BYTES_MAX = _MAC().digest_size
FINGERPRINT_BYTES = 16


class Credentials:
    """Immutable. `stored` users are those of the metadata; they take precedence over `local` ones of the same name.

    A user of both is entirely the stored one: another mechanism must not accept a password that was replaced.
    """

    def __init__(
        self, secret: bytes, stored: Mapping[str, UserCredentials], local: Mapping[str, UserCredentials]
    ) -> None:
        self._secret = secret
        self._stored = stored
        self._local = local
        self._models = {mechanism: self._model(mechanism) for mechanism in HASHES}
        counts = Counter(next(each for each in PASSWORD_MECHANISMS if each in user) for user in self._users() if user)
        self._password_mechanism = max(PASSWORD_MECHANISMS, key=lambda mechanism: counts[mechanism])

    def _users(self) -> Iterable[UserCredentials]:
        yield from self._stored.values()
        yield from self._local.values()

    def _model(self, mechanism: str) -> tuple[int, int]:
        """Return the iterations and the length of the salt that most credentials have."""
        shapes = Counter(
            (user[mechanism].iterations, min(len(user[mechanism].salt), SALT_BYTES_MAX))
            for user in self._users()
            if mechanism in user
        )
        return shapes.most_common(1)[0][0] if shapes else (ITERATIONS_MIN, SALT_BYTES)

    def _of(self, name: str) -> UserCredentials:
        user = self._stored.get(name)
        return self._local.get(name, {}) if user is None else user

    def lookup(self, mechanism: str, name: str) -> tuple[ScramCredential, bool]:
        """Return the user's credential and True, or a decoy and False. Both take the same work."""
        decoy = self._decoy(mechanism, name)
        credential = self._of(name).get(mechanism)
        return (decoy, False) if credential is None else (credential, True)

    def lookup_for_password(self, name: str) -> tuple[str, ScramCredential, bool]:
        """Return the mechanism and the credential to compare a password with, and whether the user is known."""
        user = self._of(name)
        mechanism = next((each for each in PASSWORD_MECHANISMS if each in user), self._password_mechanism)
        return (mechanism, *self.lookup(mechanism, name))

    def fingerprint(self, name: str) -> bytes | None:
        """Return a value that changes with the user's credentials, the same on each node; None for an unknown name."""
        user = self._of(name)
        if not user:
            return None
        parts = (f"{mechanism}\0".encode() + each.salt + each.stored_key for mechanism, each in sorted(user.items()))
        return hmac.digest(self._secret, b"fingerprint\0" + b"".join(parts), _MAC)[:FINGERPRINT_BYTES]

    def _decoy(self, mechanism: str, name: str) -> ScramCredential:
        iterations, salt_bytes = self._models[mechanism]
        digest = HASHES[mechanism]
        stored_key, server_key = (
            hmac.digest(self._secret, f"{purpose}\0{mechanism}\0{name}".encode(), digest)
            for purpose in ("stored", "server")
        )
        return ScramCredential(
            derived_salt(self._secret, mechanism, name)[:salt_bytes], stored_key, server_key, iterations
        )


def derived_salt(secret: bytes, mechanism: str, name: str) -> bytes:
    """Return the salt of a name: as unpredictable as the secret, and the same on each node that has it."""
    return hmac.digest(secret, f"salt\0{mechanism}\0{name}".encode(), _MAC)


def local_user(secret: bytes, name: str, password: str) -> UserCredentials:
    """Derive the credentials of a user of the users file. It takes milliseconds: run it in a thread.

    The salts are derived from the secret, as those of decoys: random ones would change with each start and node, which
    would tell users from other names.
    """
    return {
        mechanism: new_credential(mechanism, password, derived_salt(secret, mechanism, name)[:SALT_BYTES])
        for mechanism in HASHES
    }
