"""Linear layers in float8, emulated where there is no hardware, and what is refused."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.llama import Llama, LlamaArgs
from tests.support.float8_llama import TOKENS, convert_emulated, make_model, run
from tests.support.small_llama import attend
from torchtitan_cp.config import ConfigError
from torchtitan_cp.parallel.float8 import convert_linears


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_products_are_rounded_and_nothing_else_changes(recipe: str) -> None:
    plain, converted = make_model(None), make_model(recipe)
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in converted.named_parameters()]
    assert type(converted.output) is nn.Linear
    assert all(type(layer.feed_forward.w1) is not nn.Linear for layer in converted.layers.values())  # type: ignore[union-attr]
    want, got = run(plain, TOKENS), run(converted, TOKENS)
    assert got != want
    assert got == pytest.approx(want.item(), rel=0.01)
    for one, other in zip(plain.parameters(), converted.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert F.cosine_similarity(one.grad.flatten(), other.grad.flatten(), 0) > 0.99


class Router(nn.Linear):
    """As Llama 4 and PhiMoE have it: a linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return logits.softmax(-1), logits


def test_routers_stay_as_they_are_whether_they_hold_a_linear_layer_or_are_one() -> None:
    model = nn.Module()
    holder = nn.ModuleDict({"router": nn.ModuleDict({"gate": nn.Linear(32, 16)})})
    linears = {"router": nn.Linear(32, 16), "gate": Router(32, 16), "up": nn.Linear(32, 16)}
    model.layers = nn.ModuleDict({"0": nn.ModuleDict(linears), "1": holder})
    convert_emulated(model, "tensorwise")
    kinds = {name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    changed = [name for name, kind in kinds.items() if kind not in (nn.Linear, Router)]
    assert changed == ["layers.0.up"]


def test_what_cannot_be_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(None)
    with pytest.raises(ConfigError, match=r"compute capability 8.9 or newer, and this cpu is none"):
        convert_linears(model, "rowwise", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match=r"and this cuda has 8\.0"):
        convert_linears(model, "rowwise", "cuda")
    odd = Llama(LlamaArgs(24, 1, 3, 3, 8, 40, vocab_size=61), attend)
    with pytest.raises(ConfigError, match="no linear layer has sizes divisible by 16"):
        convert_emulated(odd, "rowwise")
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"(?s)needs the package `torchao`, .*pip install 'torchtitan-cp\[float8\]'"):
        convert_emulated(model, "rowwise")
