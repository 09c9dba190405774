"""ACLs in the metadata: commands, events, snapshots."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from chronik.authorization.acls import AclBinding, Operation, PatternType, Permission, ResourceType
from chronik.metadata.apply import apply
from chronik.metadata.commands import CreateAcls, DeleteAcls, decode_command, encode_command
from chronik.metadata.events import AclsCreated, AclsDeleted, events_between
from chronik.metadata.image import ClusterImage, decode_image, encode_image


def acl(name: str) -> AclBinding:
    return AclBinding(
        ResourceType.TOPIC, name, PatternType.LITERAL, "User:alice", "*", Operation.READ, Permission.ALLOW
    )


A, B, C = acl("a"), acl("b"), acl("c")


def test_acls_are_created_once_and_deleted_once() -> None:
    image, events = apply(ClusterImage(), CreateAcls((A, B, A)))
    assert image.acls == {A, B}
    assert events == [AclsCreated((A, B))]
    again, events = apply(image, CreateAcls((B, C)))
    assert again.acls == {A, B, C}
    assert events == [AclsCreated((C,))]
    less, events = apply(again, DeleteAcls((C, A, acl("never"))))
    assert less.acls == {B}
    assert events == [AclsDeleted((C, A))]


def test_a_command_without_an_effect_shares_the_acls_of_the_image_before() -> None:
    image, _ = apply(ClusterImage(), CreateAcls((A,)))
    for command in (CreateAcls((A,)), DeleteAcls((B,))):
        after, events = apply(image, command)
        assert after.acls is image.acls
        assert (after.version, events) == (image.version + 1, [])


def test_commands_survive_the_log() -> None:
    for command in (CreateAcls((A, B)), DeleteAcls((A,))):
        assert decode_command(encode_command(command)) == command


def test_a_snapshot_keeps_the_acls_and_an_older_one_has_none() -> None:
    image, _ = apply(ClusterImage(cluster_id="c"), CreateAcls((A, B)))
    assert decode_image(encode_image(image)) == image
    older = msgspec.msgpack.decode(encode_image(image))
    del older["acls"]
    assert decode_image(msgspec.msgpack.encode(older)) == replace(image, acls=frozenset())


def test_a_node_that_receives_a_snapshot_learns_of_the_acls_that_changed() -> None:
    before = ClusterImage(acls=frozenset({A, B}))
    after = ClusterImage(acls=frozenset({B, C}))
    assert events_between(before, after) == [AclsCreated((C,)), AclsDeleted((A,))]
    assert events_between(after, replace(after, version=9)) == []
