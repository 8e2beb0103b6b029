"""Devices by their data sheets, and the fraction of their peak that kernels are assumed to reach."""

from dataclasses import dataclass, field, replace

import torch

from torchtitan_cp.attention.kernels.rates import find_rate
from torchtitan_cp.metrics.throughput import PEAK_FLOPS

GB, GIB = 1e9, 2**30
HOST_BYTES = 2e12


@dataclass(frozen=True)
class Accelerator:
    """One rank's device, by its data sheet, and the fraction of its peak that kernels reach.

    Attributes:
        peak_flops: dense, without sparsity, FLOP/s of bfloat16 and float32.
        memory_bytes: of the device, as torch reports it (a card of 80 GB has 79.1 GiB).
        memory_bandwidth: bytes/s.
        link_bandwidth: bytes/s a rank sends to others of its node, one direction.
        network_bandwidth: bytes/s a rank sends to other nodes: its share of the node's network cards.
        ranks_per_node: usual size of a node.
        latency_seconds: of one message.
        linear, attention_forward, attention_backward: ASSUMED fractions of the peak that large matrix products and
            attention kernels reach; kernels that have a rate in `kernels/rates.py` reach that.
        source: of the numbers that are not assumed.
        fused_norm: whether RMSNorm is one kernel that keeps only its input; otherwise it also keeps two fp32 copies.
        capability: see kernels.Case.
        measured: whether the fractions of attention hold for the kernel that runs, whatever its rate elsewhere.
        host_bytes: ASSUMED host memory of a node; 0: not known, or the device's.
        host_bandwidth: bytes/s between the device and pinned host memory, each way.
    """

    peak_flops: dict[torch.dtype, float] = field(hash=False)
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    ranks_per_node: int
    latency_seconds: float
    linear: float
    attention_forward: float
    attention_backward: float
    source: str
    fused_norm: bool = True
    capability: tuple[int, int] | None = None
    measured: bool = False
    host_bytes: float = 0.0
    host_bandwidth: float = 50e9

    def attention(self, kernel: str, head_dim: int, dense: bool = True) -> tuple[float, float]:
        """Fractions of the peak that an attention kernel reaches, forward and backward.

        Args:
            head_dim: the wider of Dqk and Dv; dense: whether all tiles are full or causal.
        """
        if self.measured or self.capability is None:
            return self.attention_forward, self.attention_backward
        # A kernel that is set for a mask of which it has no rate is taken to be as fast as on the other.
        rates = (find_rate(kernel, self.capability, head_dim, mask) for mask in (dense, not dense))
        rate = next(filter(None, rates), None)
        return (rate.forward, rate.backward) if rate else _usual(self.capability[0], head_dim)


def _usual(capability: int, head_dim: int = 128) -> tuple[float, float]:
    """The fractions that kernels without a rate of their own are ASSUMED to reach: those of `efficient`."""
    rate = find_rate("efficient", (capability, 0), head_dim, dense=True)
    assert rate is not None
    return rate.forward, rate.backward


# Links: half of NVLink's stated total, which counts both directions. Networks: a card of 200 Gb/s (A100) or 400 Gb/s
# for each GPU, as in DGX A100, H100, H200, B200. Attention: `kernels/rates.py`; an H200 has the processor of an H100.
# Host memory: as in DGX systems. Its link: PCIe 5 x16, of whose 64 GB/s 50 explain what offload cost on an H200
# (benchmarks/results/cuda_steps.md), or PCIe 4 x16, of whose 32 GB/s as many parts are assumed.
ACCELERATORS = {
    "h100-80g": Accelerator(
        PEAK_FLOPS["H100"], 79.1 * GIB, 3.35e12, 450e9, 50e9, 8, 15e-6, 0.70, *_usual(9),
        "NVIDIA H100 data sheet, SXM", capability=(9, 0), host_bytes=HOST_BYTES,
    ),
    "h200-141g": Accelerator(
        PEAK_FLOPS["H200"], 139.8 * GIB, 4.8e12, 450e9, 50e9, 8, 15e-6, 0.70, *_usual(9),
        "NVIDIA H200 data sheet, SXM", capability=(9, 0), host_bytes=HOST_BYTES,
    ),
    "a100-80g": Accelerator(
        PEAK_FLOPS["A100"], 79.1 * GIB, 2.039e12, 300e9, 25e9, 8, 15e-6, 0.75, *_usual(8),
        "NVIDIA A100 data sheet, SXM 80GB", capability=(8, 0), host_bytes=HOST_BYTES,
        host_bandwidth=25e9,
    ),
    "b200-192g": Accelerator(
        PEAK_FLOPS["B200"], 192 * GB, 8e12, 900e9, 50e9, 8, 15e-6, 0.65, *_usual(10),
        "NVIDIA Blackwell architecture brief, B200 SXM; its attention is assumed to gain little over Hopper's",
        capability=(10, 0), host_bytes=HOST_BYTES,
    ),
    # One core of a server with AVX-512: 2 products of 16 fp32 lanes a cycle at 2.5 GHz; bf16 without AMX is slower.
    "cpu": Accelerator(
        {torch.bfloat16: 80e9, torch.float32: 160e9}, 8 * GB, 10e9, 1.6e9, 1e9, 2, 4e-4, 0.60, 0.50, 0.40,
        "arithmetic of one AVX-512 core; 1.6 GB/s and 0.4 ms a message are gloo between two processes, measured", False,
    ),
}  # fmt: skip

# Assumed for every device.
USABLE_MEMORY = 0.92  # the rest: context, NCCL's buffers, fragmentation
BANDWIDTH = 0.80  # fraction of the rate of links and networks that messages of megabytes reach
MEMORY_BANDWIDTH = 0.75  # fraction that elementwise kernels reach
PAGEABLE = 0.25  # fraction of a device's rate to pinned host memory that copies to other host memory reach
HOST_UPDATE_BANDWIDTH = 25e9  # bytes/s at which the process of a rank adds up and updates what is in host memory
ASYNC_TP_EXPOSED = 0.3  # fraction of tensor-parallel messages that stays exposed if the compiler pipelines them


@dataclass(frozen=True)
class Cluster:
    """Equal nodes; the accelerator has the node's size and bandwidths too."""

    name: str
    accelerator: Accelerator
    nodes: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.accelerator.ranks_per_node

    @property
    def usable_bytes(self) -> float:
        """Memory of a rank that a step may use."""
        return self.accelerator.memory_bytes * USABLE_MEMORY

    @property
    def usable_host_bytes(self) -> float:
        """Host memory of a node that a step may use; 0 if it is not known."""
        return self.accelerator.host_bytes * USABLE_MEMORY

    def rate(self, dtype: str, share: float) -> float:
        """FLOP/s of a kernel that reaches `share` of the peak."""
        return self.accelerator.peak_flops[getattr(torch, dtype)] * share

    def memory_seconds(self, moved_bytes: float) -> float:
        """Time of kernels that only move so many bytes."""
        return moved_bytes / (self.accelerator.memory_bandwidth * MEMORY_BANDWIDTH)

    def message_seconds(self, sent_bytes: float, ranks: int, stride: int) -> float:
        """Time in which each rank of a group sends `sent_bytes` to another one.

        Args:
            ranks: size of the group; stride: difference between the numbers of neighbouring ranks.
        """
        inside = ranks * stride <= self.accelerator.ranks_per_node
        return self._seconds(sent_bytes, 0.0) if inside else self._seconds(0.0, sent_bytes)

    def collective_seconds(self, whole_bytes: float, ranks: int, stride: int) -> float:
        """Time to gather `whole_bytes` on every rank of a group, or to reduce-scatter as many.

        A node receives each byte from other nodes once, over the network cards of all its members.
        """
        members = self._members(ranks, stride)
        return self._seconds(whole_bytes * (members - 1) / members, whole_bytes * (ranks - members) / ranks / members)

    def all_to_all_seconds(self, sent_bytes: float, ranks: int, stride: int) -> float:
        """Time of an all-to-all in which each rank sends `sent_bytes` in equal parts to the others; 0 for one rank."""
        outside = sent_bytes * (ranks - self._members(ranks, stride)) / max(1, ranks - 1)
        return self._seconds(sent_bytes - outside, outside)

    def _members(self, ranks: int, stride: int) -> int:
        """How many ranks of a group share a node."""
        return max(1, min(ranks, self.accelerator.ranks_per_node // stride))

    def _seconds(self, inside_bytes: float, outside_bytes: float) -> float:
        """Time to send bytes over links inside the node and, at the same time, to other nodes: the slower counts."""
        if not inside_bytes + outside_bytes:
            return 0.0
        device = self.accelerator
        slower = max(inside_bytes / device.link_bandwidth, outside_bytes / device.network_bandwidth)
        return device.latency_seconds + slower / BANDWIDTH


def make_cluster(
    name: str,
    nodes: int = 1,
    measured: Accelerator | None = None,
    *,
    ranks_per_node: int = 0,
    link_bandwidth: float = 0.0,
    network_bandwidth: float = 0.0,
    host_bytes: float = 0.0,
) -> Cluster:
    """A cluster of a device of the table.

    Args:
        measured: a device to use instead of one of the table.
        ranks_per_node, link_bandwidth, network_bandwidth: replace these fields of the device; 0 keeps its own.
        host_bytes: of a node; 0: that of the device's usual node, of which a smaller node has its share.
    """
    device = measured or ACCELERATORS[name]
    share = 1.0 if measured else min(1.0, (ranks_per_node or device.ranks_per_node) / device.ranks_per_node)
    accelerator = replace(
        device,
        ranks_per_node=ranks_per_node or device.ranks_per_node,
        link_bandwidth=link_bandwidth or device.link_bandwidth,
        network_bandwidth=network_bandwidth or device.network_bandwidth,
        host_bytes=host_bytes or device.host_bytes * share,
    )
    return Cluster(name, accelerator, nodes)
