"""Fuzzing: bytes that no sane client sends, to the real node code in one process under virtual time.

    samples       a valid request of every API and version, on the clients' listener and on the nodes' own
    values        a request of any layout with odd values in its fields
    damage        ways to spoil bytes: flips, absurd counts, lying sizes, batches that lie and are signed all the same
    mutator       the next input: made of samples, odd values and damage, or of what the engine has found
    connection    one connection without a network: bytes in, bytes out
    answers       the oracle of one connection: what came back is well-formed and belongs to what was sent
    fuzzed_node   the node in its simulated machine; a healthy client beside the bad ones
    session       inputs one after the other on one node, a crash at the end, and what must be true all along
    findings      a file with the inputs that broke a promise, which replays
    worker        coverage-guided: atheris (libFuzzer) chooses, keeps and mutates inputs that reach new code
    campaign      a worker in a process of its own: progress, the findings' files, figures
    coverage      which lines the kept inputs reach
    log_files     damaged files of a data folder, and what opening it may come to

`python -m chronik.testing.fuzz --inputs 1000000 --seed 1` runs it, `--replay FILE` shows a finding again.
"""
