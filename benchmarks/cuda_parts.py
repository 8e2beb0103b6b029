"""What the parts of `benchmarks/cuda.sh` do: `python -m benchmarks.cuda_parts PART RESULTS [--rehearsal]`.

A part is the function of its name. It writes each case as it comes, and imports what it needs itself: what one part
lacks is no other's failure. In a rehearsal everything runs on the CPU in its smallest size, the attention kernels of
CUDA on stand-ins for their operators, and two ranks on gloo take the place of two GPUs.
"""

import argparse
import gzip
import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.cuda import CASES_FAILED, LOG, ROOT, Line, append, gpus_of, kill_descendants, last_lines, read

CONFORMANCE_TESTS = "tests/ranks/attention/test_conformance.py"
KERNEL_TESTS, OFFLOAD_TESTS = "tests/unit/attention/test_kernels.py", "tests/unit/parallel/test_offload.py"
LINEAR_TESTS = "tests/unit/attention/test_linear_devices.py"
FAMILY_TESTS = "tests/unit/models/huggingface/test_families.py"
CORPUS_CACHE = Path(tempfile.gettempdir(), f"torchtitan-cp-corpus-{os.getuid()}")
TRACE_BYTES = 16 << 20  # of a trace that is kept


class Record:
    """Writes the cases of a part.

    Args:
        path: of the results.
        part: its name.
        rehearsal: on a CPU, in the smallest sizes.
    """

    def __init__(self, path: Path, part: str, rehearsal: bool) -> None:
        self.path, self.part, self.rehearsal, self.failed = path, part, rehearsal, False

    def command(self, command: Sequence[str], until: Callable[[], bool] = lambda: False) -> str:
        """Run it to its end, or until something holds and it is killed with all that it started.

        Returns:
            why it failed; "" if it did not, or was killed.
        """
        log = self.path.parent / LOG
        start = log.stat().st_size if log.exists() else 0
        process = subprocess.Popen(command, cwd=ROOT)
        while process.poll() is None:
            if until():
                kill_descendants(os.getpid())
                return ""
            time.sleep(0.02)
        said = " ".join(last_lines(log, start)[-3:]) if log.exists() else ""
        return f"exit code {process.returncode}: {said}"[:500] if process.returncode else ""

    def case(self, name: str, passed: bool = True, why: str = "", **figures: Any) -> None:
        self.write(name, "passed" if passed else "failed", why, **figures)

    def write(self, name: str, status: str, why: str = "", **figures: Any) -> None:
        self.failed |= status == "failed"
        print(f"{name}: {status} {why}")
        line: Line = {"part": self.part, "case": name, "status": status}
        append(self.path, line | ({"why": why} if why else {}) | ({"figures": figures} if figures else {}))


# What there is -------------------------------------------------------------------------------------------------


def versions(record: Record) -> None:
    """Each by its own case, as each may be missing."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader"]
    commands = {"driver": query, "gcc": ["gcc", "--version"], "commit": ["git", "rev-parse", "HEAD"]}
    for name, command in commands.items():
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=True)
            record.case(name, version="; ".join(done.stdout.strip().splitlines()[: None if name == "driver" else 1]))
        except (OSError, subprocess.SubprocessError) as error:
            record.write(name, "not run" if record.rehearsal or name == "commit" else "failed", str(error))
    text = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("\n]")[0]
    found, missing = [], []
    for package in [*re.findall(r'^ *"([\w.-]+)', text, re.MULTILINE), "pytest", *["triton"] * (not record.rehearsal)]:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            missing.append(package)
    record.case("packages", not missing, f"missing: {', '.join(missing)}" * bool(missing), version=", ".join(found))
    torch = importlib.import_module("torch")
    gpus = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(number) for number in range(gpus)]
    version = f"{torch.__version__}, python {sys.version.split()[0]}, cuDNN {torch.backends.cudnn.version()}"
    version += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if gpus else ""
    record.case("torch", gpus > 0 or record.rehearsal, version=version, gpus=2 if record.rehearsal else gpus)
    record.case("devices", gpus > 0 or record.rehearsal, version=", ".join(names) or "CPU: a rehearsal")


# Tests ---------------------------------------------------------------------------------------------------------


class Cases:
    """A pytest plugin that records each test when it ends.

    After an error of CUDA itself the process is lost, and what follows would fail as well: it stops.
    """

    def __init__(self, record: Record) -> None:
        self.record, self.left = record, set[str]()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """In a rehearsal, tests for a GPU run on the CPU in fp64."""
        chosen = [item.callspec.params for item in items if self.record.rehearsal and hasattr(item, "callspec")]
        for parameters in chosen:
            if parameters.get("device") == "cuda":
                parameters["device"] = "cpu"
                if "dtype" in parameters:
                    parameters["dtype"] = importlib.import_module("torch").float64

    def pytest_collection_finish(self, session: Any) -> None:
        self.session, self.left = session, {item.nodeid for item in session.items}
        self.record.case("chosen", bool(self.left), tests=len(self.left))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.record.case(report.nodeid, False, _last_error(report))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not (report.when == "call" or report.failed or report.skipped):
            return
        self.left.discard(report.nodeid)
        status = "not run" if report.skipped else report.outcome
        self.record.write(report.nodeid.partition("::")[2], status, _last_error(report) if report.failed else "")
        if report.failed and "CUDA error" in str(report.longrepr):
            self.session.shouldstop = "an error of CUDA itself"

    def pytest_sessionfinish(self) -> None:
        if self.left:
            self.record.write(f"{len(self.left)} tests", "not run", "the tests stopped before them")


def _last_error(report: Any) -> str:
    lines = [line.strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
    return " ".join((lines or str(report.longrepr).splitlines()[-1:])[-2:])[:300]


def run_tests(
    record: Record, file: str, keyword: str, marker: str = "cuda", conftest: Sequence[str] = ("--noconftest",)
) -> None:
    """Run the tests of a file that a keyword expression chooses.

    By default without the suite's conftest, which imports all packages of the trainer.
    """
    plugin = Cases(record)
    options = [*conftest, "-p", "no:cacheprovider", "-o", "addopts=", "-q", "-m", marker, "-k", keyword]
    code = importlib.import_module("pytest").main([file, *options], plugins=[plugin])
    if code not in (0, 1, 5):  # 5: nothing was chosen, which is recorded
        record.case(f"pytest {file} -k {keyword!r}", False, f"exit code {int(code)}")


def flash(record: Record) -> None:
    """Every tile, group of heads and dim, and packed documents."""
    smallest = " and (documents or heads1-dims0 and (full or causal))" if record.rehearsal else ""
    run_tests(record, KERNEL_TESTS, f"flash{smallest}")


def efficient(record: Record) -> None:
    """As flash."""
    smallest = " and (documents or heads1-dims0 and (full or causal))" if record.rehearsal else ""
    run_tests(record, KERNEL_TESTS, f"efficient{smallest}")


def cudnn(record: Record) -> None:
    """Every tile with one group of heads and dim; each new shape costs about a second for its plans."""
    some = "full or causal" if record.rehearsal else "heads1-dims2 or three_tiles or batch_rows or documents or sdpa"
    run_tests(record, KERNEL_TESTS, f"cudnn and not fp16 and ({some})" + " and heads1-dims2" * record.rehearsal)


def flex(record: Record) -> None:
    """Few, as each is compiled; one with short queries. On a CPU torch refuses its backward by a check alone."""
    if record.rehearsal:
        module: Any = importlib.import_module("torch.nn.attention.flex_attention")
        module._validate_device = lambda *tensors: None
    tiles = "causal" if record.rehearsal else "(causal or later)"
    run_tests(record, KERNEL_TESTS, f"flex-bf16 and {tiles} and heads1-dims2")


def linear(record: Record) -> None:
    """The gated delta rule and Kimi's, in torch; then fused kernels, which choose among many at first."""
    run_tests(record, LINEAR_TESTS, "cuda and recurrence")
    run_tests(record, LINEAR_TESTS, "cuda and fused" + " and zigzag" * record.rehearsal)


def families(record: Record) -> None:
    """All that trains, in fp32."""
    run_tests(record, FAMILY_TESTS, "cuda and Gemma and 3" if record.rehearsal else "cuda")


def offload(record: Record) -> None:
    """On a CPU the copies are plain ones."""
    run_tests(record, OFFLOAD_TESTS, "gradients and first and not True" if record.rehearsal else "not True")
    if not record.rehearsal:
        run_tests(record, OFFLOAD_TESTS, "True")  # compiled blocks


# Training ------------------------------------------------------------------------------------------------------


def quickstart(record: Record) -> None:
    """Twenty steps in fp32; in bf16 with deterministic kernels, the same once killed and resumed."""
    steps, kill_at = ((8, 6, 6), 9) if not record.rehearsal else ((2, 2, 1), 3)
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--curriculum.stages[{number}].steps={count}" for number, count in enumerate(steps)]
        options += ["--checkpoint.interval=2", "--evaluation.tokens=8192", "--lr_scheduler.warmup_steps=2"]
        if record.rehearsal:
            sizes = {"seq_len": (128, 256, 512), "global_batch_tokens": (512, 512, 512)}
            options += [
                f"--curriculum.stages[{number}].{key}={value}"
                for key in sizes
                for number, value in enumerate(sizes[key])
            ]
        bf16 = ["--training.compute_dtype=bfloat16", "--training.deterministic=true"]
        whole = {}
        for name, more in {"fp32": [], "bf16": bf16}.items():
            why, lines = train(record, Path(folder, name), [*options, *more])
            losses = whole[name] = [line["loss"] for line in lines]
            passed = not why and len(losses) == sum(steps) and losses[-1] < losses[0]
            record.case(name, passed, why, steps=len(losses), **_figures(lines))
        _, before = train(record, Path(folder, "resumed"), [*options, *bf16], kill_at)
        why, lines = train(record, Path(folder, "resumed"), [*options, *bf16])
        losses = [line["loss"] for line in lines]
        difference = max((abs(a - b) for a, b in zip(losses, whole["bf16"], strict=False)), default=None)
        if not kill_at <= len(before) < sum(steps):
            why = f"it was not killed on its way: {len(before)} steps"
        # One that began anew would have taken its first step again, in other seconds.
        passed = not why and losses == whole["bf16"] and len(losses) == sum(steps) and lines[0] == before[0]
        figures = {"killed_after_step": len(before), "largest_difference": difference}
        record.case("bf16, killed and resumed", passed, why, steps=len(losses), **_figures(lines), **figures)


def _figures(lines: Sequence[Line]) -> Line:
    if not lines:
        return {}
    figures = {name: lines[-1][name] for name in ("step_seconds", "tokens_per_second")}
    figures["peak_gib"] = lines[-1]["peak_memory_bytes"] / 2**30
    return {"first_loss": lines[0]["loss"], "last_loss": lines[-1]["loss"], **figures}


def train(record: Record, folder: Path, options: Sequence[str], kill_at: int | None = None) -> tuple[str, list[Line]]:
    """Train the quickstart on one rank.

    Args:
        record: of the part.
        folder: of the run.
        options: overrides.
        kill_at: kill the job with its ranks when it has recorded so many steps.

    Returns:
        why it failed or "", and the lines of metrics.jsonl.
    """
    metrics = folder / "metrics.jsonl"
    why = record.command(
        _command(record, 1, folder, options), lambda: bool(kill_at) and len(read(metrics)) >= (kill_at or 0)
    )
    return why, read(metrics)


def _command(record: Record, ranks: int, folder: Path, options: Sequence[str]) -> list[str]:
    """Trains the quickstart, of whose corpus the parts share the tokens; in a rehearsal the pages of docs/."""
    options = [f"--job.dump_folder={folder}", f"--data.cache_folder={CORPUS_CACHE}", *options]
    options.append("--job.max_restarts=0")
    if record.rehearsal:
        options += ["--data.source=text", "--data.path=docs/*.md", "--data.document=file"]
        options += ["--data.validation_fraction=0.25", "--tokenizer.kind=bytes", "--evaluation.tokens=2048"]
        options += ["--model.overrides.n_layers=1", "--metrics.tensorboard=false"]
    config = "train_configs/quickstart.toml"
    return [sys.executable, "-m", "torchtitan_cp.cli.train", config, "--nproc", str(ranks), *options]


# What part `options` overrides: the run, its model, and one option.
SHORT = [
    *("--data.source=text", "--data.path=docs/*.md", "--data.document=file", "--data.max_document=700"),
    *("--data.validation_fraction=0.0", "--tokenizer.kind=bytes", "--checkpoint.enable=false"),
    *("--metrics.tensorboard=false", "--evaluation.tokens=1024", "--evaluation.passkey.trials=0"),
    "--lr_scheduler.warmup_steps=0",
    "--curriculum.stages=[{seq_len = 2048, steps = 4, global_batch_tokens = 8192, "
    'data = {document_mask = true, packing = "best_fit"}}]',
]
MODELS = {
    "llama": ["--model.flavor=debug"],
    "gemma3": [
        "--model.architecture=huggingface",
        "--model.flavor=",
        "--model.config=train_configs/models/tiny_gemma3.json",
    ],
    "qwen3_5": ["--model.architecture=qwen3_5", "--model.flavor=debug"],
    "moe": ["--model.architecture=moe", "--model.flavor=debug"],
}
PLAIN = ["--context_parallel.kernel=reference", "--training.compute_dtype=float32"]
BF16, COMPILED = "--training.compute_dtype=bfloat16", "--compile.enable=true"
OPTIONS = {
    "fp32": ["--training.compute_dtype=float32"],
    "bf16": [BF16],
    "bf16, compiled": [BF16, COMPILED],
    "flash": [BF16, "--context_parallel.kernel=flash"],
    "flex": [BF16, "--context_parallel.kernel=flex"],
    "compiled, reduce-overhead": [BF16, COMPILED, "--compile.mode=reduce-overhead"],
    "selective, compiled": [BF16, COMPILED, "--activation.checkpoint=selective"],
    "attention saved, MLP in 2 tiles": [BF16, "--activation.checkpoint=attention_saved", "--activation.mlp_tiles=2"],
    "activations offloaded": [BF16, "--activation.checkpoint=full", "--activation.offload=true"],
    "optimizer offloaded": [BF16, "--optimizer.offload_state=true"],
    "weights offloaded": [BF16, "--parallel.fsdp_cpu_offload=true"],
    "8-bit moments": [BF16, "--optimizer.state=8bit"],
    "muon": [BF16, "--optimizer.name=muon"],
    "float8, tensorwise, compiled": [BF16, COMPILED, "--training.float8=tensorwise"],
    "float8, rowwise, compiled": [BF16, COMPILED, "--training.float8=rowwise"],
}
OF_ALL = ("bf16, compiled", "bf16", "fp32")  # models; the longest first
NEEDS = {"gemma3": "transformers", "8-bit": "torchao", "float8": "torchao"}  # packages, by words of a case
AT_ONCE = 8  # runs


def options(record: Record) -> None:
    """Four steps of tiny models with each option, on packed documents, beside fp32 with the reference kernel."""
    chosen = {(model, "plain"): PLAIN for model in MODELS}
    chosen |= {(model, name): OPTIONS[name] for name in OF_ALL for model in MODELS}
    chosen |= {("llama", name): OPTIONS[name] for name in OPTIONS}
    if record.rehearsal:
        chosen = {key: chosen[key] for key in (("llama", "plain"), ("llama", "fp32"))}
    for key in list(chosen):
        for word, package in NEEDS.items():
            if word in " ".join(key) and not find_spec(package):
                del chosen[key]
                record.write(", ".join(key), "not run", f"no package {package}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:

        def run(key: tuple[str, str]) -> tuple[str, list[Line]]:
            out = Path(folder, f"{key[0]}-{key[1]}")
            shorter = [f"--curriculum.stages[0].{x}" for x in ("seq_len=256", "global_batch_tokens=512")]
            overrides = [*SHORT, *shorter * record.rehearsal, *MODELS[key[0]], *chosen[key]]
            command = _command(record, 1, out, overrides)
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            print(*key, done.stdout, done.stderr, sep="\n", flush=True)
            why = " ".join(done.stderr.splitlines()[-3:]) if done.returncode else ""
            return why[:500], read(out / "metrics.jsonl")

        plain: dict[str, list[float]] = {}
        for (model, name), (why, lines) in zip(chosen, pool.map(run, chosen), strict=True):
            losses = [line["loss"] for line in lines]
            want = plain.setdefault(model, losses)
            off = [abs(got / exact - 1) for got, exact in zip(losses, want, strict=False)] or [float("inf")]
            most = (1e-5, 1e-3) if "fp32" in name else (1e-2, 1e-1)
            passed = not why and len(losses) == len(want) == 4 and off[0] <= most[0] and max(off) <= most[1]
            record.case(f"{model}, {name}", passed, why, first_off=off[0], largest_off=max(off), **_figures(lines))


# Speed ---------------------------------------------------------------------------------------------------------


def shares(record: Record) -> None:
    """Busiest of 8 ranks, one after another; fewer heads for the longest, which the share does not depend on."""
    kernels = importlib.import_module("benchmarks.kernels")
    sizes = [(8192, [32, 8], 3), (32768, [32, 8], 1), (131072, [8, 2], 1), (262144, [8, 2], 1)]
    device, dtype, dim = "cuda", "bfloat16", 128
    if record.rehearsal:
        sizes, device, dtype, dim = [(64, [2, 1], 1), (128, [2, 1], 1)], "cpu", "float32", 64
    for keys, heads, rounds in sizes:
        for row in kernels.measure(
            device, ["cudnn", "flash"], [8 * keys], [8], ["causal"], ["ring"], heads, dim, dtype, rounds
        ):
            kept = {name: row[name] for name in row if name.startswith(("forward", "backward")) or name == "tiles"}
            record.case(f"{row['kernel']}, {keys} keys a rank, {heads[0]} heads", **kept)


def steps(record: Record) -> None:
    """A step includes the optimizer. The longest is sought with windows, which take no less memory and less time."""
    speed = importlib.import_module("benchmarks.training_speed")
    sizes = [(8192, "none"), (8192, "full"), (32768, "full"), (131072, "full")]
    settings: dict[str, Any] = {"flavor": "1B", "vocabulary": 0, "dtype": "bfloat16"}
    longest, most = 262144, 1 << 20
    if record.rehearsal:
        sizes, longest, most = [(256, "full")], 512, 512
        settings = {"flavor": "debug", "vocabulary": 512, "dtype": "float32"}

    def step(length: int, mode: str, tiles: int, rounds: int, window: int) -> Line:
        options = {"lengths": [length], "modes": [mode], "tiles": tiles, "compile": [0], "rounds": rounds}
        (row,) = speed.measure(**settings, layers=0, **options, optimizer=1, window=window)
        return dict(row)

    for length, mode in sizes:
        record.case(f"{length} tokens, {mode}", **step(length, mode, 1, 1, 0))

    def fits(length: int) -> bool:
        row = step(length, "full", 16, 0, 1024)
        record.case(f"{length} tokens, full, MLP in 16 tiles, windows of 1024", **row)
        return "peak_gib" in row

    record.case("longest step that fits", tokens=longest_that_fits(longest, most, fits))


def longest_that_fits(length: int, most: int, fits: Callable[[int], bool]) -> int:
    """By doubling up to `most`, then halfway between the longest that fits and the next; 0: none."""
    found = 0
    while length <= most and fits(length):
        found, length = length, 2 * length
    between = found + found // 2
    return between if found and between <= most and fits(between) else found


# Two GPUs or more ----------------------------------------------------------------------------------------------


def parity(record: Record) -> None:
    """The first step of the quickstart's stages over all GPUs beside one."""
    ranks = gpus_of(read(record.path))
    for strategy in ("hybrid",) if record.rehearsal else ("ring", "all_gather", "all_to_all", "hybrid"):
        with tempfile.TemporaryDirectory() as folder:
            options = ["--verify-parity", f"--context_parallel.strategy={strategy}"]
            options += ["--context_parallel.all_to_all_ranks=2"] * (strategy == "hybrid")
            why = record.command(_command(record, ranks, Path(folder), options))
            report = Path(folder, "parity.json")
            differences = _differences(json.loads(report.read_text())) if report.exists() else []
            record.case(strategy, not why, why, largest=max(differences, default="-"))


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
    sizes = [size for size in (2, 3, 4, 8) if size <= gpus_of(read(record.path))]
    keyword = " or ".join(f"(every_mask and {size}-default) or (bf16_error and -{size}])" for size in sizes)
    if record.rehearsal:
        keyword = "every_mask and ring-zigzag-2-default"
    else:
        os.environ["TEST_DEVICE"] = "cuda"
    backend = importlib.import_module("tests.support.rank_pool").backend_of(2)
    record.case("backend of the ranks", backend == "nccl" or record.rehearsal, backend=backend)
    run_tests(record, CONFORMANCE_TESTS, keyword, "not jobs", [])


def overlap(record: Record) -> None:
    """A step of the 1B, 32K tokens a rank on a ring, seen by the profiler."""
    ranks = gpus_of(read(record.path))
    flavor, own, dtype = ("debug", 512, "float32") if record.rehearsal else ("1B", 32768, "bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        stage = f"{{seq_len = {own * ranks}, steps = 3, global_batch_tokens = {own * ranks}, cp = -1}}"
        options = [f"--model.flavor={flavor}", f"--training.compute_dtype={dtype}", "--activation.checkpoint=full"]
        options += [f"--curriculum.stages=[{stage}]", "--context_parallel.strategy=ring", "--checkpoint.enable=false"]
        options += ["--evaluation.passkey.trials=0", "--evaluation.tokens=4096"]
        options += ["--lr_scheduler.warmup_steps=1", "--profiling.steps=[3]"]
        why = record.command(_command(record, ranks, Path(folder), options))
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("results", type=Path)
    parser.add_argument("--rehearsal", action="store_true")
    options = parser.parse_args(arguments)
    record = Record(options.results, options.part, options.rehearsal)
    if options.rehearsal:
        importlib.import_module("tests.support.emulated_ops").install()
    globals()[options.part](record)
    return CASES_FAILED if record.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
