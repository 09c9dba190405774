"""`chronik start`: one node in the foreground, or with --processes several (see `supervisor`).

Assembles the node, its HTTP server and the process around them: settings, allocator, event loop, log, signals. Logs are
JSON lines on standard error; one line on standard output reports that the node is ready. The first SIGTERM or SIGINT
stops the node cleanly; a second one ends it at once. A disk that does not answer cannot keep the process alive: threads
that hang on it are abandoned.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import errno
import gc
import logging
import os
import platform
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

from chronik.cli import unused_modules
from chronik.cli.errors import CANNOT, CliError, say
from chronik.cli.supervisor import PROCESS_FLAG, become_process, supervise

if TYPE_CHECKING:
    import socket

    from chronik.client.endpoint import Endpoint
    from chronik.node.broker import Broker
    from chronik.node.config import NodeConfig
    from chronik.node.environment import Environment

Adapt: TypeAlias = "Callable[[NodeConfig, Environment], Environment]"
"""Replaces parts of the node's environment, such as its disk."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
SETTINGS = {
    "listen": "listen.kafka",
    "advertise": "advertise.kafka",
    "http": "listen.http",
    "internal": "listen.internal",
    "insecure": "security.insecure",
}
"""The settings of the flags that are named differently."""
FAILED = 1
OTHERS_BITS = 0o077
THREAD_PREFIX = "chronik"
THREADS_LOOK_S = 0.01
THREADS_END_S, STUCK_THREADS_END_S = 20.0, 1.0
"""How long running jobs may take to finish after the node has stopped; the second limit is for a stuck disk."""


def main(arguments: list[str], adapt: Adapt | None = None) -> int:
    """Run a node until it receives a signal to stop."""
    exit_code = _main(arguments, adapt)
    if _threads():
        # These threads hang in the kernel. The interpreter would wait for them before it exits.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code


def _main(arguments: list[str], adapt: Adapt | None) -> int:
    flags = vars(_parser().parse_args(arguments))
    # The data folder has all records, and the metadata the users' SCRAM keys: no ACL protects them from a local user.
    os.umask(OTHERS_BITS)
    tune_process()
    with unused_modules("rich", "hypothesis"):
        from chronik.node.config import ConfigError, load
        from chronik.node.process_config import process_config
        from chronik.observe import build
        from chronik.observe.logging import LogLevelError, parse_levels
        from chronik.raft.store import StoreError
        from chronik.storage.folder import DataFolderError
    try:
        if edited := build.edited_sources():
            raise CliError(
                f"{edited[0]} was edited after it was compiled, so the edit has no effect: install again, or work in a "
                "checkout with pip install -e ."
            )
        path, levels = flags.pop("config"), parse_levels(flags.pop("log_level"))
        given = {SETTINGS.get(flag, flag): value for flag, value in flags.items()}
        number = given.pop("process")
        config = load(path, os.environ, {**given, "log_levels": levels or None})
        if number is not None:
            become_process(config, number)
            config = process_config(config, number, platform.node())
        elif config.processes > 1:
            for each in range(config.processes):
                process_config(config, each, platform.node())
            return supervise(config, arguments)
        with asyncio.Runner(loop_factory=partial(new_event_loop, config.loop)) as runner:
            return runner.run(run_node(config, adapt))
    except (ConfigError, DataFolderError, LogLevelError, StoreError, CliError) as error:
        say(str(error))
        return error.exit_code if isinstance(error, CliError) else CANNOT
    except Exception as error:
        say(f"the node failed: {error!r}: its log has the traceback; please report it")
        return FAILED


def tune_process() -> None:
    """Keep freed memory and shorten the wait for the interpreter lock.

    glibc returns the end of the heap to the system after each large buffer, and the next buffer faults it in again,
    which slowed a node down 2-3x. A thread that has finished a sync waits up to the switch interval (5 ms by default)
    for a busy event loop to yield.
    """
    sys.setswitchinterval(0.00005)
    with contextlib.suppress(OSError, AttributeError):  # not glibc: nothing to tune
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 32 * 1024 * 1024)
        libc.mallopt(M_TRIM_THRESHOLD, 64 * 1024 * 1024)


def settle_garbage_collector() -> None:
    """Exclude the objects that exist after startup from garbage collection, and collect less often.

    Requests create no reference cycles, so the collector finds almost nothing. With the default thresholds it doubled
    the cost of a small produce request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def new_event_loop(kind: str) -> asyncio.AbstractEventLoop:
    """Return a loop of the configured kind, whose clock includes suspended time if the system has such a clock (Linux).

    A node compares its lease, and the controller its brokers' sessions, with `loop.time()`. Event loops use
    CLOCK_MONOTONIC, which stops while a machine sleeps: a laptop or a virtual machine that wakes up after minutes would
    find its lease valid while another node leads. CLOCK_BOOTTIME does not stop, and costs the same to read.

    Timers still use the system's own clock, so a timer that was set before a suspension may fire late. No safety
    property depends on timers: the node compares its lease with the clock when it sends the answer. uvloop keeps its
    own clock for timers, set from differences of `time()`, so the same holds there.
    """
    make: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    base: Any = asyncio.SelectorEventLoop
    if kind == "uvloop":
        try:
            import uvloop
        except ImportError:
            raise CliError('uvloop is not installed: install it, or set loop = "asyncio"') from None
        make, base = uvloop.new_event_loop, uvloop.Loop
    if hasattr(time, "CLOCK_BOOTTIME"):
        # Avoid a Python function in between: the clock is read several times per request.
        clock = staticmethod(partial(time.clock_gettime, time.CLOCK_BOOTTIME))
        make = cast(Any, type(base.__name__, (base,), {"time": clock}))
    return make()


class LogLines:
    """Passes lines to `write`, which may accept only part of a line. A truncated line is ended before the next one.

    A closed reader or a full disk must not stop a node, so lines that cannot be written are dropped.
    """

    def __init__(self, write: Callable[[bytes], int]) -> None:
        self._write = write
        self._is_torn = False

    def __call__(self, line: str) -> None:
        data = line.encode(errors="backslashreplace")
        if self._is_torn:
            data = b"\n" + data
        try:
            while data:
                data = data[self._write(data) :]
            self._is_torn = False
        except (OSError, ValueError):
            # How much was written is not always known; an extra empty line does no harm.
            self._is_torn = True


async def run_node(config: NodeConfig, adapt: Adapt | None) -> int:
    """Start everything, wait for a signal, stop everything."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, stop)
    with unused_modules("rich", "hypothesis"):
        from chronik.node.broker import Broker
        from chronik.node.commit_log_thread import CommitLogThread
        from chronik.node.config import ConfigError
        from chronik.node.environment import Environment
        from chronik.node.membership.cluster_secret import SECRET_VARIABLE
        from chronik.node.runtime import Runtime
        from chronik.node.serving.limited_log import LimitedLog
        from chronik.node.serving.tls import NodeTls, TlsAcceptor
        from chronik.observe.logging import LibraryLog, make_logger
        from chronik.observe.metrics import Metrics
        from chronik.raft.store import StoreError
        from chronik.storage.disk import RealDisk, machine_boot_id
        from chronik.storage.folder import DataFolderError
        from chronik.web.app import create_app
        from chronik.web.node_view import NodeView
        from chronik.web.server import WebServer
        from chronik.web.users import SaslUsers

    log = make_logger(LogLines(partial(os.write, sys.stderr.fileno())), wall_ms, config.levels, node=config.node_id)
    logging.getLogger().addHandler(LibraryLog(log))
    http_socket = _bind_http(config)
    executor = ThreadPoolExecutor(config.executor_threads, thread_name_prefix=THREAD_PREFIX)
    commit_log_thread = CommitLogThread(asyncio.get_running_loop(), f"{THREAD_PREFIX}-commit-log")
    environment = Environment(
        RealDisk(),
        random.SystemRandom(),
        executor,
        wall_ms,
        boot_id=machine_boot_id(),
        commit_log_thread=commit_log_thread,
        cpu_s=time.thread_time,
        cluster_secret=os.environ.get(SECRET_VARIABLE, ""),
    )
    if adapt is not None:
        environment = adapt(config, environment)
    http = str(config.advertised_http(http_socket.getsockname()[1]))
    runtime = Runtime.make(config, environment, Metrics(), log)
    node = NodeView(runtime)
    tls = acceptor = None
    try:
        if config.uses_tls:
            tls = node.tls = await NodeTls.load(runtime)
            tls.start()
        if tls is not None and config.security.http_tls:
            http = f"https://{http}"
            refusals = LimitedLog(runtime, "connection_refused", "connections_refused")
            acceptor = TlsAcceptor(
                runtime,
                tls,
                lambda contexts: contexts.web,
                lambda client, reason: refusals(client=client, reason=reason),
            )
        web = WebServer(create_app(node), http_socket, acceptor)
        await web.start()  # before recovery, which may be slow: /healthz reports alive, /readyz not ready
        try:
            broker = await Broker.open(runtime, http=http, tls=tls)
            node.broker = broker
            sasl = broker.authentication
            node.users = SaslUsers(lambda: sasl.credentials, sasl.check_password)
            node.decisions = broker.authorization
            if not await _run_unless_stopped(stop, broker.start()):
                await web.stop()
                log.info("stopped", detail="before it was ready")
                return 0
        except BaseException as error:
            await web.stop()
            if isinstance(error, OSError):
                raise CliError(_startup_line(error, config)) from None
            if not isinstance(error, (ConfigError, DataFolderError, StoreError)):
                log.exception("start_failed")
            raise
        for warning in config.warnings():
            log.warning("exposed", detail=warning)
        settle_garbage_collector()
        _announce(config, broker, http_socket)
        await _run_unless_stopped(stop, broker.failed())
        failure = broker.failure
        log.info("stopping")
        try:
            await broker.stop()
        except Exception:
            log.exception("stop_failed")
            raise
        finally:
            await web.stop()
        log.info("stopped")
    finally:
        if acceptor is not None:
            acceptor.close()
        if tls is not None:
            await tls.stop()
        is_stuck = node.broker is not None and node.broker.disk_watch.is_stuck
        executor.shutdown(wait=False)
        commit_log_thread.close()
        await _end_threads(STUCK_THREADS_END_S if is_stuck else THREADS_END_S)
    if failure is not None:
        raise CliError(f"the node stopped because it cannot continue safely: {failure}", FAILED)
    return 0


async def _run_unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Run `work` until it ends. Return False if a stop signal came first and cancelled it."""
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        await working
        return True
    working.cancel()
    await asyncio.wait([working])
    return False


async def _end_threads(patience_s: float) -> None:
    """Let running jobs finish, for up to `patience_s`; a second signal ends this wait too."""
    for _ in range(int(patience_s / THREADS_LOOK_S)):
        if not _threads():
            return
        await asyncio.sleep(THREADS_LOOK_S)


def _threads() -> list[threading.Thread]:
    """Return the node's threads that are still alive."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)]


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def _announce(config: NodeConfig, broker: Broker, http_socket: socket.socket) -> None:
    """Print the line that people and scripts wait for."""
    kafka = config.advertised_kafka(broker.server.port)
    http = config.http_endpoint._replace(port=http_socket.getsockname()[1])
    with contextlib.suppress(OSError):
        scheme = "https" if config.security.http_tls else "http"
        print(f"chronik: node {config.node_id} is ready: kafka {kafka}, http {scheme}://{http}", flush=True)


def _bind_http(config: NodeConfig) -> socket.socket:
    from chronik.web.server import bind

    endpoint = config.http_endpoint
    try:
        return bind(*endpoint)
    except OSError as error:
        raise CliError(_port_line(error, endpoint, "--http")) from None


def _startup_line(error: OSError, config: NodeConfig) -> str:
    """Explain an OSError at startup to the person who started the node."""
    if error.filename is None or error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
        return _port_line(error, config.kafka_endpoint, "--listen")
    return (
        f"the data folder {config.data_folder} cannot be used: {error.strerror or error} ({error.filename}): "
        "make it writable, or pass --data-dir DIR"
    )


def _port_line(error: OSError, address: Endpoint, flag: str) -> str:
    host, port = address
    if error.errno == errno.EADDRINUSE:
        other = min(port + 100, 65_535)
        return f"port {port} is taken (by another node?): stop it, or pass {flag} {host}:{other}"
    if error.errno == errno.EACCES:
        return f"this user may not listen on port {port}: pass {flag} {host}:PORT with a port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{address} is not an address of this machine: pass {flag} HOST:PORT with one that is"
    return f"cannot listen on {address}: {error.strerror or error}: pass {flag} HOST:PORT"


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        say("stopped at once by a second signal: the next start recovers the logs")
        os._exit(FAILED)
    stop.set()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        say(f"{message}: see chronik start --help")
        sys.exit(CANNOT)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="chronik start",
        description="Run a node in the foreground. Flags override CHRONIK_* variables, which override the file.",
        allow_abbrev=False,
    )

    def add(name: str, metavar: str, text: str, **more: Any) -> None:
        parser.add_argument(name, metavar=metavar, help=text, **more)

    add("--config", "FILE", "settings in TOML (node.toml)")
    add("--node-id", "N", "this node's id in its cluster (default 1)", type=int)
    add("--data-dir", "DIR", "folder for logs and metadata (default chronik-data/node-N)")
    add("--listen", "HOST:PORT", "address for Kafka clients (default 127.0.0.1:9092)")
    add("--advertise", "HOST:PORT", "address that clients receive in metadata (default: that of --listen)")
    add("--http", "HOST:PORT", "address for health, metrics and the web page (default: Kafka's port minus 3000)")
    add("--internal", "HOST:PORT", "address for other nodes (default: Kafka's port minus 4000; loopback without peers)")
    add("--log-level", "[COMPONENT=]LEVEL", "debug, info, warning or error; repeatable", action="append", default=[])
    parser.add_argument(
        "--insecure", action="store_const", const=True, help="allow listeners beyond loopback without TLS or passwords"
    )
    add("--durability", "synced|replicated", "when a record is durable (default synced)")
    add("--loop", "asyncio|uvloop", "the event loop (default asyncio)")
    add("--processes", "N", "run N nodes of this machine: ids and ports from these on (default 1)", type=int)
    parser.add_argument(PROCESS_FLAG, type=int, help=argparse.SUPPRESS)  # of a node that the supervisor starts
    return parser
