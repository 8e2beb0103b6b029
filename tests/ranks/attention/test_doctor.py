"""The doctor of a user's module: silent on a healthy one, and each of ten faults named with its layer and class."""

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.support.deep import deep_rows
from tests.support.patients import examined, intercepted
from tests.support.rank_pool import RankPool
from torchtitan_cp.attention import ContextParallel, doctor

LAYER = "layers.1.attention (SelfAttention)"
FAULTS = {
    "window": f"a window lost: {LAYER}: one process has 24, the ranks 0",
    "sink": f"a sink lost: {LAYER}: one process has a sink for each head",
    "cap": f"a soft cap lost: {LAYER}: one process has 4, the ranks 0",
    "scale": f"a dropped attention scale: {LAYER}: one process has 0.6, the ranks 0.3536",
    "documents": "documents leaking: layers.0.attention (SelfAttention): one process keeps documents apart",
    "positions": "positions counted by the model itself: rotary (Rotary): its output on a shard differs",
    "recurrence": "a recurrence or convolution: layers.1.mlp.conv (Conv1d): it moves information between tokens",
    "twice": "a sequence sharded twice: embed (Embedding): it gives 32 tokens on a rank, and a shard has 64",
    "average": "a loss averaged by shard: Decoder: no layer differs, but the ranks' shares sum to",
    "unreached": f"an attention that never reaches us: {LAYER}: it moves information between tokens",
}


@deep_rows("fault", FAULTS, default=["cap", "recurrence", "average"])
def test_a_fault_is_named_with_its_layer_and_class(ranks: Callable[[int], RankPool], fault: str) -> None:
    named, text, state_kept = ranks(2)(examined, fault)[0]
    assert f"NOT SAFE: {FAULTS[fault]}" in text
    assert FAULTS[fault].startswith(f"{named}: ")
    assert state_kept


@deep_rows("strategy", ["ring", "all_to_all"], default=["ring"])
def test_a_healthy_module_is_safe_and_its_layers_are_told(ranks: Callable[[int], RankPool], strategy: str) -> None:
    (fault, text, state_kept), other = ranks(2)(examined, "", strategy)
    assert (fault, state_kept) == ("", True)
    assert text == other[1], "every rank has the report"
    lines = text.splitlines()
    cells = lines[2].split()
    assert cells[:8] == ["layers.1.attention", "SelfAttention", "4/4", "8/8", "0.6", "24", "4.0", "True"]
    assert cells[8:] == ["attend", f"{strategy},", "2", "ranks"]
    assert "tokens are mixed outside of attention in: no layer" in lines
    assert "token 38 changed: with it 90 positions from 38 to 127 on one process, 90 positions from 38 to 127" in text
    assert "token 37 changed: with it position 37 alone on one process, position 37 alone on the ranks" in text
    assert lines[-1] == "safe: nothing differs"


@pytest.mark.deep
@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ("", "safe: nothing differs"),
        ("positions", "NOT SAFE: refused: "),
        ("recurrence", "NOT SAFE: a recurrence or convolution: conv (Conv1d): it moves information between tokens"),
        (
            "documents",
            "NOT SAFE: documents leaking: attention (SdpaAttention): the ranks keep documents apart, and one process",
        ),
        (
            "chunks",
            "NOT SAFE: chunks lost: attention (SdpaAttention): one process attends within chunks of 80 tokens, the",
        ),
        ("by hand", "NOT SAFE: an attention that never reaches us: attention (SdpaAttention): it moves information"),
    ],
)
def test_a_module_that_calls_sdpa_needs_no_step_of_its_own(
    ranks: Callable[[int], RankPool], fault: str, verdict: str
) -> None:
    assert verdict in ranks(2)(intercepted, fault)[0]


def diagnosed_family(family: str, window: int) -> str:
    """On a rank: the verdict on a family of transformers with sdpa, whose window or chunk has `window` tokens."""
    sdpa_families = pytest.importorskip("tests.support.sdpa_families")
    model, length = sdpa_families.sdpa_model(sdpa_families.ALL[family], window), sdpa_families.LENGTH
    ids = torch.randint(3, sdpa_families.VOCABULARY, (1, length), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(length)[None]}
    batch |= {"labels": ids.roll(-1, 1), "shift_labels": ids.roll(-1, 1)}
    cp = ContextParallel(init_device_mesh("cpu", (torch.distributed.get_world_size(),)), "ring")
    return doctor(model, cp, batch).text.splitlines()[-1]


def test_chunks_of_a_family_of_transformers_are_named_as_the_cause(ranks: Callable[[int], RankPool]) -> None:
    pytest.importorskip("transformers")
    verdict = ranks(2)(diagnosed_family, "Llama 4", 36)[0]
    assert verdict.startswith("NOT SAFE: refused: ")
    assert "Llama4TextAttention has attention_chunk_size = 36" in verdict
