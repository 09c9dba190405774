"""Consumer groups: members join and leave, partitions move, and every record is read once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from tests.clients.conftest import GetClient, NewName
from tests.clients.drivers.base import CLIENTS, CONSUMER_PROTOCOL, COOPERATIVE, Client, Member, Sent
from tests.clients.drivers.confluent import ConfluentAdmin, ConfluentMember
from tests.support.eventually import eventually

PARTITIONS = 4
SETTLE_TIMEOUT_S = 20.0


@pytest.fixture
def group(new_name: NewName) -> str:
    return new_name("group")


class Story:
    """A topic, a group on it, and a record of which member read what."""

    def __init__(self, bootstrap: str, topic: str, group: str, writer: Client) -> None:
        self.bootstrap = bootstrap
        self.topic = topic
        self.group = group
        self.members: list[Member] = []
        self.present: list[Member] = []
        self.written = 0
        self._writer = writer

    def joins(self, client: Client, assignor: str = "range") -> Member:
        member = client.join(self.bootstrap, self.topic, self.group, assignor=assignor)
        self.members.append(member)
        self.present.append(member)
        return member

    def leaves(self, member: Member) -> None:
        self.present.remove(member)
        member.leave()

    def writes(self, count: int) -> None:
        numbers = range(self.written, self.written + count)
        records = [Sent(b"%d" % number, partition=number % PARTITIONS) for number in numbers]
        self._writer.produce(self.bootstrap, self.topic, records)
        self.written += count

    def each_owns(self, *counts: int) -> None:
        """Wait until the present members own this many partitions each, and together every partition exactly once."""

        def settled() -> bool:
            owned = [member.partitions for member in self.present]
            assert sorted(len(partitions) for partitions in owned) == sorted(counts), owned
            assert frozenset().union(*owned) == frozenset(range(PARTITIONS)), owned
            return True

        eventually(settled, SETTLE_TIMEOUT_S, f"the members own {counts} partitions")

    def all_is_read(self) -> None:
        def read() -> bool:
            return sum(len(member.done) for member in self.members) >= self.written

        eventually(read, SETTLE_TIMEOUT_S, f"{self.written} records are read")

    def nothing_was_read_twice(self) -> None:
        read = Counter(record.value for member in self.members for record in member.done)
        assert read == Counter(b"%d" % number for number in range(self.written))


@pytest.fixture
def story(
    get_client: GetClient, bootstrap: str, topic: str, group: str, create_topic: Callable[[str, int], None]
) -> Iterator[Story]:
    create_topic(topic, PARTITIONS)
    story = Story(bootstrap, topic, group, get_client("confluent-kafka"))
    yield story
    for member in story.present:
        member.leave()


def members_come_and_go(story: Story, client: Client, assignor: str) -> None:
    """One member is alone, a second one joins, the first one leaves, the second one leaves, a new one resumes."""
    story.writes(40)
    first = story.joins(client, assignor)
    story.each_owns(4)
    story.all_is_read()
    second = story.joins(client, assignor)
    story.each_owns(2, 2)
    story.writes(40)
    story.all_is_read()
    story.leaves(first)
    story.each_owns(4)
    story.writes(40)
    story.all_is_read()
    story.leaves(second)

    # The group is empty; a new member resumes at the committed offsets.
    story.writes(20)
    newcomer = story.joins(client, assignor)
    story.all_is_read()
    assert len(newcomer.done) == 20
    story.nothing_was_read_twice()


@pytest.mark.parametrize("client", CLIENTS, indirect=True)
def test_members_join_leave_and_resume_without_losing_or_repeating_a_record(client: Client, story: Story) -> None:
    members_come_and_go(story, client, "range")


@pytest.mark.parametrize("client", COOPERATIVE, indirect=True)
def test_cooperative_members_join_leave_and_resume(client: Client, story: Story) -> None:
    members_come_and_go(story, client, "cooperative-sticky")


@pytest.mark.parametrize("client", CONSUMER_PROTOCOL, indirect=True)
def test_members_of_the_new_protocol_join_leave_and_resume(client: Client, story: Story) -> None:
    members_come_and_go(story, client, "server-uniform")


def test_members_of_different_clients_share_one_group(get_client: GetClient, story: Story) -> None:
    clients = [get_client(name) for name in ("java-4.3", "confluent-kafka", "kafka-python", "aiokafka")]
    members = [story.joins(client) for client in clients]
    story.each_owns(1, 1, 1, 1)
    story.writes(80)
    story.all_is_read()
    story.leaves(members[0])
    story.leaves(members[1])
    story.each_owns(2, 2)
    story.writes(40)
    story.all_is_read()
    story.nothing_was_read_twice()


def test_classic_and_new_members_share_a_group_that_changes_its_kind(get_client: GetClient, story: Story) -> None:
    confluent, java = get_client("confluent-kafka"), get_client("java-4.3")
    story.writes(40)
    story.joins(java, "cooperative-sticky")
    classic = story.joins(confluent, "cooperative-sticky")
    story.each_owns(2, 2)
    new = [story.joins(client, "server-uniform") for client in (confluent, java)]
    story.each_owns(1, 1, 1, 1)
    story.writes(40)
    story.all_is_read()
    story.leaves(classic)
    for member in new:
        story.leaves(member)
    story.each_owns(4)
    story.writes(40)
    story.all_is_read()
    story.nothing_was_read_twice()


def test_eager_members_share_a_group_with_a_member_of_the_new_protocol(get_client: GetClient, story: Story) -> None:
    """kafka-python and aiokafka know only the classic protocol, and revoke everything before they join again."""
    members = [story.joins(get_client(name)) for name in ("kafka-python", "aiokafka")]
    story.each_owns(2, 2)
    story.joins(get_client("confluent-kafka"), "server-uniform")
    story.each_owns(1, 1, 2)
    story.writes(40)
    story.all_is_read()
    story.leaves(members[0])
    story.each_owns(2, 2)
    story.writes(40)
    story.all_is_read()
    story.nothing_was_read_twice()


def test_a_member_of_the_new_protocol_subscribes_by_expression(
    story: Story, create_topic: Callable[[str, int], None], new_name: NewName
) -> None:
    prefix = new_name("logs")
    create_topic(f"{prefix}-a", 1)
    member = ConfluentMember(story.bootstrap, f"^{prefix}-.*", story.group, "server-uniform")
    story.present.append(member)
    member.start()
    eventually(lambda: member.topics == {f"{prefix}-a"}, SETTLE_TIMEOUT_S, "the member owns the topic that matches")
    create_topic(f"{prefix}-b", 1)
    both = {f"{prefix}-a", f"{prefix}-b"}
    eventually(lambda: member.topics == both, SETTLE_TIMEOUT_S, "the member owns the new topic too")
    with closing(ConfluentAdmin(story.bootstrap)) as admin:
        admin.delete_topic(f"{prefix}-a")
    eventually(lambda: member.topics == {f"{prefix}-b"}, SETTLE_TIMEOUT_S, "the member gives up the deleted topic")
    create_topic(f"{prefix}-a", 1)
    eventually(lambda: member.topics == both, SETTLE_TIMEOUT_S, "the member owns another topic of the same name")


@pytest.mark.parametrize("assignor", ["range", "server-uniform"])
def test_static_member_rejoins_without_a_rebalance(story: Story, get_client: GetClient, assignor: str) -> None:
    def joins(instance_id: str) -> ConfluentMember:
        member = ConfluentMember(story.bootstrap, story.topic, story.group, assignor, instance_id)
        story.members.append(member)
        story.present.append(member)
        member.start()
        return member

    stays = joins("stays")
    leaves = joins("comes-back")
    story.each_owns(2, 2)
    before = stays.assignments
    owned = leaves.partitions
    story.leaves(leaves)
    back = joins("comes-back")
    story.each_owns(2, 2)
    assert back.partitions == owned
    assert stays.assignments == before
    story.writes(20)
    story.all_is_read()
    story.nothing_was_read_twice()
