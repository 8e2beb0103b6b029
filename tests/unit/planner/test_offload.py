"""What copies to the host and back, and updates there, cost beside the work that hides them."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from torch import nn

from models import ARCHITECTURES
from tests.support.long_plans import LONG, alone, estimates
from torchtitan_cp.config import load_config
from torchtitan_cp.parallel.lora import apply_lora
from torchtitan_cp.planner.devices import HOST_UPDATE_BANDWIDTH, PAGEABLE, make_cluster
from torchtitan_cp.planner.estimate import Estimate, plan_config
from torchtitan_cp.planner.offload import HOST_UPDATE, OFFLOAD, exposed_copies, exposed_outer_copies
from torchtitan_cp.planner.parameters import total_parameters
from torchtitan_cp.training.registry import empty_model, register

RATE = 50e9  # bytes/s of an H100's link to its host
FOUR = "--curriculum.stages=[{seq_len = 131072, steps = 1, global_batch_tokens = 524288}]"


def test_activations_cost_what_a_layers_forward_and_backward_do_not_hide() -> None:
    planned = alone("--activation.offload=true")
    copied = 131072 * 4096 * 2 / RATE  # a block's input
    assert exposed_copies(planned, 0.0, 0.0) == pytest.approx(2 * copied)
    assert exposed_copies(planned, 0.75 * copied, 2 * copied) == pytest.approx(0.25 * copied)
    assert exposed_copies(alone(), 0.0, 0.0) == 0
    assert planned.offload_seconds == 0  # attention at 128K hides them


def test_weights_come_with_each_gather_and_gradients_of_later_micro_batches_are_waited_for() -> None:
    one, four = (alone("--parallel.fsdp_cpu_offload=true", *more) for more in ((), (FOUR,)))
    shard = 4 * one.counts.block
    assert exposed_copies(one, 0.0, 0.0) == pytest.approx(2 * shard / RATE)
    waited = shard / RATE / PAGEABLE + 3 * shard / HOST_UPDATE_BANDWIDTH
    assert exposed_copies(four, 0.0, 0.0) == pytest.approx(2 * shard / RATE + 3 / 4 * waited)
    assert exposed_copies(four, 100.0, 100.0) == pytest.approx(3 / 4 * waited)
    outer = 4 * one.ranks[0].outer_parameters
    assert exposed_outer_copies(one, one.ranks[0]) == pytest.approx(2 * outer / RATE)


@pytest.mark.parametrize("base", ["bfloat16", "nf4"])
def test_frozen_weights_are_copied_as_they_are_stored(base: str) -> None:
    """Those of a real model: in bf16 or NF4, and in fp32 what is trained, whose gradients alone come back."""
    sizes = "{dim = 128, n_layers = 2, n_heads = 4, n_kv_heads = 2, head_dim = 32, ffn_dim = 256, vocab_size = 512}"
    lora = ("--lora.rank=4", "--lora.train=['norm', 'embed']", f"--lora.base={base}")
    planned = alone("--parallel.fsdp_cpu_offload=true", f"--model.overrides={sizes}", *lora)
    config = planned.config
    assert config.lora
    model = empty_model(config.model, planned.args)
    apply_lora(model, config.lora)

    def bytes_of(parameters: Iterable[nn.Parameter], trained: bool) -> int:
        return sum(p.nbytes for p in parameters if p.requires_grad or not trained)

    block, everything = list(model.layers["0"].parameters()), list(model.parameters())
    shard, gradients = (bytes_of(block, trained) for trained in (False, True))
    assert 2 * gradients < shard
    assert exposed_copies(planned, 0.0, 0.0) == pytest.approx(2 * shard / RATE)  # which hide the gradients' way out
    kept = planned.with_config(config.with_keys(parallel={"fsdp_reshard": "never"}))
    assert exposed_copies(kept, 0.0, 0.0) == pytest.approx((shard + gradients) / RATE)
    outer = [bytes_of(everything, trained) - 2 * each for trained, each in ((False, shard), (True, gradients))]
    assert exposed_outer_copies(planned, planned.ranks[0]) == pytest.approx(sum(outer) / RATE)
    assert planned.host["weights"] >= bytes_of(everything, trained=False)


def test_a_pipeline_copies_its_weights_once_a_step() -> None:
    pipeline = ("--parallel.pp=4", "--parallel.fsdp_cpu_offload=true", "--compile.enable=false")
    planned = estimates(LONG, *pipeline, nodes=32)[0]
    assert planned.stage.micro_batches == 16
    shard = 4 * planned.counts.block / planned.degrees.fsdp / RATE
    assert exposed_copies(planned, 0.0, 0.0) == pytest.approx(2 * shard / 16)


def test_an_update_of_state_on_the_host_takes_its_copies_or_the_hosts_time() -> None:
    there, waiting, on_host = (
        alone(*key) for key in ((), ("--optimizer.offload_state=true",), ("--parallel.fsdp_cpu_offload=true",))
    )
    parameters = total_parameters(there.config.model, there.args)
    on_device = there.seconds["optimizer"]
    assert there.offload_seconds == 0
    assert waiting.seconds["optimizer"] == on_host.seconds["optimizer"] == on_device
    # In and out on one stream, beside the update; the norm comes before it.
    assert waiting.offload_seconds == pytest.approx(2 * 8 * parameters / RATE - 7 / 9 * on_device)
    moved = (7 + 2) * 4 * parameters  # the update; the norm reads the gradients, and clipping writes them
    assert on_host.seconds[HOST_UPDATE] == pytest.approx(moved / HOST_UPDATE_BANDWIDTH - on_device)
    assert on_host.offload_seconds == on_host.seconds[HOST_UPDATE] + on_host.seconds[OFFLOAD]


def test_a_slower_link_costs_more() -> None:
    planned = alone("--activation.offload=true", "--activation.checkpoint=selective")
    slow = replace(planned.cluster, accelerator=replace(planned.cluster.accelerator, host_bandwidth=5e9))
    slower = Estimate(planned.config, planned.args, planned.stage, slow)
    assert slower.offload_seconds > 10 * planned.offload_seconds
    assert slower.memory.total == planned.memory.total


def test_offload_costs_what_it_cost_on_an_h200() -> None:
    """benchmarks/results/cuda_steps.md: 1.173 s and 1.536 s at 32,768 tokens; the host's launches were slower there."""
    register(ARCHITECTURES)
    stage = "--curriculum.stages=[{seq_len = 32768, steps = 1, global_batch_tokens = 32768}]"
    model = ("--model.flavor=1B", "--compile.enable=false", "--activation.checkpoint=selective")
    config = load_config(LONG, [stage, "--lr_scheduler.warmup_steps=0", *model])
    cluster = make_cluster("h200-141g", ranks_per_node=1)
    plain, offloaded = (
        plan_config(config.with_keys(activation={"offload": offload}), cluster)[0] for offload in (False, True)
    )
    assert offloaded.step_seconds - plain.step_seconds == pytest.approx(1.536 - 1.173, rel=0.15)
