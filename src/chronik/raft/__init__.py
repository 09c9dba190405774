"""Consensus on one log: Raft, as a pure state machine.

Events go in with their time, a `Ready` comes out; `chronik.node` sends, writes and applies what it contains. The caller
provides every socket, file, clock and source of randomness. `node.RaftNode` is the public interface, `ready` describes
how to process its output, and `store.StoredState` is its initial state. Inside, `state` is shared by all roles;
`follower`, `candidate` and `leader` are the roles; `progress`, `log`, `membership` and `joining` are their parts;
`messages` defines the wire messages.

Beyond figure 2 of the paper: pre-vote, check-quorum, a lease, leadership transfer, snapshots in
chunks, and membership changes of one voter at a time with learners. A change takes effect once it is appended. A leader
changes the membership only after it has committed an entry of its term.

Lost stores
-----------
A vote binds only because it is durable. A node that lost its disk and returned under the same id could vote twice in
one term, and could help to elect a leader that lacks entries the lost disk had acknowledged. Therefore **a member is a
node id together with a store id**. The store id is random, created with the store and kept in it next to term and vote:

- Each message names its source and target stores. A node ignores a message for another store. A vote or an
  acknowledgement is valid only if it comes from the store that the membership names.
- A node with an empty store belongs to no cluster. It periodically sends `Hello` to the nodes in its configuration;
  they forward it to the leader. The leader's `suggested_change` is then to make the node a learner under its new store,
  which removes the old store's vote in the same step, and to promote it once it has caught up. Until then a majority of
  the remaining stores is needed, as if the node were still down.
- A `Hello` under the id of a live member with its own store is refused and reported: two nodes have the same id.

The founders' stores are not known in advance, so a cluster is founded like this: the founder with the lowest id waits
until every other founder has replied to *its* store that theirs is empty too. It then writes the first entry, the
membership with all their stores, in term 1, which has no leader, and starts an election. All founders must be up for
this, once. A founder that loses its disk later gets no such replies, since the other stores are not empty, and joins
like any node. An empty node that has seen a peer's new store ignores delayed messages of the peer's lost store.

The lease
---------
A node that has heard from a leader refuses votes and pre-votes for an election timeout. So does a node for an election
timeout after its start, since it may have heard from one before. Once a majority has answered a heartbeat round, no
other node can be elected for an election timeout from the round's *start*. `leader_lease_until_ms` is the end of that
time, less the possible clock drift. A leader that has sent `TimeoutNow` has no lease for the rest of its term.
"""
