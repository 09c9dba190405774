"""The simulator: the real node code on virtual time, with a network and disks that fail, all from one seed.

    world               one heap of events, the virtual clock, random streams, a hash over all events
    loop                an asyncio loop for each process; threads: its executor; steps: jobs that interleave
    host                a machine with its clocks; it outlives the processes that run on it
    network             links that are slow or cut, connections that break; transport: one end of a connection
    disk                page cache and durable part, lost and torn writes, full and slow; tree: files and folders
    node                a `Broker` on a host; raft_store: its Raft store, on the simulated disk
    node_files          damages the files of a node that is down; damage: which node's files may be damaged
    history             the oracle for clients: checks each response against all earlier ones; one owner for each
                        partition of a group; acknowledgements while a device is sick
    transaction_history what clients of transactions did and saw, for `chronik.testing.history`
    audit               the oracle for node state: one leader for each term and epoch, replicas agree
    client              the base of all clients, and the requests that they share;
                        producer, consumer, group_clients, topic_clients, operators;
                        transactional_session: a transactional producer's requests; transactional_clients: applications,
                        zombies, stream members, readers; transactional_table: a compacted topic
    workload            all clients of a run
    faults              which faults occur, when and at which crash points (syncs, renames, arriving segments, code of
                        the node); cluster_faults: between nodes; disk_faults: files and devices
    scenario            builds all of these and runs the phases; cluster_scenarios: three nodes, bad disks, five nodes;
                        transaction_scenario
    runner              `run_seed`; campaign: many seeds; tripwires: traps for the real clock, randomness and threads

A crash is not a cancel: the process's loop is marked dead and its handles are dropped. Its tasks and its jobs in steps
are kept until the run is over, so that none of their `finally` blocks can repair anything. Anything that a dead task
touches raises `Crashed`.
"""

from chronik.testing.sim.runner import Report, run_seed

__all__ = ["Report", "run_seed"]
