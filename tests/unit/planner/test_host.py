"""What a node's host memory holds."""

import pytest

from tests.support.long_plans import LONG, alone, estimates
from torchtitan_cp.config import load_config
from torchtitan_cp.data.batches.loader import READ_AHEAD
from torchtitan_cp.planner.devices import make_cluster
from torchtitan_cp.planner.estimate import plan_config
from torchtitan_cp.planner.parameters import total_parameters


def test_host_memory_is_what_is_offloaded_the_batches_and_a_checkpoints_copy() -> None:
    plain = alone("--checkpoint.enable=false")
    parameters = total_parameters(plain.config.model, plain.args)
    batches = plain.host["batches"]
    assert sum(plain.host.values()) == batches == 2 * (READ_AHEAD + 1) * 131072 * 2 * 8
    offloaded = alone("--checkpoint.enable=false", "--activation.offload=true").host
    assert offloaded["activations"] == 32 * 131072 * 4096 * 2  # the input of each layer, a power of two
    weights = alone("--parallel.fsdp_cpu_offload=true").host
    # A matrix of the MLP has 4,096 x 14,336 numbers, and pinned memory is taken in powers of two.
    assert weights["weights"] == weights["gradients"] == pytest.approx(4 * parameters * 16384 / 14336)
    assert weights["optimizer"] == 8 * parameters
    assert weights["checkpoint"] == 12 * parameters
    assert alone("--optimizer.offload_state=true").host["optimizer"] == pytest.approx(8 * parameters * 16384 / 14336)


@pytest.mark.parametrize("seq_len", [98304, 131072, 131073])
def test_pinned_activations_take_the_next_power_of_two(seq_len: int) -> None:
    length = f"--curriculum.stages=[{{seq_len = {seq_len}, steps = 1, global_batch_tokens = {seq_len}}}]"
    host = alone("--activation.offload=true", length).host
    assert host["activations"] == 32 * (2**30 if seq_len <= 131072 else 2**31)


def test_ranks_of_a_node_share_its_host() -> None:
    one, eight = (
        estimates(LONG, "--activation.offload=true", "--parallel.dp_replicate=1", nodes=nodes)[2] for nodes in (8, 16)
    )
    assert one.host["activations"] == eight.host["activations"]
    fewer = make_cluster("h100-80g", 16, ranks_per_node=4)
    (_, _, half, *_) = plan_config(load_config(LONG, ["--activation.offload=true"]), fewer)
    assert half.host["activations"] == one.host["activations"] / 2


def test_a_part_of_a_node_has_its_share_of_the_hosts_memory_unless_it_is_given() -> None:
    whole, part, given = (make_cluster("h100-80g", ranks_per_node=8), alone().cluster, alone(host_bytes=9e11).cluster)
    assert whole.accelerator.host_bytes == 8 * part.accelerator.host_bytes == 2e12
    assert given.accelerator.host_bytes == 9e11


def test_on_a_cpu_nothing_is_offloaded() -> None:
    """A run says that it is inactive there: all is in host memory."""
    offloads = ("parallel.fsdp_cpu_offload", "optimizer.offload_state", "activation.offload")
    config = "train_configs/stdlib_on_cpu.toml"
    plain, offloaded = (
        estimates(config, *(f"--{key}={value}" for key in offloads), nodes=1, device="cpu")
        for value in ("false", "true")
    )
    assert [each.memory.total for each in offloaded] == [each.memory.total for each in plain]
    assert [each.host for each in offloaded] == [each.host for each in plain]
