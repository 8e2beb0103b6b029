"""How the tokens of steps are spread over the experts of each layer."""

from typing import TypedDict

import numpy as np
from torch import Tensor


class ExpertFields(TypedDict):
    """See StepRecord."""

    expert_load: dict[str, float]
    router_entropy: dict[str, float]
    idle_experts: float


def expert_loads(counts: Tensor) -> np.ndarray:
    """`[layers, X]`: tokens of each expert over the even share, so the mean is 1; NaN in layers without experts.

    Args:
        counts: `[layers, X]`, tokens that each expert was sent.
    """
    return (counts / counts.mean(1, keepdim=True)).cpu().numpy()


def expert_fields(counts: Tensor, entropy: Tensor, tokens: int) -> ExpertFields:
    """Fields of StepRecord about experts.

    Args:
        counts: `[layers, X]`, tokens that each expert was sent.
        entropy: `[layers]`, entropy of the router's shares for a token, in nats, summed over tokens.
        tokens: in the step.
    """
    loads = expert_loads(counts)
    layers, entropies = np.flatnonzero(~np.isnan(loads[:, 0])).tolist(), entropy.tolist()
    return {
        "expert_load": {str(layer): float(loads[layer].max()) for layer in layers},
        "router_entropy": {str(layer): entropies[layer] / tokens for layer in layers},
        "idle_experts": float((loads[layers] == 0).mean()),
    }
