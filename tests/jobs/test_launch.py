"""The files of launch/: what can be known of them without Docker, a cluster or a cloud."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.jobs import PATIENCE_SECONDS, REPOSITORY, steps_taken
from tests.support.runs import write_run
from torchtitan_cp.cli.train import main as train_command

pytestmark = pytest.mark.jobs

LAUNCH = REPOSITORY / "launch"
# Stands for run_train.sh: prints what it is given.
SHOW = '#!/bin/sh\necho "$NNODES $RDZV_ENDPOINT $CONFIG_FILE $@"\n'


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


# Kubernetes --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kubernetes() -> tuple[dict[str, Any], dict[str, Any]]:
    """Service and Job."""
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    return service, job


def test_pods_find_the_first_one_by_name_before_they_are_ready(
    kubernetes: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    service, job = kubernetes
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"job-name": name},  # Kubernetes gives each pod of a Job this label
    }
    assert job["spec"]["completionMode"] == "Indexed", "so the first pod is named NAME-0"
    [container] = pod["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    host, _, port = environment["RDZV_ENDPOINT"].partition(":")
    assert host == f"{name}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert int(port) > 1024
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(environment["NNODES"])
    assert environment.keys() == {"CONFIG_FILE", "NNODES", "RDZV_ENDPOINT"}


def test_pods_are_started_again_except_where_it_would_happen_again(
    kubernetes: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    """A failure policy needs restartPolicy Never, and takes the first rule that fits. Source: the API of batch/v1."""
    _, job = kubernetes
    pod, rules = job["spec"]["template"]["spec"], job["spec"]["podFailurePolicy"]["rules"]
    [container] = pod["containers"]
    assert pod["restartPolicy"] == "Never"
    assert all(("onExitCodes" in rule) != ("onPodConditions" in rule) for rule in rules)
    by_code = {
        code: rule["action"]
        for rule in reversed(rules)
        if "onExitCodes" in rule
        for code in rule["onExitCodes"]["values"]
    }
    assert all(rule["onExitCodes"]["containerName"] == container["name"] for rule in rules if "onExitCodes" in rule)
    [stopped] = re.findall(r"--stopped-exit-code=(\d+)", " ".join(container["args"]))
    assert by_code == {2: "FailJob", 3: "FailJob", 5: "FailJob", int(stopped): "Ignore"}
    assert rules[-1] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert pod["terminationGracePeriodSeconds"] >= 300, "as for Slurm"


def test_what_a_pod_mounts_is_declared(kubernetes: tuple[dict[str, Any], dict[str, Any]]) -> None:
    pod = kubernetes[1]["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()
    assert set(mounts.values()) == {"/data", "/dev/shm"}


@pytest.mark.deep
def test_a_signal_to_one_pod_ends_all_with_the_code_that_starts_them_again_and_a_finished_run_with_0(
    tmp_path: Path, kubernetes: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """Two launchers, as in two pods, meet on this machine."""
    path = write_run(tmp_path)
    arguments = kubernetes[1]["spec"]["template"]["spec"]["containers"][0]["args"]
    for attempt in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = ["--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free.getsockname()[1]}"]
        steps = [f"--curriculum.stages[0].steps={steps_taken(tmp_path / 'run') + 2 if attempt else 100_000}"]
        pods = [
            subprocess.Popen(
                [sys.executable, "-m", "torchtitan_cp.cli.train", str(path), *place, *arguments, *steps],
                cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=(tmp_path / f"log-{attempt}-{number}").open("w"),
                stderr=subprocess.STDOUT,
            )
            for number in range(2)
        ]
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while attempt == 0 and steps_taken(tmp_path / "run") < 3:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            if attempt == 0:
                pods[1].send_signal(signal.SIGTERM)
            codes = [pod.wait(PATIENCE_SECONDS) for pod in pods]
        finally:
            for pod in pods:
                pod.kill()
        said = "".join(file.read_text() for file in tmp_path.glob(f"log-{attempt}-*"))
        assert codes == ([143, 143] if attempt == 0 else [0, 0]), said
    assert "resumed from" in said


# SkyPilot ----------------------------------------------------------------------------------------------------


def test_sky_gives_each_node_its_place(tmp_path: Path) -> None:
    """Keys and variables are those of SkyPilot's task file."""
    task = yaml.safe_load((LAUNCH / "sky.yaml").read_text())
    assert task.keys() == {"name", "workdir", "num_nodes", "resources", "volumes", "envs", "setup", "run"}
    assert task["resources"].keys() == {"accelerators", "use_spot", "job_recovery"}
    assert task["resources"]["job_recovery"].keys() == {"max_restarts_on_errors"}
    assert (REPOSITORY / task["envs"]["CONFIG_FILE"]).is_file()
    executable(tmp_path / "run_train.sh", SHOW)
    environment = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "CONFIG_FILE": "my.toml"}
    for script, shown in ((task["setup"], ""), (task["run"], "2 10.0.0.1:29400 my.toml \n")):
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env={**environment, "PATH": os.environ["PATH"]},
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout == shown


# Slurm -------------------------------------------------------------------------------------------------------


def test_slurm_gives_each_node_its_place(tmp_path: Path) -> None:
    executable(tmp_path / "run_train.sh", SHOW)
    executable(
        tmp_path / "scontrol", "#!/bin/sh\n[ \"$*\" = 'show hostnames node[1-2]' ] && printf 'node1\\nnode2\\n'\n"
    )
    executable(tmp_path / "srun", '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n')
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    done = subprocess.run(
        ["bash", str(LAUNCH / "slurm.sh"), "--optimizer.lr=1e-4"],
        env={**slurm, "SLURM_JOB_ID": "123456", "PATH": f"{tmp_path}:{os.environ['PATH']}", "CONFIG_FILE": "my.toml"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "2 node1:23456 my.toml --optimizer.lr=1e-4\n"


@pytest.mark.parametrize("script", [*LAUNCH.glob("*.sh"), *REPOSITORY.glob("*.sh")], ids=lambda script: script.name)
def test_a_script_is_one_that_bash_reads(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    if checker := shutil.which("shellcheck"):  # where it is installed
        subprocess.run([checker, "--severity=warning", "--shell=bash", str(script)], check=True)


# Docker ------------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """(name, rest) of each instruction of the Dockerfile."""
    lines = [line for line in (LAUNCH / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    parts = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(name, rest) for name, _, rest in (part.partition(" ") for part in parts)]


def copied() -> list[str]:
    """The files and folders of the repository that COPY takes."""
    sources = []
    for _, rest in (part for part in instructions() if part[0] == "COPY"):
        *names, target = rest.split()
        assert target == ("./" if (REPOSITORY / names[0]).is_file() else names[0])
        sources += names
    return sources


def test_an_image_is_made_of_what_is_there() -> None:
    assert [name for name, _ in instructions()] == ["ARG", "FROM", "WORKDIR", *["COPY"] * 5, "ENV", "RUN", "ENTRYPOINT"]
    assert all((REPOSITORY / name).exists() for name in copied())
    given = dict(instructions())
    assert json.loads(given["ENTRYPOINT"]) == ["./run_train.sh"]
    assert os.access(REPOSITORY / "run_train.sh", os.X_OK)
    [extras] = re.findall(r"'\.\[(.*)\]'", given["RUN"])
    declared = re.findall(r"^(\w+) = \[", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(extras.split(",")) <= set(declared)


@pytest.mark.deep  # it imports torch anew
def test_an_image_has_all_that_a_run_reads(tmp_path: Path) -> None:
    """What COPY takes is a program that starts by itself."""
    for name in copied():
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPOSITORY / name, tmp_path / name)
    program = (
        "import sys; sys.path.insert(0, '.'); import train, torchtitan_cp; from torchtitan_cp.cli.check import main; "
        "assert train.__file__.startswith(sys.argv[1]), train.__file__; "
        "assert torchtitan_cp.__file__.startswith(sys.argv[1]), torchtitan_cp.__file__; "
        "sys.exit(main(['train_configs/quickstart.toml', '--ranks', '2']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "on 2 ranks" in done.stdout


def test_a_negative_code_for_stops_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_command(["my.toml", "--stopped-exit-code", "-1"])
    assert "-1 is less than 0" in capsys.readouterr().err
