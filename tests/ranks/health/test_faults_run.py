"""Faults in real runs: noticed on every rank in their step, their culprit named, and nothing poisoned."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.deep import deep_rows
from tests.support.faulty_runs import LAYOUTS, SHORT, Seen, local, watched_run
from tests.support.inject import Inject
from tests.support.rank_pool import RankPool
from torchtitan_cp.training.model import ParallelModel

PLACES = {
    "embedding": Inject(where="embedding"),
    "attention forward": Inject(where="forward", module="attention", kind="inf"),
    "MLP backward": Inject(where="backward", module="feed_forward"),
    "gradient": Inject(where="gradient", module="feed_forward.w2", kind="inf"),
    "data": Inject(where="data"),
}

# Ranks that read the same tokens, where a rank is not alone with them.
SHARING = {
    "tp 2": {0: [0, 1], 1: [0, 1]},
    "pp 2": {0: [0, 1], 1: [0, 1]},
    "pp 2, interleaved": {0: [0, 1], 1: [0, 1]},
    "pp 2, ZBV": {0: [0, 1], 1: [0, 1]},
    "tp 2 x pp 2": {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]},
}


def modules(layout: str) -> dict[str, str]:
    """What stands in this layout's blocks in place of Llama's modules."""
    return {"feed_forward": "experts", "feed_forward.w2": "router.gate"} if "experts" in layout else {}


def faults_of(layout: str) -> dict[int, Inject]:
    """Each place, on the first two ranks in turn, every second step from the third on.

    Every other layout begins with the second rank; a pipeline does not, as its embedding is on the first.
    """
    faults, first = [], 0 if "pp" in layout else list(LAYOUTS).index(layout) % 2
    for rank in (0, 1):
        for index, fault in enumerate(PLACES.values()):
            if (first + index) % 2 != rank:
                continue
            ranks_of_stage = 2 if layout.startswith("tp 2 x pp") else 1
            layer = rank // ranks_of_stage if "pp" in layout else 1 - rank
            module = modules(layout).get(fault.module, fault.module)
            faults.append(replace(fault, rank=rank, layer=layer, module=module))
    return {3 + 2 * index: replace(fault, step=3 + 2 * index) for index, fault in enumerate(faults)}


def check_culprit(layout: str, fault: Inject, found: dict[str, Any]) -> None:
    """The diagnosis names the module and rank of the fault."""
    culprit = found["culprit"]
    named = (culprit["module"], culprit["quantity"], culprit["direction"], list(found["ranks"]))
    block, rank = f"layers.{fault.layer}", fault.rank
    expected = {
        "embedding": ("tok_embeddings", "output", "forward", [rank]),
        "forward": (f"{block}.attention", "output", "forward", [rank]),
        "backward": (f"{block}.{fault.module}", "input gradient", "backward", [rank]),
        "gradient": (f"{block}.{fault.module}", "gradient of weight", "backward", [rank]),
        "data": ("data", "labels", "forward", SHARING.get(layout, {}).get(rank, [rank])),
    }
    assert named == expected[fault.where]
    assert found["reproduces"]


@deep_rows("layout", LAYOUTS, default=["cp 2"])
def test_a_fault_anywhere_is_noticed_in_its_step_and_changes_nothing_on_any_rank(
    ranks: Callable[[int], RankPool], run_toml: Path, layout: str
) -> None:
    size, overrides = LAYOUTS[layout]
    faults, steps = faults_of(layout), 7
    folder = f"--job.dump_folder={run_toml.parent / layout.replace(' ', '-')}"
    stage = (f"--curriculum.stages[0].steps={steps}", "--checkpoint.enable=false")
    for seen in ranks(size)(watched_run, run_toml, faults, folder, *stage, *overrides):
        assert seen.bad == list(faults)
        assert seen.changed == []
        assert [line["step"] for line in seen.lines if line["skipped"]] == list(faults)
        values = [line["loss"] for line in seen.lines if not line["skipped"]]
        assert len(values) == steps
        assert values[-1] < values[0]
        for step, fault in faults.items():
            check_culprit(layout, fault, seen.diagnoses[step])


def poisoned_shard(path: Path, *overrides: str) -> Seen:
    """On a rank: a run in which rank 1's shard of one gradient is NaN in step 3, after all ranks have summed it."""
    original = ParallelModel.forward_backward
    steps = 0

    def poisoned(model: ParallelModel, micro_batches: Any) -> Any:
        nonlocal steps
        steps += 1
        sums = original(model, micro_batches)
        # The fourth is the third again.
        if steps in (3, 4) and dist.get_rank() == 1:
            local(model.parts[0].layers["0"].attention.wq.weight.grad)[1, 2] = torch.nan  # type: ignore[union-attr, index]
        return sums

    ParallelModel.forward_backward = poisoned  # type: ignore[method-assign]
    try:
        return watched_run(path, {}, *overrides)
    finally:
        ParallelModel.forward_backward = original  # type: ignore[method-assign]


def test_nan_in_one_ranks_optimizer_input_reaches_no_moment(ranks: Callable[[int], RankPool], run_toml: Path) -> None:
    for seen in ranks(2)(poisoned_shard, run_toml, f"--job.dump_folder={run_toml.parent / 'shard'}", *SHORT):
        assert (seen.bad, seen.changed) == ([3], [])
        assert seen.findings[3][0].startswith("rank 1: a weight's gradient in block 0 is nan")
