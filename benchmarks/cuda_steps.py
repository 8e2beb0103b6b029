"""The parts of `benchmarks/cuda.sh` that time whole steps by the trainer, each beside its prediction.

A row is predicted by `benchmarks/budget.py` from the keys it trains with. Rows of a part come most telling first, so
what its limit cuts off is the least.
"""

import gzip
import json
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.budget import accelerator_here, predict
from benchmarks.cuda import Line, read
from benchmarks.cuda_record import Record, beside, environment_of_one_rank
from benchmarks.cuda_rows import ROWS, Row, rehearsed, write_corpus
from benchmarks.cuda_training import training_arguments
from models import ARCHITECTURES
from torchtitan_cp.config import load_config
from torchtitan_cp.planner.devices import make_cluster
from torchtitan_cp.training.registry import register

MAX_SLOW = 10  # steps that are shown
LARGEST_COPIES = 12  # that a profile names
PROFILED = ROWS["layers"][0]


def layers(record: Record) -> None:
    """The 8B's layers at 8K and 32K."""
    _measure(record, ROWS["layers"])


def long(record: Record) -> None:
    """The 8B's layers at 128K and 512K."""
    _measure(record, ROWS["long"])


def packed(record: Record) -> None:
    """The 8B's layers on packed documents; no step takes twice the time of most, as one that compiles again would."""
    _measure(record, ROWS["packed"])


def published(record: Record) -> None:
    """Models and lengths whose tokens/s on one H100 others published."""
    _measure(record, ROWS["published"])


def mixed(record: Record) -> None:
    """A hybrid with recurrent layers and a mixture of experts."""
    _measure(record, ROWS["mixed"])


def _measure(record: Record, rows: Sequence[Row]) -> None:
    for row in rehearsed(rows) if record.rehearsal else rows:
        if row.lacking:
            record.write(row.name, "not run", row.lacking)
            continue
        with tempfile.TemporaryDirectory() as folder:
            why, lines, predicted = train_row(record, row, Path(folder))
        if why or not lines:
            record.case(row.name, False, why or "no step was recorded", **predicted)
            continue
        median = statistics.median(line["step_seconds"] for line in lines)
        slow = [line for line in lines if line["step_seconds"] > 2 * median]
        record.case(row.name, not slow or record.rehearsal, **figures(row, lines, predicted))
        for line in slow[:MAX_SLOW]:
            seconds = {"data": line["data_wait_seconds"], **line["seconds"]}
            record.case(f"{row.name}, slow step {line['step']}", seconds=line["step_seconds"], **seconds)


def figures(row: Row, lines: Sequence[Line], predicted: Mapping[str, float]) -> Line:
    """The median step of some lines of metrics.jsonl, beside what was predicted and published."""
    middle = sorted(lines, key=lambda line: line["step_seconds"])[len(lines) // 2]
    found: Line = {"ms": 1e3 * middle["step_seconds"]}
    found |= beside("tokens_per_second", middle["tokens_per_second"], predicted["predicted_tokens_per_second"])
    found |= {"mfu": middle["mfu_mask" if row.documents else "mfu"], "predicted_mfu": predicted["predicted_mfu"]}
    found |= beside("peak_gib", middle["peak_memory_bytes"] / 2**30, predicted["predicted_peak_gib"])
    if row.published:
        found |= {"published_tokens_per_second": row.published}
        found["of_published"] = middle["tokens_per_second"] / row.published
    return found


def train_row(
    record: Record, row: Row, folder: Path, options: Sequence[str] = ()
) -> tuple[str, list[Line], dict[str, float]]:
    """Train a row as a job of one rank, without a launcher.

    Returns:
        why it failed or "", the lines of metrics.jsonl behind the warm-up, and the predicted figures.
    """
    register(ARCHITECTURES)
    corpus = folder / "corpus.jsonl"
    write_corpus(row, corpus)
    run = folder / "run"
    config, *arguments = training_arguments(record, run, [])
    arguments += [*row.overrides(corpus), *options]
    if record.rehearsal:
        arguments += ["--training.compute_dtype=float32"]
    one = make_cluster("here", measured=accelerator_here(), ranks_per_node=1)
    step = predict(load_config(Path(config), arguments), one, row.documents)
    predicted = {
        "predicted_tokens_per_second": step.tokens_per_second,
        "predicted_mfu": step.mfu,
        "predicted_peak_gib": step.peak_gib,
    }
    why = record.command([sys.executable, "train.py", config, *arguments], environment=environment_of_one_rank())
    return why, read(run / "metrics.jsonl")[row.warm_up :], predicted


# Kernels by kind, the first pattern that a kernel's name has; attention is also called gemm and cutlass.
KINDS = {
    "attention": "flash|fmha|sdpa|attention",
    "messages": "nccl",
    "compiled elementwise": "^triton",
    "optimizer and norms": "multi_tensor|adam|lpnorm",
    "matrix products": "gemm|nvjet|cutlass|cublas|xmma|splitk",
    "copies": "memcpy|memset|copy|cat_|catarray|fillfunctor",
}


def profile(record: Record) -> None:
    """One step's kernels by kind, and its copies by what launched them."""
    (row,) = rehearsed([PROFILED]) if record.rehearsal else [PROFILED]
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--profiling.steps=[{row.warm_up + 1}]"]
        why, _, _ = train_row(record, row, Path(folder), options)
        traces = list(Path(folder, "run", "profile").glob("*.json.gz"))
        if why or not traces:
            record.case(row.name, False, why or "no trace was written")
            return
        events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    milliseconds, copies = sum_by_kind(events)
    known = bool(milliseconds) or record.rehearsal
    record.case(f"{row.name}: ms by kind", known, "" if known else "the trace has no kernels", **milliseconds)
    for (kernel, place), (count, spent) in copies[:LARGEST_COPIES]:
        record.case(f"copy by {kernel[:60]}, {place}", times=count, ms=spent)


def sum_by_kind(
    events: Sequence[Line],
) -> tuple[dict[str, float], list[tuple[tuple[str, str], tuple[int, float]]]]:
    """Sum the kernels of a trace of torch.profiler.

    Returns:
        kind -> ms, and for each copying kernel and the place that launched it, how often and ms, longest first.
    """
    places = launch_places(events)
    spent, counts, copies = Counter[str](), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        name = event["name"]
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower())), "other kernels")
        spent[kind] += event["dur"] / 1e3
        if kind == "copies":
            key = (name, places.get(event["args"].get("correlation"), "unknown place"))
            counts[key] += 1
            copies[key] += event["dur"] / 1e3
    return dict(spent.most_common()), [(key, (counts[key], ms)) for key, ms in copies.most_common()]


def launch_places(events: Sequence[Line]) -> dict[int, str]:
    """For each launch of a trace, by its correlation: the innermost annotation and the outermost operator around it."""
    spans = [e for e in events if e.get("cat") in ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")]
    open_spans: dict[Any, list[Line]] = {}
    places = {}
    for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
        around = open_spans.setdefault(event.get("tid"), [])
        while around and around[-1]["ts"] + around[-1]["dur"] < event["ts"]:
            around.pop()
        if event["cat"] in ("cpu_op", "user_annotation"):
            around.append(event)
            continue
        notes = [span["name"] for span in around if span["cat"] == "user_annotation"]
        operators = [span["name"] for span in around if span["cat"] == "cpu_op"]
        places[event["args"].get("correlation")] = " in ".join([*operators[:1], *notes[-1:]]) or "no operator"
    return places
