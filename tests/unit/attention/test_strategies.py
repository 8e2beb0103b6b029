"""Exchanges on simulated ranks, as many as one likes: against the whole sequence, and byte by byte against the plan."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation import simulate
from tests.support.oracle import allowed, attention_with_gradients, attention_with_sinks, draw_inputs
from tests.support.plan_cases import cases
from torchtitan_cp.attention import AttentionMask, make_plan, strategies
from torchtitan_cp.attention.operator import with_exchange
from torchtitan_cp.attention.strategies import STRATEGIES, choose_strategy, log_choice, ranks_trading_heads


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(window=(40, -1), document_lengths=((100, 3, 409),))])
@pytest.mark.parametrize("ranks", [16, pytest.param(64, marks=pytest.mark.deep)])
def test_many_ranks_equal_the_full_sequence(strategy: str, mask: AttentionMask, ranks: int) -> None:
    q, k, v, dout = draw_inputs(512)
    inner = 4 if strategy == "hybrid" else 1
    result = simulate(q, k, v, ranks=ranks, mask=mask, strategy=strategy, all_to_all_ranks=inner, dout=dout)
    expected = attention_with_gradients(q, k, v, dout, mask)
    for got, want in zip((result.out, result.dq, result.dk, result.dv), expected, strict=True):
        assert got is not None
        assert (got - want).norm() < 1e-10 * want.norm()


def test_sinks_of_all_ranks_sum_to_those_of_one_process() -> None:
    q, k, v, dout = draw_inputs(96, (6, 2))
    sinks = torch.linspace(-4, 4, 6, dtype=torch.float64)
    result = simulate(q, k, v, ranks=4, strategy="all_to_all", sinks=sinks, dout=dout, scale=0.3)
    *_, dsinks = attention_with_sinks(q, k, v, dout, sinks, AttentionMask(), 0.3)
    assert result.dsinks is not None
    assert (result.dsinks - dsinks).norm() < 1e-10 * dsinks.norm()


def documented_elements(strategy: str, ranks: int, inner: int) -> tuple[float, float, float]:
    """What a rank sends by the table of docs/context_parallel.md: (forward, backward, backward in fp32)."""
    rows, element_bytes = 256 // ranks, 2
    kv = 4 * (32 + 16)
    qkv, out = 8 * 32 + kv, 8 * 16
    if strategy == "ring":
        return (0.75 * (ranks - 1) * rows * kv,) * 3
    if strategy == "all_gather":
        return ((ranks - 1) * rows * kv,) * 3
    traded, outer = (inner - 1) / inner * rows, ranks // inner
    ring = 0.75 * (outer - 1) * rows * kv
    return traded * (qkv + out + 8 * 4 / element_bytes) + ring, traded * (qkv + out) + ring, ring


@pytest.mark.parametrize(("strategy", "inner"), [("ring", 1), ("all_gather", 1), ("all_to_all", 4), ("hybrid", 2)])
def test_bytes_sent_are_those_of_the_documented_formulas(strategy: str, inner: int) -> None:
    shapes = [(8, 32), (4, 32), (4, 16), (8, 16)]
    q, k, v, dout = (torch.randn(1, 256, *shape).bfloat16() for shape in shapes)
    option = {"all_to_all_ranks": inner} if strategy == "hybrid" else {}
    result = simulate(q, k, v, ranks=4, strategy=strategy, layout="zigzag", dout=dout, **option)  # type: ignore[arg-type]
    forward, backward, wide = documented_elements(strategy, 4, inner)
    # Under zigzag the head ranks send more and the tail ranks less; the table is of the mean.
    assert sum(map(sum, result.forward_bytes)) / 4 == pytest.approx(2 * forward)
    assert sum(map(sum, result.backward_bytes)) / 4 == pytest.approx(2 * backward + 4 * wide)


@given(cases(), st.sampled_from(list(STRATEGIES)), st.sampled_from(["cpu", "reference"]))
@settings(max_examples=120, deadline=None)
def test_any_mask_on_any_layout_and_exchange_equals_the_full_sequence(
    case: tuple[int, int, AttentionMask, str], strategy: str, kernel: str
) -> None:
    seq_len, ranks, mask, layout = case
    rows = len(mask.document_lengths or [()])
    generator = torch.Generator().manual_seed(seq_len)
    q, k, v, dout = (
        torch.randn(rows, seq_len, heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4)
    )
    seen = allowed(mask, seq_len).any(-1)[:, :, None, None]
    option = {"all_to_all_ranks": 2 if ranks % 2 == 0 else 1} if strategy == "hybrid" else {}
    result = simulate(
        q, k, v, ranks=ranks, mask=mask, strategy=strategy, kernel=kernel, layout=layout, dout=dout, **option
    )
    expected = attention_with_gradients(q, k, v, torch.where(seen, dout, 0), mask)
    for got, want in zip((result.out, result.dq, result.dk, result.dv), expected, strict=True):
        assert got is not None
        torch.testing.assert_close(got, want.nan_to_num(0.0), rtol=1e-9, atol=1e-10)


def test_auto_trades_heads_where_that_carries_less_than_half_of_the_ring_and_no_window_shortens_it() -> None:
    causal, window = (AttentionMask(window=(left, -1)).band for left in (-1, 9))
    cases = [(8, 8, 8, causal), (16, 8, 8, causal), (8, 8, 8, window), (8, 8, 1, causal)]
    assert [choose_strategy(*case) for case in cases] == ["all_to_all", "ring", "ring", "ring"]


@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
def test_a_plan_of_ranks_that_trade_with_nobody_names_the_ring(strategy: str) -> None:
    assert make_plan(64, strategy=strategy).strategy == "ring"
    if strategy == "hybrid":
        assert make_plan(64, ranks=4, strategy=strategy).strategy == "ring"
        assert make_plan(64, ranks=4, strategy=strategy, all_to_all_ranks=2).strategy == "hybrid"


def test_an_attention_decides_only_where_its_plan_says_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = list[tuple[int, int]]()

    def choose(query_heads: int, key_heads: int, *_: Any) -> str:
        decided.append((query_heads, key_heads))
        return "all_to_all"

    monkeypatch.setattr(strategies, "choose_strategy", choose)
    named = {name: make_plan(64, ranks=4, strategy=name) for name in ("ring", "all_gather", "all_to_all")}
    assert [ranks_trading_heads(plan, 8, 8) for plan in named.values()] == [1, 1, 4]
    assert all(with_exchange(plan, plan.all_to_all_ranks) is plan for plan in named.values())
    assert not decided
    auto = make_plan(64, ranks=4)
    assert with_exchange(auto, ranks_trading_heads(auto, 8, 8)) == named["all_to_all"]
    assert decided == [(8, 8)]


def test_the_log_names_a_window_by_its_keys_as_the_config_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log_choice("ring", 4, 2, 3, AttentionMask().windowed(64).band)
    assert "4 query and 2 key heads, a window of 64 tokens;" in caplog.text
