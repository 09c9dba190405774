"""Python for the JVMs of Spark, forked from a server that has imported what sources, workers and sinks import.

Each session starts about eight Python processes, and each stream another one. As new interpreters, each imports for
0.5 to 1 s of CPU: two thirds of the CPU that a test with Spark takes. They run the same modules of pyspark here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.fork_server import COMMAND_LINE_BYTES_MAX, REQUEST_BYTES_MAX, ROOT, become, end_with

ALREADY_IMPORTED = (
    "pandas",
    "pyarrow.compute",
    "pyarrow.parquet",
    "pyspark.worker",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "chronik.pipeline.audit.job",
    "chronik.pipeline.land.state_task",
    "chronik.pipeline.sink.spark_sink",
    "chronik.pipeline.source.numba_chunk",
)
SESSION = "session="
"""The last argument that such a process shows: it is in a session of its own, not in that of its driver."""
INTERRUPT = "interrupt"
END_TIMEOUT_S = 10.0

# What the JVM starts, and kills: it asks the server for the process, waits for its end, and ends when it ends.
EXECUTABLE = """\
#!{python} -IS
import json, os, resource, signal, socket, sys
if sys.argv[1:2] != ["-m"] or not sys.argv[2].startswith("pyspark."):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
request = {{
    "arguments": [*sys.argv[2:], "{session}%d" % os.getsid(0)],
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "files_max": resource.getrlimit(resource.RLIMIT_NOFILE),
    "new_session": False,
}}
if sys.argv[2] == "pyspark.daemon" and os.getpgid(0) != os.getpid():
    os.setpgid(0, 0)  # as the daemon does: Ctrl-C in the terminal of the driver is not for it
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    signal.signal(signal.SIGINT, lambda *_: server.send(b"{interrupt}"))
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, {bytes_max})
    server.connect({address!r})
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    for stream in (0, 1, 2):
        os.close(stream)
    os._exit(int(server.recv(16) or 1))
"""


@contextmanager
def forked_python(folder: Path) -> Iterator[Path]:
    """Run the server, and yield the executable to use as PYSPARK_PYTHON."""
    address = str(folder / "s")
    executable = folder / "python"
    names = {"session": SESSION, "interrupt": INTERRUPT, "bytes_max": REQUEST_BYTES_MAX}
    text = EXECUTABLE.format(python=sys.executable, address=address, **names)
    executable.write_text(text)
    executable.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        command = [sys.executable, "-m", __name__, str(listener.fileno()), "-" * COMMAND_LINE_BYTES_MAX]
        # Spark sets PYTHONHASHSEED for its workers, too; other threads would not exist in a forked process.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        yield executable
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(END_TIMEOUT_S)


def processes_of(session: int, text: str = "") -> list[int]:
    """Return the running processes of a driver that leads this session whose command lines contain `text`."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid=,sess=,stat=,args="], capture_output=True, text=True).stdout
    found = [line.rstrip().split(None, 3) for line in listed.splitlines()]
    return [
        int(pid)
        for pid, leader, state, command in found
        if (int(leader) == session or command.endswith(f" {SESSION}{session}"))
        and not state.startswith("Z")
        and text in command
    ]


def _serve() -> list[str]:
    """Fork a process for each request. Return only in those processes, with their arguments."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy all pages
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        server = os.getpid()
        while True:
            ready, _, _ = select.select([0, listener.fileno()], [], [])
            if 0 in ready:
                os._exit(0)
            connection, _ = listener.accept()
            if os.fork() == 0:
                end_with(server)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                break
            connection.close()
    os.setsid()
    message, streams, _, _ = socket.recv_fds(connection, REQUEST_BYTES_MAX, 3)
    waiter = os.getpid()
    started = os.fork()
    if started:
        for stream in (0, *streams):
            os.close(stream)
        os._exit(_wait(started, connection))
    connection.close()
    end_with(waiter)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    return become(json.loads(message))


def _wait(started: int, connection: socket.socket) -> int:
    """Wait for the end of the process and send its exit code; interrupt or kill it as the JVM's own process is."""
    ended = os.pidfd_open(started)
    while ended not in select.select([ended, connection.fileno()], [], [])[0]:
        with contextlib.suppress(ProcessLookupError):
            if connection.recv(len(INTERRUPT)):
                os.kill(started, signal.SIGINT)
                continue
            # A daemon leads a group with its workers.
            (os.killpg if os.getpgid(started) == started else os.kill)(started, signal.SIGKILL)
            break
    code = os.waitstatus_to_exitcode(os.waitpid(started, 0)[1]) & 0xFF
    with contextlib.suppress(OSError):
        connection.send(b"%d" % code)
    return 0


def _warm() -> None:
    for name in ALREADY_IMPORTED:
        importlib.import_module(name)
    from chronik.pipeline.source.decoder import ArrowDecoder
    from chronik.pipeline.source.ranges import RecordRange
    from chronik.wire.batch import encode_batch

    decoder = ArrowDecoder(RecordRange("t", 0, 0, 1), with_headers=False, rows_max=1)
    list(decoder.feed(memoryview(encode_batch([(b"k", b"v", (), 0)])), ()))  # loads the compiled functions


def main() -> None:
    _warm()
    name, *arguments, _ = _serve()
    sys.argv[1:] = arguments
    path = os.environ.get("PYTHONPATH", "")
    sys.path[:0] = [entry for entry in path.split(os.pathsep) if entry]
    sys.modules.pop(name, None)
    code = 0
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)  # freeing everything that is imported takes long


if __name__ == "__main__":
    main()
