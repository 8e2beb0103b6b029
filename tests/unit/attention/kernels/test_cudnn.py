"""cuDNN's attention over its stand-in: tiles of one row, and what it cannot run with."""

from typing import Any

import pytest
import torch

from tests.support.emulated_ops import emulate
from tests.support.sdpa_inputs import SCALE, by_torch, qkv
from torchtitan_cp.attention import PlanError
from torchtitan_cp.attention.kernels import KERNELS, ScoreMod, choose_kernel, cudnn
from torchtitan_cp.attention.tiles import CAUSAL, FULL


@pytest.mark.parametrize(("queries", "keys", "band"), [(1, 24, FULL), (24, 1, FULL), (1, 1, CAUSAL)])
def test_cudnn_hands_tiles_of_one_row_to_flash(queries: int, keys: int, band: Any) -> None:
    q, k, v, dout = tensors = qkv(queries, keys, dims=(16, 8))
    with emulate() as calls:
        out, lse = cudnn.forward(q, k, v, band, ScoreMod(SCALE))
        gradients = cudnn.backward(dout, q, k, v, out, lse, band, ScoreMod(SCALE))
    assert calls == {"_flash_attention_forward": 1, "_flash_attention_backward": 1}
    for got, want in zip((out, *gradients), by_torch(tensors), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_variable_that_changes_the_layout_of_the_log_sum_exp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = qkv(24, 24)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    with emulate():
        with pytest.raises(PlanError, match=r"TORCH_CUDNN_SDPA_AVOID_RECOMPILE = 1 changes the layout .* unset it, or"):
            cudnn.forward(q, k, v, FULL, ScoreMod(SCALE))
        monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "0")
        cudnn.forward(q, k, v, FULL, ScoreMod(SCALE))


def test_cudnn_is_refused_where_kernels_must_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 8, 2, 16)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with (
        emulate(),
        pytest.raises(PlanError, match=r"'cudnn' cannot run .* its backward is not deterministic; use flash"),
    ):
        choose_kernel("cudnn", x, x)
    monkeypatch.undo()
    with emulate():
        assert choose_kernel("cudnn", x, x) is KERNELS["cudnn"]
