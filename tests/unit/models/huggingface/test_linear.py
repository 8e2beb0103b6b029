"""Convolutions and recurrences of a model of transformers run by its own functions, and nobody else's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_next import modeling_qwen3_next

from models.huggingface.args import args_from_config
from models.huggingface.linear import NAMES, LinearFunctions
from models.huggingface.model import HuggingFaceModel
from tests.support.huggingface_families import FAMILIES, eager_model, random_weights
from tests.support.huggingface_parity import copy_weights
from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.training.model import LayerAttention

LENGTHS = ((3, 1, 20, 8), (32,))
TOKENS = 32


class Counting(LayerAttention):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def causal_conv(self, *inputs: Any, **options: Any) -> Tensor:
        self.calls.append("convolution")
        return super().causal_conv(*inputs, **options)

    def selective_scan(self, *inputs: Any) -> Tensor:
        self.calls.append("scan")
        return super().selective_scan(*inputs)

    def gated_delta_rule(self, *inputs: Any, **options: Any) -> Tensor:
        self.calls.append("delta rule")
        return super().gated_delta_rule(*inputs, **options)


def built(family: str) -> tuple[HuggingFaceModel, Counting]:
    """A model of a family, and its attention."""
    attend = Counting()
    model = HuggingFaceModel(args_from_config(FAMILIES[family], {}), attend)
    random_weights(model, 0)
    return model, attend


def run(model: HuggingFaceModel, lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> Tensor:
    """Logits `[B, TOKENS, V]` of documents of these lengths."""
    plan = make_plan(TOKENS, mask=AttentionMask(document_lengths=lengths))
    tokens = torch.arange(TOKENS * len(lengths)).view(len(lengths), TOKENS) * 7 % 281
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    return model(tokens, positions, {0: plan})


def test_models_in_one_process_use_their_own_functions_and_leave_transformers_as_it_was() -> None:
    modules = modeling_nemotron_h, modeling_qwen3_next
    before = [{name: vars(module).get(name) for name in NAMES} for module in modules]
    (one, of_one), (other, of_other), (third, of_third) = map(built, ("Nemotron-H", "Nemotron-H", "Qwen3-Next"))
    plain = eager_model(FAMILIES["Nemotron-H"])
    logits = run(one)
    assert (of_one.calls, of_other.calls, of_third.calls) == (["convolution", "scan"], [], [])
    assert torch.equal(run(other), logits)
    assert of_other.calls == ["convolution", "scan"]
    run(third)
    assert of_third.calls == ["convolution", "delta rule"]
    copy_weights(one, plain)
    alone = plain(input_ids=torch.arange(TOKENS)[None] * 7 % 281, use_cache=False).logits  # the first row's tokens
    assert (run(one, ((TOKENS,),)) - alone).abs().max() < 1e-4
    assert len(of_one.calls) == 4
    assert [{name: vars(module).get(name) for name in NAMES} for module in modules] == before


@pytest.mark.parametrize("family", ["Nemotron-H", "Kimi Linear", "Falcon-H1", "LFM2"])
def test_transformers_own_functions_run_within_documents_and_ours_come_back(family: str) -> None:
    model, attend = built(family)
    logits, calls = run(model), list(attend.calls)
    documents = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in LENGTHS])
    with model.native_attention(documents):
        assert (run(model) - logits).abs().max() < 1e-4
    assert attend.calls == calls
    with pytest.raises(RuntimeError, match="on the way"), model.native_attention(documents):
        raise RuntimeError("on the way")
    assert torch.equal(run(model), logits)
    assert attend.calls == 2 * calls


@pytest.mark.parametrize(
    ("name", "keywords", "named"),
    [
        ("causal_conv1d_fn", {"seq_idx": torch.zeros(1, 4)}, "seq_idx"),
        ("torch_chunk_gated_delta_rule", {"initial_state": torch.zeros(1, 1, 2, 2), "z": None}, "initial_state"),
        ("mamba2_chunk_scan", {"chunk_size": 4, "return_final_states": True}, "return_final_states"),
    ],
)
def test_a_function_refuses_what_it_would_ignore(name: str, keywords: dict[str, Any], named: str) -> None:
    functions = LinearFunctions(LayerAttention(), SimpleNamespace(plans=None))
    count = {"causal_conv1d_fn": 2}.get(name, 5)
    with pytest.raises(ValueError, match=f"is called with {named}, which is not supported"):
        functions(name, print)(*[torch.ones(1, 4, 1, 2)] * count, **keywords)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_scan_adds_its_skip_and_computes_step_sizes_in_fp32(dtype: torch.dtype) -> None:
    x, B, C = (torch.randn(1, 6, 2, 4, dtype=dtype) for _ in range(3))
    dt, A, D = torch.randn(1, 6, 2, dtype=dtype), -torch.rand(2).to(dtype), torch.randn(2, dtype=dtype)
    functions = LinearFunctions(LayerAttention(), SimpleNamespace(plans={0: make_plan(6)}))
    options = {"chunk_size": 4, "dt_bias": D, "dt_softplus": True, "dt_limit": (0.2, 1.5)}
    out = functions("mamba2_chunk_scan", print)(x, dt, A, B, C, D=D, **options)
    double = [y.double() for y in (x, dt, A, B, C)]
    want = modeling_nemotron_h.mamba2_chunk_scan(*double, D=D.double(), **options)
    assert (out.dtype, out.shape) == (dtype, x.shape)
    assert (out - want).abs().max() < (1e-5 if dtype is torch.float64 else 0.05)
