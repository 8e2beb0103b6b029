"""Layers with a recurrent state, or a convolution without one: what their backward holds, and how long they take."""

from torchtitan_cp.attention.linear.kernel import CHUNK, PART
from torchtitan_cp.config.contract import Mixer
from torchtitan_cp.planner.stage import PlannedStage
from torchtitan_cp.planner.strategy_costs import FP32_BYTES

# ASSUMED speed of a recurrence as a fraction of that of matrix products; not measured on a GPU.
RECURRENCE_RATE = 0.2
# At work in the backward of a recurrence in torch, by its products with the state and whether each key dim has a gate:
# fp32 numbers for each token and value head, as multiples of K, V, K Hk/Hv, the chunk, and the states K V / chunk. They
# are fitted to the operator under the tracker of dry runs, K and V from 32 to 128 and Hv/Hk from 1 to 4, to 5 %.
RULE_NUMBERS = {
    (3, False): (8.2, 7.2, 5.9, 8.8, 4.5),
    (3, True): (27.8, 7.5, 7.0, 4.5, 3.8),
    (2, False): (6.3, 5.0, 5.8, 6.5, 4.1),
}
# Bytes at work in the backward of a convolution of 4 tokens alone, for each value of its input, counted likewise.
CONVOLUTION_BYTES = 34


def _recurrence_bytes(planned: PlannedStage, recurrence: Mixer) -> float:
    """Bytes at work in the backward of a recurrence: those of the heads of a part, and gradients of the other parts.

    A key head with so many tokens that it exceeds one part is not counted as such.
    """
    heads, value_dim = recurrence.state_heads, recurrence.state_values / recurrence.state_heads
    key_dim = recurrence.state_size / recurrence.state_values
    shared = (recurrence.state_channels - recurrence.state_values) / 2 / heads
    sizes = (key_dim, value_dim, shared, CHUNK, key_dim * value_dim / CHUNK)
    numbers = RULE_NUMBERS[recurrence.state_products, recurrence.state_gates > 1]
    at_work = sum(count * size for count, size in zip(numbers, sizes, strict=True))
    results = 2 * shared + value_dim + recurrence.state_gates + 1
    rows = planned.tokens * heads
    part = min(rows, PART / value_dim)
    return FP32_BYTES * (part * at_work + (rows - part) * results)


def recurrence_phases(planned: PlannedStage) -> list[tuple[str, float]]:
    """(name, bytes beside what the layer kept) of the backward of a recurrence, or of a convolution without one.

    By then the norm and the gate of its output are freed, and so are what a layer kept of them.
    """
    channels = max(mixer.state_channels for mixer in planned.args.mixers) * planned.tokens * planned.element_bytes
    if not (recurrence := planned.recurrence):
        working = channels / planned.element_bytes * CONVOLUTION_BYTES
        return [("convolution", working)] if channels else []
    values = planned.tokens * recurrence.state_values
    gate = values * (3 * planned.element_bytes + 2 * FP32_BYTES)
    inputs = {"none": -gate, "selective": channels}.get(planned.config.activation.checkpoint, 2 * channels)
    gradient = values * planned.element_bytes
    return [("recurrence", inputs + gradient + _recurrence_bytes(planned, recurrence))]


def recurrence_seconds(planned: PlannedStage) -> float:
    """Seconds of a layer's recurrence for a micro-batch, forward, backward and recomputation."""
    rate = planned.cluster.rate(planned.config.training.compute_dtype, planned.cluster.accelerator.linear)
    passes = 4 if planned.config.activation.checkpoint == "full" else 3
    largest = max(mixer.state_products * mixer.state_size for mixer in planned.args.mixers)
    return passes * 2 * largest * planned.tokens / (rate * RECURRENCE_RATE)
