"""FLOPs of a token and the peak of a device: what MFU is made of."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from torchtitan_cp.attention import Plan
from torchtitan_cp.config.contract import ModelArgs

logger = logging.getLogger(__name__)

# Dense peaks without sparsity, FLOP/s. The first key that the device's name contains counts. Source: NVIDIA's data
# sheets, for SXM modules unless the name says PCIe.
PEAK_FLOPS = {
    "H200": {torch.bfloat16: 989e12, torch.float32: 67e12},
    "H100 PCIe": {torch.bfloat16: 756e12, torch.float32: 51e12},
    "H100": {torch.bfloat16: 989e12, torch.float32: 67e12},
    "A100": {torch.bfloat16: 312e12, torch.float32: 19.5e12},
    "B200": {torch.bfloat16: 2250e12, torch.float32: 75e12},
    "L40S": {torch.bfloat16: 362e12, torch.float32: 91.6e12},
}
MATMUL_SIZES = (256, 1024, 4096)
MEASURE_SECONDS = 0.15  # for each size
LONG_MATMUL_SECONDS = 0.01  # no larger size is tried after a matmul that takes longer
BELIEVABLE_MFU = 0.9


def flops_per_token(
    args: ModelArgs,
    seq_len: int,
    keys: Sequence[float] | None = None,
    adapter_flops: float = 0.0,
    forward_layers: int = 0,
) -> float:
    """FLOPs of training on one token: forward and twice that for backward, without recomputation.

    6 per weight; attention's two products cost 6 x Hq x (Dqk + Dv) per key; a recurrent state costs 6 per number and
    product, 18 in a delta rule (read by the key, written, read by the query) and 12 in a scan. Source: Kaplan et al.,
    2020, and appendix B of PaLM (Chowdhery et al., 2022), with the causal half.

    Args:
        keys: keys that a token sees in each layer, on average; None: as in one causal sequence.
        adapter_flops: what adapters change; see `adapter_flops_per_token`.
        forward_layers: first layers, frozen, that no backward reaches; see `LoraCounts`.
    """
    costs = _mixer_costs(args, seq_len, keys)
    flops = 6.0 * (args.linear_parameters() + sum(costs)) + adapter_flops
    if forward_layers:
        weights = (args.linear_parameters() - args.dim * args.vocab_size) / args.n_layers
        flops -= 2.0 * weights * forward_layers + 4.0 * sum(costs[:forward_layers])
    return flops


def adapter_flops_per_token(args: ModelArgs, adapters: int, whole: float) -> float:
    """What [lora] adds to the FLOPs of a token, which is negative: frozen weights have no gradients, 2 per weight.

    Args:
        adapters: numbers in all adapters, 6 each.
        whole: weights that multiply a token and are trained whole.
    """
    return 6.0 * adapters - 2.0 * (args.linear_parameters() - whole)


def _mixer_costs(args: ModelArgs, seq_len: int, keys: Sequence[float] | None = None) -> list[float]:
    """A sixth of the FLOPs per token of each layer's attention or recurrence; see `flops_per_token`."""
    # S/2 keys on average, fewer in a window.
    windows = (mixer.window for mixer in args.mixers)
    causal = [w - w * w / (2 * seq_len) if 0 < w < seq_len else seq_len / 2 for w in windows]
    layers = zip(args.mixers, keys or causal, strict=True)
    return [mixer.width * count + mixer.state_products * mixer.state_size for mixer, count in layers]


def layer_costs(args: ModelArgs, seq_len: int) -> list[float]:
    """FLOPs per token of each layer; the first includes the embedding, the last the output."""
    output = args.dim * args.vocab_size
    weights = (args.linear_parameters() - output) // args.n_layers
    costs = [6.0 * (weights + cost) for cost in _mixer_costs(args, seq_len)]
    costs[0] += args.dim  # a look-up: backward adds each number once
    costs[-1] += 6.0 * output
    return costs


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one rank's device, and where the number comes from."""

    flops_per_second: float
    source: str

    def warn_if_exceeded(self, mfu: float) -> bool:
        """Log that no training step reaches such an MFU, so that this peak must be too low."""
        if mfu > BELIEVABLE_MFU:
            logger.warning(
                f"an MFU of {mfu:.0%} is not believable: the peak of {self.flops_per_second / 1e12:.3g} TFLOP/s a rank "
                f"({self.source}) is too low. Set metrics.peak_tflops to the device's"
            )
        return mfu > BELIEVABLE_MFU


def find_peak(device: torch.device, name: str, dtype: torch.dtype, stated_tflops: float) -> Peak:
    """Peak of one rank: as stated in the config, else from the table, else measured by matmuls on this device."""
    if stated_tflops:
        return Peak(stated_tflops * 1e12, "metrics.peak_tflops")
    model = next((key for key in PEAK_FLOPS if key in name), None)
    if model and dtype in PEAK_FLOPS[model]:
        return Peak(PEAK_FLOPS[model][dtype], f"data sheet of {model}, {dtype}")
    return Peak(_measure_matmul(device, dtype), f"measured, the fastest of many {dtype} matmuls on one rank")


def _measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of many matmuls. Short ones slip between other work on the machine; GPUs need long ones."""
    best = 0.0
    for size in MATMUL_SIZES:
        a = torch.ones(size, size, device=device, dtype=dtype)
        first = now = time.perf_counter()
        while now - first < MEASURE_SECONDS:
            start = now
            float(torch.mm(a, a)[0, 0])  # waits for the device
            now = time.perf_counter()
            best = max(best, 2 * size**3 / (now - start))
        if now - start > LONG_MATMUL_SECONDS:
            break
    return best


def mean_keys(plan: Plan) -> float:
    """Keys that a query of the plan's sequences sees, on average."""
    return sum(plan.pairs_by_rank) / plan.sequence_length / len(plan.mask.document_lengths or ((),))


def keys_sent(plans: Mapping[int, Plan], windows: Sequence[int]) -> float:
    """Rows of keys that a rank of the ring has to send, over its own rows: the mean of layers with these windows."""
    return fmean(plans[window].keys_sent for window in windows)


def imbalance(plan: Plan) -> float:
    """Query-key pairs of the busiest rank of the ring over the mean."""
    return max(plan.pairs_by_rank) / fmean(plan.pairs_by_rank)
