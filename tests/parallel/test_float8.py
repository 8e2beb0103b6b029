"""Linear layers in float8, emulated where there is no hardware, and what is refused."""

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from models.llama import Llama, LlamaShape
from tests.parallel.test_apply import attend, config
from tests.ranks import RankPool
from torchtitan_cp.config import ConfigError
from torchtitan_cp.parallel.apply import shard
from torchtitan_cp.parallel.float8 import convert_linears

SHAPE = LlamaShape(64, 2, 4, 2, 16, 96, vocab_size=61)
TOKENS = (torch.arange(4 * 32) * 7 % 61).view(4, 32)


def make_model(recipe: str | None) -> Llama:
    torch.manual_seed(2)
    model = Llama(SHAPE, attend)
    model.set_rope([1.0] * 8, 1.0, torch.device("cpu"))
    if recipe:
        convert_linears(model, recipe, "cpu", emulate=True)
    return model


def run(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss, summed; its gradients are on the model."""
    logits = model(tokens, torch.arange(32), None)
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="sum")
    loss.backward()
    return loss.detach()


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


def run_sharded() -> list[Tensor]:
    model = make_model("rowwise")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    shard(model, mesh, config(), on_host=False)
    run(model, TOKENS.chunk(2)[mesh.get_local_rank()])
    return [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]


def test_sharded_weights_give_the_same_gradients(ranks: Callable[[int], RankPool]) -> None:
    whole = make_model("rowwise")
    run(whole, TOKENS)
    for got, parameter in zip(ranks(2)(run_sharded)[0], whole.parameters(), strict=True):
        assert parameter.grad is not None
        # Scales of a row of the activations are the same on any rank; those of grad_output's columns are not.
        assert F.cosine_similarity(got.flatten(), parameter.grad.flatten(), 0) > 0.999


def test_what_cannot_be_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(None)
    with pytest.raises(ConfigError, match=r"compute capability 8.9 or newer, and this cpu is none"):
        convert_linears(model, "rowwise", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match=r"and this cuda has 8\.0"):
        convert_linears(model, "rowwise", "cuda")
    odd = Llama(LlamaShape(24, 1, 3, 3, 8, 40, vocab_size=61), attend)
    with pytest.raises(ConfigError, match="no linear layer has sizes divisible by 16"):
        convert_linears(odd, "rowwise", "cpu", emulate=True)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"(?s)needs the package `torchao`, .*pip install 'torchtitan-cp\[float8\]'"):
        convert_linears(model, "rowwise", "cpu", emulate=True)
