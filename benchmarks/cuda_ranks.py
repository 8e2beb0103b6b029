"""The parts of `benchmarks/cuda.sh` whose ranks talk over NCCL, each rank on a GPU of its own, or all on one.

NCCL refuses two ranks of one host on one GPU. So `python -m benchmarks.cuda_ranks RANKS CONFIG OPTIONS...` starts each
as a node of its own: NCCL_HOSTID makes it one to NCCL too, which then sends through a socket. The ranks take turns on
the GPU, so what they show is whether a result is right, and not how fast it comes.
"""

import gzip
import importlib
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks.cuda import ROOT, Line, find_rank, gpus_of, read
from benchmarks.cuda_record import Record, run_tests
from benchmarks.cuda_training import MODELS, training_arguments, training_command

CONFORMANCE_TESTS = "tests/ranks/attention/test_conformance.py"
TRACE_BYTES = 16 << 20  # of a trace that is kept
AT_ONCE = 4  # jobs
# Of two ranks or more, by what is exchanged between them.
PARITY: dict[str, list[str]] = {
    **{
        name: [f"--context_parallel.strategy={name}", "--compile.enable=false"]
        for name in ("ring", "all_gather", "all_to_all")
    },
    "hybrid": ["--context_parallel.strategy=hybrid", "--context_parallel.all_to_all_ranks=2"],
    "ring, compiled": ["--context_parallel.strategy=ring", "--compile.enable=true"],
    "replicas": ["--parallel.dp_replicate=2"],
    "tensor parallel": ["--parallel.tp=2"],
    "pipeline": ["--parallel.pp=2"],
    "experts": [*MODELS["moe"], "--parallel.ep=2"],
    "linear attention": MODELS["qwen3_5"],
    "gemma3": [*MODELS["gemma3"], "--tokenizer.kind=bytes"],
    "doctor": [],
}


def ranks_of(record: Record) -> int:
    """One a GPU, and two where there is one GPU."""
    return max(2, gpus_of(read(record.path)))


def share_a_gpu(record: Record) -> bool:
    return gpus_of(read(record.path)) == 1 and not record.rehearsal


def command_of(record: Record, folder: Path, options: Sequence[str]) -> list[str]:
    """Trains stdlib_on_cpu.toml on all GPUs, or on two ranks that share one."""
    ranks = ranks_of(record)
    if not share_a_gpu(record):
        return training_command(record, ranks, folder, options)
    arguments = training_arguments(record, folder, options)
    return [sys.executable, "-m", "benchmarks.cuda_ranks", str(ranks), *arguments]


def parity(record: Record) -> None:
    """The first step of the stages of stdlib_on_cpu.toml on all ranks beside one; and what the doctor says."""
    chosen = {"hybrid": PARITY["hybrid"]} if record.rehearsal else PARITY
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:

        def run(name: str) -> str:
            flag = "--doctor" if name == "doctor" else "--verify-parity"
            command = command_of(record, Path(folder, name), [flag, *chosen[name]])
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            print(name, done.stdout, done.stderr, sep="\n", flush=True)
            return " ".join((done.stdout + done.stderr).splitlines()[-3:])[:500] if done.returncode else ""

        for name, why in zip(chosen, pool.map(run, chosen), strict=True):
            report = Path(folder, name, "parity.json")
            differences = _differences(json.loads(report.read_text())) if report.exists() else []
            record.case(name, not why, why, largest=max(differences, default="-"))


def _differences(value: Any) -> Iterator[float]:
    """All that parity.json calls a difference."""
    if isinstance(value, dict):
        yield from itertools.chain(*(_differences(each) for each in value.values()))
        if isinstance(value.get("difference"), float):
            yield value["difference"]
    elif isinstance(value, list):
        yield from itertools.chain(*map(_differences, value))


def conformance(record: Record) -> None:
    """The conformance tests of as many ranks as there are GPUs, on NCCL; in a rehearsal few of two ranks, on gloo."""
    most = 4 if share_a_gpu(record) else ranks_of(record)
    sizes = [size for size in (2, 3, 4, 8) if size <= most]
    keyword = " or ".join(f"(every_mask and {size}-default) or (bf16_error and -{size}])" for size in sizes)
    if record.rehearsal:
        keyword = "every_mask and ring-zigzag-2-default"
    else:
        os.environ |= {"TEST_DEVICE": "cuda"} | ({"SHARE_GPU": "1"} if share_a_gpu(record) else {})
    backend = importlib.import_module("tests.support.rank_pool").backend_of(2)
    record.case("backend of the ranks", backend == "nccl" or record.rehearsal, backend=backend)
    run_tests(record, CONFORMANCE_TESTS, keyword, "not jobs", [])


def faults(record: Record) -> None:
    """A job in bf16, once whole, once with its last rank killed, once with that stopped, as in a hang; and one NaN."""
    steps, lost_at = (4, 4, 4), 6
    options = ["--training.compute_dtype=bfloat16", "--training.deterministic=true", "--checkpoint.interval=2"]
    options += ["--job.timeout_seconds=20", "--job.max_restarts=1", "--checkpoint.timeout_seconds=20"]
    options += ["--evaluation.tokens=8192"]
    with tempfile.TemporaryDirectory() as folder:
        whole: list[float] = []
        stages = [f"--curriculum.stages[{number}].steps={count}" for number, count in enumerate(steps)]
        signals = {"whole": None, "killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
        if record.rehearsal:
            del signals["stopped"]
        for name, number in signals.items():
            own, sent = Path(folder, name), list[int]()

            def send(own: Path = own, number: signal.Signals | None = number, sent: list[int] = sent) -> bool:
                pid = find_rank(os.getpid(), ranks_of(record) - 1) if number and not sent else None
                if number and pid and len(read(own / "metrics.jsonl")) >= lost_at:
                    sent.append(pid)
                    os.kill(pid, number)
                return False

            why = record.command(command_of(record, own, [*options, *stages]), send)
            lines = read(own / "metrics.jsonl")
            losses = [line["loss"] for line in lines]
            whole = whole or losses
            passed = not why and losses == whole and len(losses) == sum(steps) and bool(number) == bool(sent)
            record.case(name, passed, why, steps=len(losses), last_loss=losses[-1] if losses else "-")
        start, rank = Path(folder, "start"), ranks_of(record) - 1
        why = record.command([sys.executable, "-m", "torchtitan_cp", "export", str(Path(folder, "whole")), str(start)])
        if not why:
            weights = load_file(start / "model.safetensors")
            weights["model.layers.0.mlp.down_proj.weight"][-1] = math.nan  # which the last rank's shard holds
            save_file(weights, start / "model.safetensors", {"format": "pt"})
            nan = ["--model.flavor=", f"--model.hub_checkpoint={start}"]
            why = record.command(command_of(record, Path(folder, "nan"), [*options, *stages, *nan]))
        found = "exit code 3" in why and f"layers.0.feed_forward.w2 is nan on rank {rank}" in why
        record.case("nan", found, "" if found else why)


def overlap(record: Record) -> None:
    """A step of the 1B, 32K tokens a rank on a ring, seen by the profiler."""
    ranks = ranks_of(record)
    flavor, own, dtype = ("debug", 512, "float32") if record.rehearsal else ("1B", 32768, "bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        stage = f"{{seq_len = {own * ranks}, steps = 3, global_batch_tokens = {own * ranks}, cp = -1}}"
        options = [f"--model.flavor={flavor}", f"--training.compute_dtype={dtype}", "--activation.checkpoint=full"]
        options += [f"--curriculum.stages=[{stage}]", "--context_parallel.strategy=ring", "--checkpoint.enable=false"]
        options += ["--evaluation.passkey.trials=0", "--evaluation.tokens=4096"]
        options += ["--lr_scheduler.warmup_steps=1", "--profiling.steps=[3]"]
        why = record.command(training_command(record, ranks, Path(folder), options))
        traces = list(Path(folder, "profile").glob("*.json.gz"))
        if why or not traces:
            record.case("profiled step", False, why or "no trace was written")
            return
        if traces[0].stat().st_size < TRACE_BYTES:
            shutil.copy(traces[0], record.path.parent / "overlap.json.gz")
        events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    seen: dict[str, Any] = beside_compute(events)
    record.case("keys and values in flight", seen["in_flight_beside_compute"] > 0 or record.rehearsal, **seen)


def beside_compute(events: Sequence[Line]) -> dict[str, float]:
    """Seconds of a trace's kernels; FSDP's collectives are neither compute nor keys and values."""
    covered = importlib.import_module("torchtitan_cp.metrics.profiling").covered
    kernels = [
        (event["name"].lower(), (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
        for event in events
        if event.get("cat") == "kernel"
    ]
    computing = [span for name, span in kernels if "nccl" not in name]
    sending = [span for name, span in kernels if "nccl" in name and "sendrecv" in name]
    both = covered(computing) + covered(sending) - covered(computing + sending)
    return {"compute": covered(computing), "in_flight": covered(sending), "in_flight_beside_compute": both}


def main(arguments: Sequence[str]) -> int:
    """Start each rank as a node of its own, on the first GPU. Returns the first exit code that is not 0."""
    ranks, *options = arguments
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    launcher = [sys.executable, "-m", "torchtitan_cp.cli.train", options[0], "--nproc=1", f"--nnodes={ranks}"]
    launcher += [f"--rdzv-endpoint={endpoint}", *options[1:]]
    shared = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    nodes = [
        subprocess.Popen(launcher, cwd=ROOT, env={**os.environ, **shared, "NCCL_HOSTID": f"host-{rank}"})
        for rank in range(int(ranks))
    ]
    codes = [node.wait() for node in nodes]
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
