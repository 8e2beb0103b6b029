"""The parts of `benchmarks/cuda.sh` that train to compare: tiny models with each option, and stdlib_on_cpu.toml."""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from benchmarks.cuda import ROOT, Line, read
from benchmarks.cuda_record import Record

CORPUS_CACHE = Path(tempfile.gettempdir(), f"torchtitan-cp-corpus-{os.getuid()}")


def stdlib(record: Record) -> None:
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
        whole, runs = {}, {"fp32": [], "bf16": bf16}
        if record.rehearsal:
            del runs["fp32"]
        for name, more in runs.items():
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
    """Train stdlib_on_cpu.toml on one rank.

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
        training_command(record, 1, folder, options), lambda: bool(kill_at) and len(read(metrics)) >= (kill_at or 0)
    )
    return why, read(metrics)


def training_command(record: Record, ranks: int, folder: Path, options: Sequence[str]) -> list[str]:
    """Trains stdlib_on_cpu.toml on some ranks; see `training_arguments`."""
    config, *options = training_arguments(record, folder, options)
    return [sys.executable, "-m", "torchtitan_cp.cli.train", config, "--nproc", str(ranks), *options]


def training_arguments(record: Record, folder: Path, options: Sequence[str]) -> list[str]:
    """stdlib_on_cpu.toml, of whose corpus the parts share the tokens; in a rehearsal the pages of docs/."""
    folders = [f"--job.dump_folder={folder}", f"--data.cache_folder={CORPUS_CACHE}"]
    options = [*folders, "--job.max_restarts=0", *options]
    if record.rehearsal:
        options += ["--data.source=text", "--data.path=docs/*.md", "--data.document=file"]
        options += ["--data.validation_fraction=0.25", "--tokenizer.kind=bytes", "--evaluation.tokens=2048"]
        options += ["--model.overrides.n_layers=1", "--metrics.tensorboard=false"]
    return ["train_configs/stdlib_on_cpu.toml", *options]


# What parts `options` and `waits`, and the rows of cuda_steps.py, override: the run, its model, and one option.
SHORT = [
    *("--data.source=text", "--data.path=docs/*.md", "--data.document=file", "--data.max_document=700"),
    *("--data.validation_fraction=0.0", "--tokenizer.kind=bytes", "--checkpoint.enable=false"),
    *("--metrics.tensorboard=false", "--evaluation.tokens=1024", "--evaluation.passkey.trials=0"),
    *("--lr_scheduler.warmup_steps=0", "--compile.enable=false"),
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
    "selective, compiled": [BF16, COMPILED, "--activation.checkpoint=selective"],
    "selective": [BF16, "--activation.checkpoint=selective"],
    "selective, offloaded": [BF16, "--activation.checkpoint=selective", "--activation.offload=true"],
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
AT_ONCE, MAX_SLOW = 8, 10  # runs; steps that are shown


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
    overrides = {", ".join(key): [*SHORT, *_shorter(record), *MODELS[key[0]], *chosen[key]] for key in chosen}
    plain: dict[str, list[float]] = {}
    for name, why, lines in _at_once(record, overrides):
        losses = [line["loss"] for line in lines]
        want = plain.setdefault(name.partition(",")[0], losses)
        off = [abs(got / exact - 1) for got, exact in zip(losses, want, strict=False)] or [float("inf")]
        most = (1e-5, 1e-3) if "fp32" in name else (1e-2, 1e-1)
        passed = not why and len(losses) == len(want) == 4 and off[0] <= most[0] and max(off) <= most[1]
        record.case(name, passed, why, first_off=off[0], largest_off=max(off), **_figures(lines))


def _shorter(record: Record) -> list[str]:
    return [f"--curriculum.stages[0].{x}" for x in ("seq_len=256", "global_batch_tokens=512")] * record.rehearsal


def waits(record: Record) -> None:
    """Four steps of each tiny model: the host waits for the GPU nowhere between a step's beginning and its report."""
    models = [name for name in MODELS if name == "llama" or not record.rehearsal]
    overrides = {name: [*SHORT, *_shorter(record), *MODELS[name], BF16] for name in models}
    for name, why, lines in _at_once(record, overrides, host_waits=True):
        places = Counter(line["place"] for line in lines)
        found = "; ".join(f"{count} times {place}" for place, count in places.most_common(MAX_SLOW))
        record.case(name, not (why or found), why or found, waits=len(lines))


def _at_once(
    record: Record, overrides: Mapping[str, Sequence[str]], host_waits: bool = False
) -> Iterator[tuple[str, str, list[Line]]]:
    """(name, why a training failed or "", the lines of its metrics.jsonl), in order; several run beside each other.

    Args:
        host_waits: the lines of host_waits.jsonl in their place; see benchmarks/host_waits.py.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:

        def run(name: str) -> tuple[str, str, list[Line]]:
            own = Path(folder, name)
            command = training_command(record, 1, own, overrides[name])
            if host_waits:
                arguments = training_arguments(record, own, overrides[name])
                command = [sys.executable, "-m", "benchmarks.host_waits", *arguments]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            print(name, done.stdout, done.stderr, sep="\n", flush=True)
            why = " ".join(done.stderr.splitlines()[-3:]) if done.returncode else ""
            return name, why[:500], read(own / ("host_waits.jsonl" if host_waits else "metrics.jsonl"))

        yield from pool.map(run, overrides)
