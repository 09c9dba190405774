"""The simulator: the real node code on virtual time, with a network and disks that fail, all from one seed.

    world         one heap of events, the virtual clock, random streams, a hash over everything that happened
    loop          an asyncio loop for each process; threads: its executor; clock: its machine's clocks
    network       machines, links that are slow or cut, connections that break; transport: one end of a connection
    disk          page cache and durable part, lost and torn writes, full and slow; tree: files and folders
    host          a machine; it outlives the processes that run on it
    node          a `Broker` on a host; raft_store: its Raft store, on the simulated disk
    files         the files of a node that is down, in the hands of somebody else; wounds: whose may be hurt
    history       the oracle: what clients were told, and what may therefore never be told afterwards
    ownership     the oracle of groups: one owner for each partition; availability: of one sick device
    audit         the oracle behind the scenes: one leader for each term and epoch, replicas agree on what is committed
    client        what clients share; producer, consumer, member, outsider, observer, keyed, churn, mover, resizer
    workload      all clients of a run
    faults        when something breaks, and what; cluster_faults: between nodes; disk_faults: files and devices;
                  moments: when in the node's code
    scenario      puts these together and runs the phases: single_node, three_nodes, bad_disks, five_nodes
    runner        `run_seed`; campaign: many of them; tripwires: traps for the real clock, real chance, real threads

A crash is not a cancel: the process's loop is marked dead, its handles are dropped, and its corpses are kept until the
run is over, so that no `finally` of theirs can repair anything. Whatever a corpse touches raises `Crashed`.
"""

from chronik.testing.sim.runner import Report, run_seed

__all__ = ["Report", "run_seed"]
