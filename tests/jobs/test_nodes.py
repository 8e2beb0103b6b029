"""Nodes of their own: network namespaces with a link between them, and machines' names that do not resolve."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs import REPOSITORY, steps_taken
from tests.support.runs import write_run

pytestmark = [pytest.mark.jobs, pytest.mark.deep]
NODES = [f"cp-test-{os.getpid()}-{number}" for number in range(2)]


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Names of two network namespaces, 10.77.0.1 and 10.77.0.2."""
    one, other = NODES
    commands = [
        f"ip netns add {one}",
        f"ip netns add {other}",
        f"ip -n {one} link add eth0 type veth peer name eth0 netns {other}",
        *(f"ip -n {node} addr add 10.77.0.{number}/24 dev eth0" for number, node in enumerate(NODES, 1)),
        *(f"ip -n {node} link set {device} up" for node in NODES for device in ("lo", "eth0")),
        f"ip netns exec {one} unshare --uts --mount true",
    ]
    try:
        for command in commands:
            try:
                subprocess.run(command.split(), check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                pytest.skip("this user may make no network namespace")
        yield NODES
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "delete", node], check=False, capture_output=True)


def test_nodes_without_names_train_and_end_with_a_message_each_when_their_link_breaks(
    nodes: list[str], tmp_path: Path
) -> None:
    config = write_run(tmp_path)
    limits = "--job.timeout_seconds=20 --job.startup_timeout_seconds=60 --job.max_restarts=0"
    train = f"{sys.executable} -m torchtitan_cp.cli.train {config} --nproc 1 --nnodes 2 {limits}"
    steps = "'--curriculum.stages[0].steps=100000' --rdzv-endpoint 10.77.0.1:29400"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    logs = [tmp_path / node for node in nodes]
    jobs = [
        subprocess.Popen(
            ["ip", "netns", "exec", node, "unshare", "--uts", "sh", "-c", f"hostname {node}; exec {train} {steps}"],
            env=environment,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for node, log in zip(nodes, logs, strict=True)
    ]
    try:
        while steps_taken(tmp_path / "run") < 3:  # each job ends by itself
            assert not any(job.poll() for job in jobs), [log.read_text() for log in logs]
            time.sleep(0.1)
        subprocess.run(["ip", "-n", nodes[1], "link", "set", "eth0", "down"], check=True)
        assert [job.wait(180) for job in jobs] == [4, 4], [log.read_text() for log in logs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    for log in logs:
        said = log.read_text()
        assert re.search(r"no sign of life from rank [01] for \d+ s", said), said
        assert said.splitlines()[-1].startswith("error: "), said
