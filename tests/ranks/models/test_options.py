"""Options of the Llama block against plain PyTorch and gpt-oss. Layouts are in tests/ranks/training/test_parity.py."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

from models.llama.flavors import LlamaArgs
from models.llama.model import Attention
from tests.support.oracle import allowed
from tests.support.parity import rows_of, verify
from tests.support.rank_pool import RankPool
from tests.support.runs import write_run
from torchtitan_cp.attention import AttentionMask, ContextParallel, Plan

OPTIONS = [
    f"--model.overrides.{option}" for option in ("qkv_bias=true", "qk_norm=true", "sinks=true", "windows=[0, 50]")
]


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("options"))


def test_all_options_at_once_give_the_attention_and_gradients_of_plain_pytorch(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    assert ranks(2)(verify, run_toml, "--parallel.cp=2", *OPTIONS) == [True] * 2
    (comparison,) = rows_of(run_toml.parent)
    assert comparison["holds"]
    assert len([row for row in comparison["rows"] if row["quantity"].startswith("attention output")]) == 2


WINDOW, SEQ_LEN = 12, 96


def gpt_oss_attention(layer: int, strategy: str) -> dict[str, tuple[Tensor, Tensor]]:
    """On a rank: what a layer's attention and its gradients are here, and on the whole sequence by transformers.

    The weights are random, as are sinks and the biases of q, k and v; its output's bias is none of ours, and zero.
    """
    torch.manual_seed(3)
    config = GptOssConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=2,
        sliding_window=WINDOW,
        attn_implementation="eager",
    )
    theirs = GptOssAttention(config, layer)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5)
    torch.nn.init.zeros_(theirs.o_proj.bias)
    window = theirs.sliding_window or 0
    assert window == (WINDOW if layer == 0 else 0), "layers alternate"
    angles = torch.arange(SEQ_LEN)[:, None] * 10000.0 ** -(torch.arange(4) / 4)
    x, dout = torch.randn(2, 1, SEQ_LEN, 32)
    mask = AttentionMask(window=(window - 1, -1)) if window else AttentionMask()
    cp = ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)), strategy)

    def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, seen: int, sinks: Tensor) -> Tensor:
        assert seen == window
        return cp.attention(q, k, v, plan, sinks=sinks)

    shape = LlamaArgs(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=8, vocab_size=8, qkv_bias=True, sinks=True
    )
    ours = Attention(shape, attend, window)
    names = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
    weights = theirs.state_dict()
    ours.load_state_dict(
        {
            f"{mine}.{part}": weights[f"{name}.{part}"]
            for mine, name in names.items()
            for part in ("weight", "bias")
            if (mine, part) != ("wo", "bias")
        }
        | {"sinks.weight": weights["sinks"]}
    )
    plan = cp.plan(SEQ_LEN, mask)
    mine, whole = plan.shard(x).detach().requires_grad_(), x.clone().requires_grad_()
    at = angles[plan.positions][:, None]
    out = ours(mine, at.cos(), at.sin(), plan)
    out.backward(plan.shard(dout))
    hidden = torch.where(allowed(mask, SEQ_LEN), 0.0, float("-inf"))[:, None]
    want, _ = theirs(whole, (angles.cos()[None], angles.sin()[None]), hidden)
    want.backward(dout)
    assert ours.sinks is not None
    sums = [ours.sinks.weight.grad, ours.wk.bias.grad, ours.wv.weight.grad]
    for gradient in sums:
        dist.all_reduce(gradient)
    summed = [theirs.sinks.grad, theirs.k_proj.bias.grad, theirs.v_proj.weight.grad]
    pairs = zip(("sinks", "bias of k", "weight of v"), zip(sums, summed, strict=True), strict=True)
    return {
        "out": (plan.unshard(out.detach()), want.detach()),
        "input": (plan.unshard(mine.grad), whole.grad),
        **dict(pairs),
    }  # type: ignore[dict-item]


@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
@pytest.mark.parametrize("layer", [0, 1], ids=["a window", "the whole context"])
def test_attention_with_sinks_windows_and_biases_is_that_of_gpt_oss(
    ranks: Callable[[int], RankPool], layer: int, strategy: str
) -> None:
    for name, (got, want) in ranks(2)(gpt_oss_attention, layer, strategy)[0].items():
        assert want.abs().max() > 0, name
        assert (got - want).abs().max() < 1e-5 * want.abs().max(), name
