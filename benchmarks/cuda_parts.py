"""What the parts of `benchmarks/cuda.sh` do: `python -m benchmarks.cuda_parts PART RESULTS [--rehearsal]`.

A part is the function of its name, in the module that `benchmarks/cuda.py` says. It writes each case as it comes, and
its module is imported for it alone: what one part lacks is no other's failure. In a rehearsal everything runs on the
CPU in its smallest size, the attention kernels of CUDA on stand-ins for their operators, and two ranks on gloo take the
place of two GPUs.
"""

import argparse
import importlib
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from benchmarks.cuda import CASES_FAILED, PARTS, ROOT
from benchmarks.cuda_record import Record, run_tests

KERNEL_TESTS, OFFLOAD_TESTS = "tests/unit/attention/test_kernels.py", "tests/unit/parallel/test_offload.py"
LINEAR_TESTS = "tests/unit/attention/linear/test_flash_linear.py"
FAMILY_TESTS = "tests/unit/models/huggingface/test_model.py"


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
    found, wrong = [], []
    for line in [*re.findall(r'^ *"([^"]+)', text, re.MULTILINE), "pytest", *["triton"] * (not record.rehearsal)]:
        wanted = Requirement(line)
        if wanted.marker and not wanted.marker.evaluate():
            continue
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"no {line}")
            continue
        found.append(f"{wanted.name} {version}")
        if not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"{found[-1]}, where {line} is needed")
    record.case("packages", not wrong, "; ".join(wrong), version=", ".join(found))
    torch = importlib.import_module("torch")
    gpus = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(number) for number in range(gpus)]
    version = f"{torch.__version__}, python {sys.version.split()[0]}, cuDNN {torch.backends.cudnn.version()}"
    version += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if gpus else ""
    record.case("torch", gpus > 0 or record.rehearsal, version=version, gpus=2 if record.rehearsal else gpus)
    record.case("devices", gpus > 0 or record.rehearsal, version=", ".join(names) or "CPU: a rehearsal")


# Tests ---------------------------------------------------------------------------------------------------------


def flash(record: Record) -> None:
    """Every tile, group of heads and dim, and packed documents."""
    smallest = " and (documents or heads1-dims0 and (full or causal))" if record.rehearsal else ""
    run_tests(record, KERNEL_TESTS, f"flash and not flash4{smallest}")


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
    """Those with most that is their own, in fp32; all 83 take minutes, as most need a kernel that is compiled."""
    telling = "(Gemma and (2 or 3)) or gpt-oss or (OLMo and 3) or DeepSeek-V3 or Qwen3-MoE or longrope"
    run_tests(record, FAMILY_TESTS, "cuda and Gemma and 3" if record.rehearsal else f"cuda and ({telling})")


def offload(record: Record) -> None:
    """On a CPU the copies are plain ones."""
    run_tests(record, OFFLOAD_TESTS, "gradients and first and not True" if record.rehearsal else "not True")
    if not record.rehearsal:
        run_tests(record, OFFLOAD_TESTS, "True")  # compiled blocks


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


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("results", type=Path)
    parser.add_argument("--rehearsal", action="store_true")
    options = parser.parse_args(arguments)
    record = Record(options.results, options.part, options.rehearsal)
    if options.rehearsal:
        importlib.import_module("tests.support.emulated_ops").install()
    (part,) = (part for part in PARTS if part.name == options.part)
    getattr(importlib.import_module(f"benchmarks.{part.module}"), part.name)(record)
    return CASES_FAILED if record.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
