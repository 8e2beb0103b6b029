"""Families of transformers on ranks give the loss and gradients of one process with transformers' own attention."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.huggingface.args import args_from_config
from models.huggingface.model import HuggingFaceModel
from tests.support.deep import deep_rows
from tests.support.huggingface_families import FAMILIES, ON_RANKS, random_weights
from tests.support.huggingface_parity import compare_compiled, compare_on_ranks, write_family
from tests.support.linear_cases import count_bytes, make_cp
from tests.support.rank_pool import RankPool
from torchtitan_cp.training.model import LayerAttention

RING = "--context_parallel.strategy=ring"
ALL_TO_ALL = "--context_parallel.strategy=all_to_all"
BOTH = "--context_parallel.strategy=hybrid --context_parallel.all_to_all_ranks=2"
FULL = "--activation.checkpoint=full"
SELECTIVE = f"{RING} --activation.checkpoint=selective"
SAVED = "--activation.checkpoint=attention_saved"
# torch.compile takes no layer that hands its keys on from within a part that is recomputed.
HAND_KEYS_ON = ("Gemma 4",)
HYBRIDS = ("Nemotron-H", "Qwen3-Next", "Kimi Linear", "Granite 4 hybrid", "LFM2")


@deep_rows("family", ON_RANKS, default=[])
def test_two_ranks_by_ring_compiled_and_recomputed_give_the_gradients_of_eager_attention(
    ranks: Callable[[int], RankPool], tmp_path: Path, family: str
) -> None:
    recomputed = [] if family in HAND_KEYS_ON else [FULL]
    path = write_family(tmp_path, family)
    ranks(2)(compare_compiled, path, family, "--parallel.cp=2", RING, *recomputed)[0].check()


@deep_rows("family", ON_RANKS, default=["Gemma 3"])
def test_four_ranks_by_all_to_all_and_recomputed_give_the_gradients_of_eager_attention(
    ranks: Callable[[int], RankPool], tmp_path: Path, family: str
) -> None:
    path = write_family(tmp_path, family)
    ranks(4)(compare_on_ranks, path, family, "--parallel.cp=2", ALL_TO_ALL, SAVED)[0].check()


@deep_rows(
    ("family", "layout", "strategy"),
    [
        *itertools.product(HYBRIDS, ("zigzag", "documents"), (RING, ALL_TO_ALL)),
        *itertools.product(HYBRIDS, ("zigzag",), (SELECTIVE,)),
        ("LFM2", "zigzag", BOTH),
    ],
    default=[("Nemotron-H", "zigzag", RING), ("Kimi Linear", "documents", ALL_TO_ALL)],
)
def test_states_that_pass_between_four_ranks_give_the_gradients_of_one_process(
    ranks: Callable[[int], RankPool], tmp_path: Path, family: str, layout: str, strategy: str
) -> None:
    path = write_family(tmp_path, family)
    options = ("--parallel.cp=4", f"--context_parallel.layout={layout}", FULL, *strategy.split())
    ranks(4)(compare_on_ranks, path, family, *options)[0].check()


SHARED_EXPERTS = ("Qwen3-MoE", "DeepSeek-V3", "Qwen3-Next", "Nemotron-H")


@deep_rows(
    ("family", "compiled"),
    itertools.product((*SHARED_EXPERTS, "gpt-oss", "Kimi Linear"), (False, True)),
    default=[("DeepSeek-V3", False), ("Qwen3-MoE", True)],
)
def test_two_ranks_that_share_experts_give_the_gradients_of_eager_attention(
    ranks: Callable[[int], RankPool], tmp_path: Path, family: str, compiled: bool
) -> None:
    path, run = write_family(tmp_path, family), compare_compiled if compiled else compare_on_ranks
    found = ranks(2)(run, path, family, "--parallel.cp=2", "--parallel.ep=2", FULL)[0]
    assert abs(found.loss - found.eager_loss) <= 1e-5 * found.eager_loss
    assert max(found.errors.values()) <= 1e-5, found.errors


def count_layer_bytes(family: str, layout: str) -> tuple[int, int]:
    """On a rank: bytes that the first layer's convolution and recurrence send forward and backward, in fp32."""
    args, plan = args_from_config(FAMILIES[family], {}), make_cp(layout).plan(128)
    model = HuggingFaceModel(args, LayerAttention())
    random_weights(model, 0)
    model.shared.plans = {0: plan}
    linear = args.probe.layers[0].linear
    assert linear
    outs: list[Tensor] = []
    forward = count_bytes(
        lambda: outs.append(model.get_submodule(linear.module)(plan.shard(torch.ones(1, 128, args.dim))))
    )
    return forward, count_bytes(lambda: outs[0].sum().backward())


@pytest.mark.parametrize(
    ("family", "layout", "size", "segments", "a_map"),
    [("Nemotron-H", "zigzag", 2, 3, lambda k: k), ("Qwen3-Next", "contiguous", 4, 4, lambda k: k * k)],
)
def test_a_layer_sends_its_states_and_the_halos_of_its_convolution(
    ranks: Callable[[int], RankPool], family: str, layout: str, size: int, segments: int, a_map: Callable[[int], int]
) -> None:
    """The formula of docs/linear_attention.md, for a document over `segments` segments, of all ranks together."""
    linear = args_from_config(FAMILIES[family], {}).probe.layers[0].linear
    assert linear
    answers = ranks(size)(count_layer_bytes, family, layout)
    state, transition = 4 * linear.state_size, 4 * linear.value_heads * a_map(linear.key_dim)
    # All but the last segment send B, and all but the first get a state; the inner ones send A too.
    states = 2 * (segments - 1) * state
    halos = (segments - 1) * (linear.conv_width - 1) * linear.conv_channels * 4
    forward = (states + (segments - 2) * transition) * (size - 1) // size + halos
    assert sum(sent for sent, _ in answers) == forward
    assert sum(sent for _, sent in answers) == states * (size - 1) // size + 2 * halos
