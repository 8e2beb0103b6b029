"""The plain attention of parity and the doctor beside the kernels and operators of one rank."""

import pytest
import torch

from torchtitan_cp.attention import AttentionMask, attend, causal_conv, gated_delta_rule, make_plan, selective_scan
from torchtitan_cp.training.plain_attention import PlainAttention

LENGTHS = (1, 70, 5, 84)
PLAIN = PlainAttention()


def draw(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, sum(LENGTHS), *shape, generator=generator, dtype=torch.float64) for shape in shapes]


DOCUMENTS = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS)).expand(2, -1)
MASK = AttentionMask(document_lengths=(LENGTHS,))


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("window", [0, 20])
def test_attention_with_sinks_and_a_soft_cap(sinks: torch.Tensor | None, softcap: float, window: int) -> None:
    q, k, v = draw((4, 16), (2, 16), (2, 16))
    mask = AttentionMask(document_lengths=(LENGTHS,), window=(window - 1, -1)) if window else MASK
    want = attend(q, k, v, make_plan(len(q[0]), mask=mask, kernel="reference"), sinks=sinks, softcap=softcap)
    got = PLAIN(q, k, v, DOCUMENTS, window, sinks=sinks, softcap=softcap)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


def test_a_convolution_and_a_recurrence() -> None:
    plan = make_plan(sum(LENGTHS), mask=MASK)
    x, q, k, v, g, beta = draw((12,), (2, 8), (2, 8), (4, 6), (4,), (4,))
    weight = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = causal_conv(x, weight, plan, activation="silu")
    torch.testing.assert_close(PLAIN.causal_conv(x, weight, DOCUMENTS, activation="silu"), want, atol=1e-12, rtol=1e-12)
    rule = (q, k, v, -g.abs(), beta.sigmoid())
    want = gated_delta_rule(*rule, plan, qk_l2norm=True)
    got = PLAIN.gated_delta_rule(*rule, DOCUMENTS, qk_l2norm=True)
    torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-11)


def test_a_convolution_with_a_bias_a_gate_for_each_key_dim_and_a_scan() -> None:
    plan = make_plan(sum(LENGTHS), mask=MASK)
    x, q, k, v, g, beta = draw((12,), (4, 8), (4, 8), (4, 6), (4, 8), (4,))
    weight, bias = torch.randn(13, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).split([12, 1])
    want = causal_conv(x, weight.T[:, :3], plan, bias=bias[0])
    torch.testing.assert_close(PLAIN.causal_conv(x, weight.T[:, :3], DOCUMENTS, bias[0]), want, atol=1e-12, rtol=1e-12)
    k = k / k.norm(dim=-1, keepdim=True)
    rule = (q, k, v, -g.abs(), beta.sigmoid())
    want = gated_delta_rule(*rule, plan)
    torch.testing.assert_close(PLAIN.gated_delta_rule(*rule, DOCUMENTS), want, atol=1e-11, rtol=1e-11)
    scan = (v, beta.sigmoid(), -torch.arange(4.0, dtype=torch.float64) / 4, q[:, :, :2], k[:, :, :2])
    want = selective_scan(*scan, plan)
    torch.testing.assert_close(PLAIN.selective_scan(*scan, DOCUMENTS), want, atol=1e-11, rtol=1e-11)
