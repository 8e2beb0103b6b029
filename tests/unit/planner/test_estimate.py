"""Estimates that follow from what changes: lengths, ranks, networks, activation modes and kernels."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import rms_norm
from torch.utils.flop_counter import FlopCounterMode

from models import ARCHITECTURES
from models.llama import Llama
from tests.support.long_plans import LONG, alone, estimates
from tests.support.small_moe import make_mixture
from torchtitan_cp.attention import make_plan
from torchtitan_cp.config import load_config
from torchtitan_cp.config.training import Lora
from torchtitan_cp.parallel.activation import checkpointed
from torchtitan_cp.parallel.lora import apply_lora
from torchtitan_cp.parallel.nf4 import GROUP, PRODUCT, fill_tables
from torchtitan_cp.planner.devices import make_cluster
from torchtitan_cp.planner.estimate import Estimate, _elementwise_bytes, _fsdp_exposed, _outer_seconds, plan_config
from torchtitan_cp.planner.memory import block_bytes, kept_bytes
from torchtitan_cp.planner.parameters import total_parameters
from torchtitan_cp.training.model import LayerAttention, cast_parameters
from torchtitan_cp.training.registry import register


def test_seconds_of_a_step_are_the_sum_of_their_kinds_and_mfu_follows() -> None:
    for estimate in estimates(LONG):
        assert all(value >= 0 for value in estimate.seconds.values())
        flops = estimate.linear_flops + estimate.attention_flops
        assert estimate.mfu == pytest.approx(flops / sum(estimate.seconds.values()) / (64 * 989e12))
        assert estimate.tokens_per_second * estimate.step_seconds == pytest.approx(4_194_304)


def test_a_step_takes_longer_and_more_memory_at_a_longer_length_on_the_same_ranks() -> None:
    long, longer = (
        estimates(
            LONG, f"--curriculum.stages[5].seq_len={length}", "--curriculum.stages[5].global_batch_tokens=4194304"
        )
        for length in (524288, 1048576)
    )
    assert longer[5].step_seconds > 1.5 * long[5].step_seconds
    assert longer[5].memory.total > long[5].memory.total
    assert longer[5].linear_flops == long[5].linear_flops


def test_activation_modes_trade_memory_for_time_in_their_order() -> None:
    modes = [estimates(LONG, f"--activation.checkpoint={mode}")[2] for mode in ("none", "attention_saved", "full")]
    assert modes[0].memory.total > modes[1].memory.total > modes[2].memory.total
    assert modes[0].step_seconds < modes[1].step_seconds < modes[2].step_seconds


@pytest.mark.parametrize(
    ("device", "overrides", "kernel", "shares"),
    [
        ("h100-80g", (), "cudnn", (0.59, 0.54)),
        ("h100-80g", ("--data.document_mask=true",), "flash", (0.34, 0.32)),
        # Whether its package is installed is no matter to a plan.
        ("h100-80g", ("--data.document_mask=true", "--context_parallel.kernel=flash4"), "flash4", (0.69, 0.62)),
        ("h100-80g", ("--context_parallel.kernel=flash4",), "flash4", (0.69, 0.62)),
        ("h100-80g", ("--training.deterministic=true",), "flash", (0.34, 0.32)),
        ("h100-80g", ("--context_parallel.kernel=flash",), "flash", (0.34, 0.32)),
        ("h100-80g", ("--training.compute_dtype=float32",), "efficient", (0.34, 0.32)),
        ("a100-80g", (), "flash", (0.62, 0.52)),
        ("b200-192g", (), "cudnn", (0.45, 0.35)),
        ("cpu", (), "cpu", (0.50, 0.40)),
    ],
)
def test_attention_has_the_rate_of_the_kernel_that_auto_chooses(
    device: str, overrides: tuple[str, ...], kernel: str, shares: tuple[float, float]
) -> None:
    planned = estimates(LONG, *overrides, device=device, nodes=32 if device == "cpu" else 8)[0]
    dtype = planned.config.training.compute_dtype
    assert planned.kernel(0) == kernel
    rates = planned.rates(0)
    assert (rates.forward, rates.backward) == tuple(planned.cluster.rate(dtype, share) for share in shares)
    if kernel == "cudnn":
        assert planned.kernel(1024) == "flash"
        assert planned.rates(1024).forward < rates.forward
        assert planned.kernel(planned.stage.seq_len) == "cudnn"  # a window that hides nothing


def test_auto_plans_a_ring_for_layers_with_a_window_beside_heads_that_are_traded() -> None:
    traded = ("--model.overrides.n_kv_heads=32", "--curriculum.stages[2].cp=8", "--curriculum.stages[2].strategy=auto")
    planned = estimates(LONG, *traded, "--model.overrides.windows=[0, 1024]")[2]
    assert planned.strategy == planned.layer_strategy(planned.stage.seq_len) == "all_to_all"
    assert planned.layer_strategy(1024) == "ring"


@pytest.mark.parametrize(("schedule", "held"), [("1f1b", [4, 3, 2, 1]), ("zbv_zero_bubble", [4] * 4)])
def test_a_pipeline_rank_holds_the_micro_batches_that_wait_for_their_backward(
    monkeypatch: pytest.MonkeyPatch, schedule: str, held: list[int]
) -> None:
    monkeypatch.setattr("torchtitan_cp.parallel.pipeline_stages.SPLITS_ANY_BACKWARD", True)  # torch 2.13 does
    pipeline = (
        "--parallel.pp=4",
        f"--parallel.pp_schedule={schedule}",
        "--compile.enable=false",
        "--activation.checkpoint=full",
    )
    planned = estimates(LONG, *pipeline, nodes=32)[0]
    assert planned.stage.micro_batches == 16
    assert [own.kept_layers / own.layers for own in planned.ranks] == held


def test_a_slower_network_costs_a_ring_across_nodes_and_nothing_inside_one() -> None:
    register(ARCHITECTURES)
    config = load_config(LONG, ["--context_parallel.strategy=ring", "--curriculum.stages[5].strategy=ring"])
    fast, slow = (plan_config(config, make_cluster("h100-80g", 8, network_bandwidth=rate)) for rate in (50e9, 1e9))
    assert slow[5].exposed_seconds > 2 * fast[5].exposed_seconds
    messages = "context-parallel messages"
    assert slow[2].seconds[messages] == fast[2].seconds[messages]


def test_shards_shrink_with_the_ranks_and_the_pipelines_bubble_with_the_micro_batches() -> None:
    small, large = (estimates(LONG, "--curriculum.stages[0].global_batch_tokens=8388608", nodes=n)[0] for n in (8, 16))
    assert large.memory.by_kind["weights"] == small.memory.by_kind["weights"] / 2
    assert large.memory.by_kind["optimizer"] == small.memory.by_kind["optimizer"] / 2
    few, many = (
        estimates(LONG, "--parallel.pp=4", f"--curriculum.stages[1].global_batch_tokens={batch}", nodes=32)[1]
        for batch in (4_194_304, 8_388_608)
    )
    share = [estimate.seconds["pipeline bubble"] / estimate.step_seconds for estimate in (few, many)]
    assert share[1] < share[0]


def test_replicas_on_other_nodes_wait_for_the_gradients_of_embedding_and_output_too() -> None:
    register(ARCHITECTURES)
    stages = "--curriculum.stages=[{seq_len = 4096, steps = 1, global_batch_tokens = 8388608}]"
    config = load_config(LONG, [stages, "--lr_scheduler.warmup_steps=0", "--parallel.dp_replicate=8"])
    clusters = [make_cluster("h100-80g", 8, network_bandwidth=rate) for rate in (50e9, 1e9)]
    often = config.with_keys(parallel={"fsdp_cpu_offload": True})  # in each micro-batch
    plans = [plan_config(*pair)[0] for pair in ((config, clusters[0]), (config, clusters[1]), (often, clusters[1]))]
    fast, slow, each = (_outer_seconds(estimate, estimate.ranks[0])["FSDP messages"] for estimate in plans)
    assert slow > 2 * fast
    times = plans[0].stage.micro_batches
    assert slow < each < times * slow


def test_state_that_waits_on_the_host_is_not_on_the_device() -> None:
    tight = ("--activation.checkpoint=full", "--activation.mlp_tiles=8", "--model.flavor=70B")
    stages = [f"--curriculum.stages[{index}].cp=8" for index in range(6)]
    waiting, there = (
        estimates(LONG, *tight, *stages, f"--optimizer.offload_state={offload}", nodes=1)[0]
        for offload in ("true", "false")
    )
    moments = 8 * total_parameters(there.config.model, there.args) / 8
    assert waiting.memory.total == pytest.approx(there.memory.total - moments)


def test_a_pipeline_saves_nothing_by_freeing_its_weights_and_gathers_them_more_often() -> None:
    pipe = "--parallel.pp=2"
    auto, always = (estimates(LONG, pipe, f"--parallel.fsdp_reshard={how}", nodes=16)[0] for how in ("auto", "always"))
    assert always.memory.total == auto.memory.total
    assert always.step_seconds >= auto.step_seconds


@pytest.mark.parametrize(
    ("mode", "compiled", "times"),
    [
        ("none", "false", 1),
        ("selective", "false", 1),
        ("attention_saved", "false", 1 / 3),
        ("full", "false", 1 / 3),
        ("none", "true", 2 / 3),
        ("full", "true", 0),
    ],
)
def test_tiles_of_an_mlp_run_again_for_themselves_and_not_with_their_block(
    mode: str, compiled: str, times: float
) -> None:
    """Selective recomputation keeps the products of whole MLPs alone.

    Neither whole MLPs nor compiled tiles repeat the last product.
    """
    options = (f"--activation.checkpoint={mode}", f"--compile.enable={compiled}")
    whole, tiled = (estimates(LONG, *options, f"--activation.mlp_tiles={tiles}")[0] for tiles in (1, 8))
    seconds = tiled.seconds["linear layers"] - whole.seconds["linear layers"]
    forward = 32 * 3 * 2 * 4096 * 14336 * 4_194_304 / 64
    assert seconds == pytest.approx(times * forward / (989e12 * whole.cluster.accelerator.linear))


@pytest.mark.parametrize("mode", ["full", "attention_saved", "selective"])
def test_a_compiled_mixture_keeps_what_passes_between_its_halves_and_half_of_the_gates_bytes_move(mode: str) -> None:
    model = ("--model.architecture=moe", "--model.flavor=qwen3-30B-A3B", "--parallel.ep=8")
    plain, compiled = (
        estimates(LONG, *model, f"--activation.checkpoint={mode}", f"--compile.enable={enable}", nodes=16)[0]
        for enable in ("false", "true")
    )
    inputs, *others = (one - other for one, other in zip(*(_kept(x) for x in (compiled, plain)), strict=True))
    assert others == [0.0, 0.0]
    assert inputs == (0 if mode == "selective" else compiled.tokens * 2048 * 2)
    saved = _elementwise_bytes(plain) - _elementwise_bytes(compiled)
    assert saved == compiled.tokens * 2 * 0.5 * (7 * 2048 + 8 * 36 * 128 + 6 * 8 * 768)
    again = plain.seconds["linear layers"] - compiled.seconds["linear layers"]
    product = 2 * 2048 * 32 * 128 * compiled.tokens * compiled.stage.micro_batches * 48 * (mode != "selective")
    assert again == pytest.approx(product / (989e12 * compiled.cluster.accelerator.linear))
    assert not plain.compiled.halves
    assert compiled.compiled == (True, False, True)


def _kept(planned: Estimate) -> tuple[float, float, float]:
    return kept_bytes(planned, block_bytes(planned))


def quantized_flops(x: torch.Size, rows: torch.Size, *_: object, **__: object) -> int:
    return 2 * math.prod(x[:-1]) * rows[0] * GROUP


def count_flops(forward: Callable[..., Tensor], inputs: Sequence[object], *, compiled: bool) -> int:
    """FLOPs of a forward and its backward. Around compiled code torch's counter would keep it from running."""
    counters = list[FlopCounterMode]()

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        def with_counter(*inputs: object) -> Any:
            counter = FlopCounterMode(display=False, custom_mapping={PRODUCT._overloadpacket: quantized_flops})
            counters.append(counter)
            with counter:
                return run(*inputs)

        return with_counter

    def forward_backward(*inputs: object) -> None:
        forward(*inputs).sum().backward()

    if compiled:

        def count_graph(graph: torch.fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
            return make_boxed_func(counted(graph.forward))

        partition = min_cut_rematerialization_partition
        backend = aot_autograd(fw_compiler=count_graph, bw_compiler=count_graph, partition_fn=partition)
        forward = torch.compile(forward, backend=backend, fullgraph=True)
        forward_backward(*inputs)
        assert len(counters) == 2
    else:
        counted(forward_backward)(*inputs)
    return sum(counter.get_total_flops() for counter in counters)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_recomputed_block_does_not_repeat_its_last_product_unless_a_norm_follows(compiled: bool) -> None:
    up, down, x = (torch.randn(shape, requires_grad=True) for shape in ((8, 32), (32, 8), (4, 8)))
    weight = torch.ones(8, requires_grad=True)

    def block(rows: Tensor, norm: bool) -> Tensor:
        out = torch.relu(rows @ up) @ down
        return rms_norm(out, (8,), weight) if norm else out

    again = checkpointed(block, "full", None, compiled=compiled)
    for norm, products in ((False, 1), (True, 2)):
        assert count_flops(again, [x, norm], compiled=compiled) == (6 * 2 + 2 * products) * 4 * 8 * 32
    none, full = (estimates(LONG, f"--activation.checkpoint={mode}")[0] for mode in ("none", "full"))
    again = full.seconds["linear layers"] - none.seconds["linear layers"]
    matrices = full.counts.active_matrices - 4096 * 14336
    assert again == pytest.approx(32 * 2 * matrices * 4_194_304 / 64 / (989e12 * full.cluster.accelerator.linear))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("options", "repeats"),
    [
        ({"targets": ("wq", "w2")}, True),
        ({"targets": ("wq",)}, False),
        ({"targets": ("wq",), "base": "nf4"}, True),
    ],
)
def test_uncompiled_a_recomputed_block_repeats_a_last_product_with_an_adapter_or_in_nf4(
    options: dict[str, Any], repeats: bool, compiled: bool
) -> None:
    """It saves the narrow rows of an adapter behind the product, and NF4's own operator saves when it has run."""
    sizes = "{dim = 128, n_layers = 1, n_heads = 4, n_kv_heads = 2, head_dim = 32, ffn_dim = 256, vocab_size = 128}"
    chosen = [f"--lora.{name}={json.dumps(value)}" for name, value in {"rank": 4, **options}.items()]
    planned = alone(f"--model.overrides={sizes}", f"--compile.enable={json.dumps(compiled)}", *chosen)
    model = Llama(planned.args, LayerAttention())
    apply_lora(model, Lora(4, **options))
    fill_tables(cast_parameters(model, torch.float32), torch.device("cpu"))
    model.set_rope([1.0] * 16, 1.0, torch.device("cpu"))
    plan, forward = make_plan(32), model.layers["0"].forward
    inputs = torch.randn(1, 32, 128, requires_grad=True), *model._rotations(plan.positions), {0: plan}
    again = checkpointed(forward, "full", None, compiled=compiled)
    once, twice = (count_flops(run, inputs, compiled=compiled) for run in (forward, again))
    assert (planned.unrepeated_product == 0) == (repeats and not compiled)
    weights = planned.counts.active_matrices + planned.trained.adapters - planned.unrepeated_product
    assert twice - once == pytest.approx(2 * 32 * weights, rel=1e-2)  # without the last adapter's second matrix


def test_a_first_half_that_is_recomputed_does_not_repeat_the_attentions_last_product() -> None:
    model, plan = make_mixture(), make_plan(32)
    layer: Any = model.layers["0"]
    inputs = torch.randn(1, 32, 32, requires_grad=True), *model._rotations(plan.positions), {0: plan}
    again = checkpointed(layer.attention_half, "full", None, compiled=True)
    once, twice = (count_flops(run, inputs, compiled=True) for run in (layer.attention_half, again))
    repeated = [layer.attention.wq, layer.attention.wk, layer.attention.wv]
    assert twice - once == 2 * 32 * sum(linear.weight.numel() for linear in repeated)


def test_weights_that_are_freed_are_gathered_again_for_each_forward_and_backward() -> None:
    register(ARCHITECTURES)
    cluster = make_cluster("h100-80g", 8)
    never, always = (
        plan_config(load_config(LONG, [f"--parallel.fsdp_reshard={how}"]), cluster)[0] for how in ("never", "always")
    )
    times, rank = always.stage.micro_batches, always.ranks[0]
    assert times > 1
    block, outer = (
        cluster.collective_seconds(2 * count, 64, 1) for count in (always.counts.block, rank.outer_parameters)
    )
    of_block = [_fsdp_exposed(planned, 0.0, 0.0) for planned in (always, never)]  # where nothing hides it
    assert of_block[0] - of_block[1] == pytest.approx((2 - 1 / times) * block)
    of_ends = [_outer_seconds(planned, rank)["FSDP messages"] for planned in (always, never)]
    assert of_ends[0] - of_ends[1] == pytest.approx((times - 1) * outer)
