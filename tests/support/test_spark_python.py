"""The forked Python processes of Spark end as those that are new interpreters do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.support.eventually import eventually
from tests.support.spark_python import processes_of

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'chronik[spark]'")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="they are forked on Linux only")


@pytest.fixture
def daemon(spark_python: None) -> Iterator[subprocess.Popen[bytes]]:
    command = [os.environ["PYSPARK_PYTHON"], "-m", "pyspark.daemon", "pyspark.worker"]
    environment = {**os.environ, "PYTHON_WORKER_FACTORY_SECRET": "s"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True) as started:
        assert started.stdout is not None
        assert len(started.stdout.read(4)) == 4  # its port: it is ready
        yield started
        started.kill()


def test_a_forked_daemon_exits_when_its_standard_input_ends(daemon: subprocess.Popen[bytes]) -> None:
    assert len(processes_of(daemon.pid, "pyspark.daemon")) == 2  # the one that the JVM knows, and the forked one
    assert daemon.stdin is not None
    daemon.stdin.close()
    daemon.wait(20)
    eventually(lambda: processes_of(daemon.pid) == [], 20, "the daemon has exited")


def test_a_forked_daemon_is_killed_with_the_process_that_the_jvm_knows(daemon: subprocess.Popen[bytes]) -> None:
    daemon.kill()
    eventually(lambda: processes_of(daemon.pid) == [], 20, "the daemon has exited")


def test_what_is_not_of_spark_runs_in_a_new_interpreter(spark_python: None) -> None:
    command = [os.environ["PYSPARK_PYTHON"], "-c", "import sys; sys.exit('pandas' in sys.modules or 7)"]
    assert subprocess.run(command).returncode == 7
