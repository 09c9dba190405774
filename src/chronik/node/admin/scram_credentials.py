"""SCRAM credentials as Kafka's APIs name and check them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from chronik.authentication.sasl import SCRAM_SHA_256, SCRAM_SHA_512
from chronik.authentication.scram import HASHES, ITERATIONS_MAX, ITERATIONS_MIN, credential_of_salted
from chronik.metadata.commands import AlterScramCredentials, ScramKey, ScramUpsert
from chronik.metadata.image import ClusterImage
from chronik.wire.errors import ErrorCode, KafkaError

MECHANISMS = {1: SCRAM_SHA_256, 2: SCRAM_SHA_512}
"""The numbers of Kafka's protocol."""
NUMBERS = {mechanism: number for number, mechanism in MECHANISMS.items()}

USER_CHARACTERS_MAX = 1024
SALT_BYTES_MAX = 1024


class ScramAlterations:
    """The alterations of one request, and for each user the error that refused all of its alterations, or None."""

    def __init__(self, image: ClusterImage, deletions: Iterable[Any], upsertions: Iterable[Any]) -> None:
        self.outcomes: dict[str, KafkaError | None] = {}
        self._altered: set[tuple[str, int]] = set()
        self._deletions: list[ScramKey] = []
        self._upserts: list[ScramUpsert] = []
        for deletion in deletions:
            self._carry_out(deletion, lambda entry: self._delete(image, entry))
        for upsertion in upsertions:
            self._carry_out(upsertion, self._upsert)

    @property
    def command(self) -> AlterScramCredentials | None:
        deletions = tuple(each for each in self._deletions if self.outcomes[each.user] is None)
        upserts = tuple(each for each in self._upserts if self.outcomes[each.user] is None)
        return AlterScramCredentials(deletions, upserts) if deletions or upserts else None

    def _carry_out(self, entry: Any, alter: Any) -> None:
        if self.outcomes.setdefault(entry.name, None) is not None:
            return
        try:
            _check(entry)
            key = (entry.name, int(entry.mechanism))
            if key in self._altered:
                raise KafkaError(
                    ErrorCode.duplicate_resource, "A user credential cannot be altered twice in the same request"
                )
            self._altered.add(key)
            alter(entry)
        except KafkaError as error:
            self.outcomes[entry.name] = error

    def _delete(self, image: ClusterImage, entry: Any) -> None:
        key = ScramKey(entry.name, MECHANISMS[entry.mechanism])
        if key.mechanism not in image.scram.get(key.user, {}):
            raise KafkaError(ErrorCode.resource_not_found, "Attempt to delete a user credential that does not exist")
        self._deletions.append(key)

    def _upsert(self, entry: Any) -> None:
        mechanism = MECHANISMS[entry.mechanism]
        if entry.iterations < ITERATIONS_MIN:
            raise _unacceptable("Too few iterations")
        if entry.iterations > ITERATIONS_MAX:
            raise _unacceptable("Too many iterations")
        if not 0 < len(entry.salt) <= SALT_BYTES_MAX:
            raise _unacceptable(f"The salt must have 1 to {SALT_BYTES_MAX} bytes")
        if len(entry.salted_password) != hashlib.new(HASHES[mechanism]).digest_size:
            raise _unacceptable(f"The salted password is not a hash of {mechanism}")
        credential = credential_of_salted(mechanism, entry.salted_password, entry.salt, entry.iterations)
        self._upserts.append(ScramUpsert(entry.name, mechanism, credential))


def _check(entry: Any) -> None:
    if not entry.name:
        raise _unacceptable("Username must not be empty")
    if len(entry.name) > USER_CHARACTERS_MAX or "\0" in entry.name:
        raise _unacceptable(f"Username must have at most {USER_CHARACTERS_MAX} characters, and no NUL")
    if entry.mechanism not in MECHANISMS:
        raise KafkaError(ErrorCode.unsupported_sasl_mechanism, "Unknown SCRAM mechanism")


def _unacceptable(reason: str) -> KafkaError:
    return KafkaError(ErrorCode.unacceptable_credential, reason)
