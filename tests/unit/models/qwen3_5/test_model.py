"""Qwen3.5 beside transformers' own."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from models.qwen3_5.hub import config
from tests.support.hybrid_model import ARGS, ROPE, TOKENS, build, names_of
from tests.support.runs import write_run
from torchtitan_cp.attention import make_plan
from torchtitan_cp.cli import check
from torchtitan_cp.training.model import LayerAttention
from torchtitan_cp.training.plain_attention import PlainAttention


def loss_and_gradients(model: Any, logits: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class Float64(TorchFunctionMode):
    """Has what asks for float32 compute in float64, in which two right implementations agree on any CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            return args[0].double()
        wide = [torch.float64 if arg is torch.float32 else arg for arg in args]
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return function(*wide, **named)


@pytest.mark.parametrize("attend", [PlainAttention(), LayerAttention()], ids=["plain", "operators"])
def test_logits_and_gradients_are_those_of_transformers(attend: Any) -> None:
    """In float32 the gradient of A_log, a sum that cancels, is 1e-5 from its float64 value in both."""
    model = build(ARGS, attend).double()
    theirs = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config(ARGS), rope_parameters=ROPE)).double()
    names = names_of(model)
    theirs.load_state_dict({names[name]: p.detach() for name, p in model.named_parameters()}, strict=False)
    tokens = torch.randint(0, ARGS.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    plans: Any = {0: make_plan(TOKENS)} if isinstance(attend, LayerAttention) else torch.zeros_like(tokens)
    with Float64():
        got, gradients = loss_and_gradients(model, model(tokens, torch.arange(TOKENS), plans), tokens)
        want, their_gradients = loss_and_gradients(theirs, theirs(tokens).logits, tokens)
    assert (got - want).norm() < 1e-7 * want.norm()
    for name, gradient in gradients.items():
        apart = (gradient - their_gradients[names[name]]).norm() / their_gradients[names[name]].norm()
        assert apart < 1e-6, (name, apart)


def test_tensor_parallelism_is_refused_before_a_rank_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Elsewhere the gradient of the delta nets' norm was not summed over its ranks."""
    path = write_run(tmp_path)
    overrides = ("--model.architecture=qwen3_5", "--model.overrides.n_layers=4", "--parallel.tp=2")
    assert check.main([str(path), "--ranks", "2", *overrides]) == 2
    refused = "parallel.tp is not supported by the architecture 'qwen3_5': the heads of its gated delta nets"
    assert refused in capsys.readouterr().err
