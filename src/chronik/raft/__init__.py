"""Agreement on one log: Raft, as a pure state machine.

Events go in with their time, a `Ready` comes out; `chronik.node` sends, writes and applies what it says. There is no
socket, file, clock or randomness in here that was not handed in. `node.RaftNode` is what others use, `ready` says what
to do with what it returns, `entries.StoredState` is what it starts from. Inside, `state` is what every role shares;
`follower`, `candidate` and `leader` are the roles; `votes`, `replication`, `rounds` (heartbeats, the lease, reads),
`progress`, `log` and `membership` are their parts; `messages` are what goes over the wire.

Beyond the paper's figure 2: pre-vote, check-quorum, a lease, reads by read-index, leadership transfer, snapshots in
chunks, and membership changes by one voter at a time with learners, a change being in force once appended. A leader
changes the membership only after it has committed an entry of its term.

A store that was lost
---------------------
A vote binds because it is remembered. A node that lost its disk and came back under the same id could vote twice in one
term, and could help to elect a leader that lacks what the lost disk had acknowledged. Therefore **a member is a node id
together with a store id**, drawn at random when the store is made and kept in it beside term and vote:

- Each message names the stores that it comes from and goes to. A message for another store is not read; a vote or an
  acknowledgement counts only if it comes from the store that the membership names.
- A node with an empty store belongs to nothing. It says `Hello` to the nodes it was configured with, time and again;
  they pass that on to the leader, whose `suggested_change` is then to make it a learner under its new store, which
  takes the old store's vote away in the same step, and to promote it when it has caught up. Until then a majority of
  the remaining stores is needed, as if the node were still down.
- A `Hello` under the id of a member that is alive with its own store is refused and reported: one id was given twice.

The founders' stores are not known beforehand, so a cluster is founded like this: the founder with the lowest id waits
until every other founder has told *its* store that theirs is empty too. It then writes the first entry, the membership
with all their stores, in term 1, in which nobody leads, and stands for election. All founders must be up for that,
once. A founder that lost its disk later gets no such answers, since the others are not empty, and joins as anyone does.
An empty node that has met a peer's new store ignores what the peer's lost store may still have on its way.

The lease
---------
A node that has heard a leader refuses its vote, and pre-vote, for an election timeout; so does a node for an election
timeout after its start, since it may have heard one before. Once a majority has answered a round of heartbeats, nobody
else can be elected for that long from the round's *beginning*. `leader_lease_until_ms` is that time, shortened by what
two clocks may drift apart. A leader that has told another to take over has no lease for the rest of its term.
"""
