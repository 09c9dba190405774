"""Fuzzing: bytes that no sane client sends, to the real node code in one process under virtual time.

    samples       a valid request of every API and version, on the client listener and on the inter-node listener
    values        a request of any layout with odd values in its fields
    damage        ways to corrupt bytes: flips, absurd counts, wrong sizes, invalid batches with a valid checksum
    ways          the first byte of an input: the listener that it is for, and how it gets there
    secured       the client's side of TLS and SASL
    mutator       the next input: built from samples, odd values and damage, or from inputs that the engine kept
    responses     the oracle of one connection: responses are well-formed and match the requests
    fuzzed_node   the node in its simulated machine, with a healthy client; connections: bytes in, bytes out
    session       inputs in sequence on one node, a crash at the end, and invariants that hold throughout
    fuzzer        inputs on one node after another; findings: files with the inputs that broke a promise, for replay
    worker        coverage-guided: atheris (libFuzzer) chooses, keeps and mutates inputs that reach new code
    campaign      a worker in its own process: progress, the findings' files, figures
    coverage      which lines the kept inputs reach
    file_damage   ways to damage files; log_files, node_files: the permitted outcomes of opening a damaged folder

`python -m chronik.testing.fuzz --inputs 1000000 --seed 1` runs it, `--replay FILE` replays a finding.
"""


class BrokenPromise(Exception):
    """The node broke a promise."""
