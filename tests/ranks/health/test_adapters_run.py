"""A non-finite adapter, or its gradient, is named by layer and matrix, and made again offline from its bundle."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.deep import deep_rows
from tests.support.faulty_runs import LAYOUTS, watched_run
from tests.support.inject import Inject, replay_with_fault
from tests.support.rank_pool import RankPool
from tests.support.runs import IN_NF4
from torchtitan_cp.cli.replay import build
from torchtitan_cp.health.replay import Bundle, replay
from torchtitan_cp.parallel.nf4 import SHARDS_BYTES

LORA = ("--lora.rank=4", "--lora.train=['norm']")
STEPS = ("--curriculum.stages[0].steps=4", "--checkpoint.interval=1", "--checkpoint.asynchronous=false")
GRADIENT = Inject(step=2, rank=1, where="gradient", layer=1, module="feed_forward.w2", parameter="lora_a")
WEIGHT = Inject(step=4, rank=1, where="weight", layer=1, module="attention.wk", parameter="lora_b")


@deep_rows("layout", ["fsdp 2", "cp 2", "tp 2", "pp 2", "fsdp 2, NF4"], default=["fsdp 2"])
def test_an_adapter_that_is_not_finite_is_named_and_reproduced_offline(
    ranks: Callable[[int], RankPool], run_toml: Path, layout: str
) -> None:
    layout, _, base = layout.partition(", ")
    if base and not SHARDS_BYTES:
        pytest.skip("FSDP shards bytes from torch 2.13 on")
    size, overrides = LAYOUTS[layout]
    overrides = (*overrides, *(IN_NF4 if base else ()))
    folder = run_toml.parent / f"adapters-{layout.replace(' ', '-')}{base}"
    faults = {fault.step: fault for fault in (GRADIENT, WEIGHT)}
    named = {
        GRADIENT.step: ("layers.1.feed_forward.w2", "gradient of lora_a"),
        WEIGHT.step: ("layers.1.attention.wk", "parameter lora_b"),
    }
    for seen in ranks(size)(watched_run, run_toml, faults, f"--job.dump_folder={folder}", *LORA, *STEPS, *overrides):
        assert seen.bad == [*faults]
        for step, (module, quantity) in named.items():
            found = seen.diagnoses[step]
            assert (found["culprit"]["module"], found["culprit"]["quantity"]) == (module, quantity)
            assert (list(found["ranks"]), found["reproduces"]) == ([1], True)
            assert f"the {quantity} of {module} is nan" in found["summary"]
        # The checkpoint before it gives the struck adapter back; nothing else changes.
        assert seen.changed == (["layers.1.attention.wk.lora_b in step 4"] if seen.rank == 1 else [])
    for step, event in {
        GRADIENT.step: replay_with_fault(folder / "health" / f"step-{GRADIENT.step}", GRADIENT),
        WEIGHT.step: replay(Bundle.read(folder / "health" / f"step-{WEIGHT.step}"), build),
    }.items():
        assert event is not None
        assert (event.module, event.quantity, event.value) == (*named[step], "nan")
