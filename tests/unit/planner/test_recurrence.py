"""Layers with a recurrent state, against the products of the recurrence itself."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.long_plans import estimates
from tests.support.recurrence import delta_rule
from torchtitan_cp.attention import AttentionMask
from torchtitan_cp.planner.estimate import _rank_seconds
from torchtitan_cp.planner.recurrence import RECURRENCE_RATE


@pytest.mark.parametrize(("checkpoint", "forwards"), [("full", 2), ("attention_saved", 1)])
def test_a_layer_with_a_state_takes_the_products_of_the_recurrence(checkpoint: str, forwards: int) -> None:
    planned = estimates("train_configs/qwen3_5_9b_256k_to_1m.toml", f"--activation.checkpoint={checkpoint}")[0]
    with FlopCounterMode(display=False) as counter:
        q, v, g = torch.ones(1, 4, 16, 128), torch.ones(1, 4, 32, 128), torch.ones(1, 4, 32)
        delta_rule(q, q, v, g, g, AttentionMask(), 1.0)
    flops = counter.get_total_flops() / 4 * 3 / 2  # a token's; the outer product of key and error is none to torch
    rate = 989e12 * planned.cluster.accelerator.linear * RECURRENCE_RATE
    own = planned.ranks[0]
    attending = _rank_seconds(planned, replace(own, layers=len(own.windows)))
    added = {name: seconds - attending[name] for name, seconds in _rank_seconds(planned, own).items()}
    layers = 24 * planned.stage.micro_batches
    assert added["attention"] == pytest.approx(layers * (forwards + 2) * flops * planned.tokens / rate)
