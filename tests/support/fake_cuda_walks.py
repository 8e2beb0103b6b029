"""Walks of the trainer's step on a GPU that is not there, in one process for all of them, and what they are walks of.

PROGRAM reads (config, cases) as JSON and prints a line of JSON for each case, its walk or its error.
"""

import itertools
import json
import random
import subprocess
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from models import ARCHITECTURES
from tests.support.gpu_walker import gpu_walker
from torchtitan_cp.attention import AttentionMask
from torchtitan_cp.config import load_config
from torchtitan_cp.data.batches.micro_batches import BatchLayout
from torchtitan_cp.optim import adamw
from torchtitan_cp.parallel.offload import HostMemory
from torchtitan_cp.planner.dry_run import DryModel, stage_walker, with_shared_batches
from torchtitan_cp.planner.parameters import sized_model_args
from torchtitan_cp.training import model
from torchtitan_cp.training.registry import register
from torchtitan_cp.training.resolve import resolve_run

DEVICE, RANKS, SEQ_LEN = "h100-80g", 16, 512
BASE = (
    f"--curriculum.stages[0].seq_len={SEQ_LEN}", "--training.loss_chunk_tokens=128",
    "--training.compute_dtype=bfloat16",
)  # fmt: skip
SIZES = "dim = 64, n_heads = 8, n_kv_heads = 4, head_dim = 16, ffn_dim = 128"
GROUPS = SIZES.replace("64", "128")  # most weights are whole groups of NF4
NF4 = ("--lora.rank=4", "--lora.train=['norm']", "--lora.base=nf4")
DOCUMENTS = ((100, 301, 111),)

# What a walk is of: for each choice its options, as overrides of the config.
CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "exchange": {
        "ring": ("--context_parallel.strategy=ring",),
        "all_gather": ("--context_parallel.strategy=all_gather",),
        "all_to_all": ("--context_parallel.strategy=all_to_all",),
        "hybrid": ("--context_parallel.strategy=hybrid", "--context_parallel.all_to_all_ranks=2"),
    },
    "kernel": {name: (f"--context_parallel.kernel={name}",) for name in ("flash", "cudnn", "efficient", "flex")},
    "mask": {"causal": (), "window": (), "documents": ()},
    "dimensions": {
        "fsdp": (),
        "tp": ("--parallel.tp=2",),
        "pp": ("--parallel.pp=2",),
        "hsdp": ("--parallel.dp_replicate=2",),
        "tp and pp": ("--parallel.tp=2", "--parallel.pp=2"),
    },
    "activation": {
        "none": ("--activation.checkpoint=none",),
        "full": ("--activation.checkpoint=full", "--activation.mlp_tiles=2"),
        "selective": ("--activation.checkpoint=selective",),
        "attention_saved": ("--activation.checkpoint=attention_saved",),
        "offload": ("--activation.checkpoint=attention_saved", "--activation.offload=true"),
        "offload of all": ("--activation.checkpoint=none", "--activation.offload=true"),
    },
    "optimizer": {
        "fused": (),
        "offload_state": ("--optimizer.offload_state=true",),
        "8bit": ("--optimizer.state=8bit",),
        "8bit and offload_state": ("--optimizer.state=8bit", "--optimizer.offload_state=true"),
        "muon": ("--optimizer.name=muon",),
        "muon and offload_state": ("--optimizer.name=muon", "--optimizer.offload_state=true"),
        "fsdp_cpu_offload": ("--parallel.fsdp_cpu_offload=true",),
    },
    "float8": {
        "none": (),
        "rowwise": ("--training.float8=rowwise",),
        "tensorwise": ("--training.float8=tensorwise",),
        "kv": ("--context_parallel.kv_transfer=float8",),
    },
    "experts": {
        "none": (),
        "of all ranks": ("--model.architecture=moe",),
        "ep": ("--model.architecture=moe", "--parallel.ep=2"),
    },
}
Case = dict[str, str]
# The GPU comes first, since with it the program starts again, and what it imported until then it would import twice.
PROGRAM = """
import sys
from tests.support.fake_cuda import use_fake_cuda
if sys.argv[1] != "cpu":
    use_fake_cuda(sys.argv[1])
from tests.support.fake_cuda_walks import main
main()
"""


def accepted(case: Case) -> bool:
    """Whether a run would not refuse the combination."""
    linear = case.get("float8") in ("rowwise", "tensorwise")
    if linear and "tp" in case.get("dimensions", ""):
        return False
    return not (case.get("float8") == "kv" and case.get("exchange") in ("all_to_all", "hybrid"))


def pairwise_cases(seed: int = 0) -> list[Case]:
    """Few cases in which every accepted pair of choices of two kinds meets.

    Of an optimizer and an activation all 42 pairs are accepted, so no set is smaller. A case has a second micro-batch
    where it has a choice that no case before it has.
    """
    pairs = itertools.combinations(CHOICES, 2)
    left = {((a, x), (b, y)) for a, b in pairs for x in CHOICES[a] for y in CHOICES[b] if accepted({a: x, b: y})}
    draw, cases = random.Random(seed), list[Case]()
    while left:
        tries = []
        for _ in range(60):
            case = dict(draw.choice(sorted(left)))
            for kind in draw.sample(list(CHOICES), len(CHOICES)):
                able = [name for name in CHOICES[kind] if accepted({**case, kind: name})]
                gains = {name: len(left & _pairs({**case, kind: name})) for name in able}
                case.setdefault(kind, max(able, key=lambda name: (gains[name], draw.random())))
            tries.append(case)
        cases.append(max(tries, key=lambda case: len(left & _pairs(case))))
        left -= _pairs(cases[-1])
    met = set[tuple[str, str]]()
    for case in cases:
        chosen = set(case.items())
        if chosen - met:
            case["micro_batches"] = "two"
        met |= chosen
    return cases


def _pairs(case: Case) -> set[Any]:
    chosen = [(kind, case[kind]) for kind in CHOICES if kind in case]
    return set(itertools.combinations(chosen, 2))


def overrides(case: Case) -> list[str]:
    """Of the config, for a case; a kind that it leaves out takes its first choice, and it has one micro-batch.

    With tp or pp even a step of one sequence for each of four ranks has two.
    """
    tokens = SEQ_LEN * {"one": 4, "two": 8}[case.get("micro_batches", "one")]
    layers = f", n_layers = {case.get('layers', 2)}"
    window = ", windows = [0, 65]" if case.get("mask") == "window" else ""
    chosen = [option for kind, names in CHOICES.items() for option in names[case.get(kind, next(iter(names)))]]
    experts = (
        ", n_experts = 4, experts_per_token = 2, expert_bias = true" if "--model.architecture=moe" in chosen else ""
    )
    step = f"--curriculum.stages[0].global_batch_tokens={tokens}"
    base, sizes = (NF4, GROUPS) if case.get("base") == "nf4" else ((), SIZES)
    return [*BASE, step, "--parallel.cp=4", f"--model.overrides={{{sizes}{layers}{window}{experts}}}", *base, *chosen]


def walk_in_process(path: Path, cases: list[Case], device: str = DEVICE) -> list[dict[str, Any]]:
    """Each case's memory by kind and messages by operation, or its error, from one process of its own."""
    command = [sys.executable, "-c", PROGRAM, device]
    given = json.dumps([str(path), cases])
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line.removeprefix("walk: ")) for line in done.stdout.splitlines() if line.startswith("walk: ")]


def _walk(path: str, case: Case, device: str) -> dict[str, Any]:
    config = with_shared_batches(load_config(path, overrides(case)), RANKS)
    run = resolve_run(config, RANKS, sized_model_args(config))
    plain_plans, plain_rope = BatchLayout.plans, model.set_rope
    mask = AttentionMask(document_lengths=DOCUMENTS) if case.get("mask") == "documents" else None
    with ExitStack() as patches:
        patches.enter_context(patch.object(BatchLayout, "plans", lambda self: plain_plans(self, mask)))
        # Tensors of a small model are offloaded too.
        patches.enter_context(patch.object(HostMemory.__init__, "__defaults__", (1024,)))
        if case.get("fault") == "rope on the host":
            patches.enter_context(patch.object(model, "set_rope", lambda *given: plain_rope(*given[:-1], "cpu")))
        if case.get("measured") == "update":
            forward_backward = DryModel.forward_backward

            def then_start(dry: DryModel, batches: Any) -> Any:
                result = forward_backward(dry, batches)
                dry.tracker.start_peak()
                return result

            patches.enter_context(patch.object(DryModel, "forward_backward", then_start))
        if case.get("fault") == "whole state at once":
            patches.enter_context(patch.object(adamw, "parts", lambda groups: iter([groups])))
        walk = patches.enter_context(stage_walker(run, 0) if device == "cpu" else gpu_walker(run, 0))
        walked = walk(run.stages[0])
    sent: dict[str, int] = {}
    for message, times in walked.messages.items():
        sent[message.operation] = sent.get(message.operation, 0) + message.size_bytes * times
    return {"peak_bytes": walked.peak_bytes, "by_kind": walked.by_kind, "sent": sent}


def main() -> None:
    device = "cpu" if sys.argv[1] == "cpu" else "cuda"
    register(ARCHITECTURES)
    path, cases = json.load(sys.stdin)
    for case in cases:
        begun = time.perf_counter()
        try:
            result = _walk(path, case, device)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:600], "trace": traceback.format_exc()[-6000:]}
        print("walk:", json.dumps({"case": case, "seconds": time.perf_counter() - begun, **result}), flush=True)
