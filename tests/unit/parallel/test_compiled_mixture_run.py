"""A mixture of experts is compiled in parts: how often, what it keeps, what moves, and what comes back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor import metrics
from torch._logging import set_logs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.moe.model import Experts
from tests.support.compiled import counting_backend
from tests.support.deep import deep_rows
from tests.support.small_moe import make_mixture, step
from torchtitan_cp.attention import make_plan
from torchtitan_cp.attention.compiling import compile_rows
from torchtitan_cp.config.training import Activation, Compile
from torchtitan_cp.parallel.blocks import uncompiled_blocks, wrap_blocks

KINDS = ("none", "full", "attention_saved", "selective")


@deep_rows(
    ("kind", "tiles"), [*((kind, 1) for kind in KINDS), ("none", 3), ("full", 3)], default=[("attention_saved", 1)]
)
def test_a_mixture_is_compiled_in_three_graphs_whoever_gets_its_tokens(kind: str, tiles: int) -> None:
    """Of the attention's half at the first length and at others, and of what lies between the products of experts."""
    plain, model = make_mixture(), make_mixture()
    wrap_blocks(plain, Activation(), Compile(enable=False), "cpu")
    with counting_backend("aot_eager") as counter:
        wrap_blocks(model, Activation(checkpoint=kind, mlp_tiles=tiles), Compile(enable=True), "cpu")
        for seed, length in enumerate((24, 24, 40)):
            for got, want in zip(step(model, length, seed), step(plain, length, seed), strict=True):
                assert (got - want).norm() <= 1e-5 * want.norm()
        assert counter.frame_count == 3
        with torch.no_grad():
            model(torch.zeros(1, 24, dtype=torch.int64), torch.arange(24), {0: make_plan(24)})
        assert counter.frame_count == 5, "evaluation has its own"


@pytest.mark.parametrize("kind", ["none", "full"])
def test_uncompiled_for_a_while_a_mixture_goes_on_with_the_code_that_it_had(kind: str) -> None:
    model, activation = make_mixture(), Activation(checkpoint=kind)
    modules = [module for layer in model.layers.values() for module in (layer, layer.experts)]
    with counting_backend("aot_eager") as counter:
        wrap_blocks(model, activation, Compile(enable=True), "cpu")
        wrapped = [dict(vars(module)) for module in modules]
        with uncompiled_blocks(model, activation, "cpu"):
            want = step(model, 24, 0)
            assert not counter.frame_count
        assert [vars(module) for module in modules] == wrapped
        for got, plain in zip(step(model, 24, 0), want, strict=True):
            assert (got - plain).norm() <= 1e-5 * plain.norm()
        assert counter.frame_count == 2
    wrap_blocks(model, Activation(), Compile(enable=False), "cpu")
    assert not any("gated" in vars(module) for module in modules)
    assert not {"forward", "attention_half", "experts_half"} & {name for module in modules for name in vars(module)}


@pytest.mark.parametrize(("kind", "more"), [("full", 0), ("attention_saved", 4 * 8 + 4)])
def test_a_compiled_mixture_keeps_what_passes_between_its_halves(kind: str, more: int) -> None:
    """Numbers of a token: the input of each half, of the width E; and the attention and its log-sum-exp."""
    model, tokens, kept = make_mixture(), 64, dict[int, int]()

    def pack(saved: Tensor) -> Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved.numel()
        return saved

    with counting_backend("aot_eager"):
        wrap_blocks(model, Activation(checkpoint=kind), Compile(enable=True), "cpu")
        hidden, (cos, sin) = torch.randn(1, tokens, 32), model._rotations(torch.arange(tokens))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            out = model.layers["0"](hidden.requires_grad_(), cos, sin, {0: make_plan(tokens)})
    for other in (cos, sin, *model.layers["0"].parameters()):
        kept.pop(other.untyped_storage().data_ptr(), None)
    assert out[0].requires_grad
    assert sum(numbers for numbers in kept.values() if numbers > 1) == tokens * (2 * 32 + more)


class MovedBytes(TorchDispatchMode):
    """Adds up what operators read and write."""

    total = 0

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view and "detach" not in function.name():
            self.total += sum(x.nbytes for x in tree_leaves((args, result)) if isinstance(x, Tensor))
        return result


def gate_and_up(gate_up: Tensor) -> Tensor:
    """As transformers has it."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


# Function, the widths of its inputs; bytes that operators and compiled code move of an element, forward and backward.
GATES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], int, int]] = {
    "gate and up": (Experts.gated, (64, 64), 10 + 18, 6 + 10),
    "both in one": (gate_and_up, (128,), 10 + 26, 6 + 10),
    "squared ReLU": (lambda up: up.relu().square(), (64,), 8 + 20, 4 + 6),
}


@pytest.mark.deep
@pytest.mark.parametrize("kind", GATES)
def test_compiled_what_lies_between_the_products_of_experts_reads_and_writes_each_number_once(kind: str) -> None:
    function, widths, by_operators, compiled = GATES[kind]
    given = [torch.randn(96, width).bfloat16().requires_grad_() for width in widths]
    gradient = torch.randn(96, 64).bfloat16()
    with MovedBytes() as moved:
        want = function(*given)
        gradients = torch.autograd.grad(want, given, gradient)
    assert moved.total == by_operators * want.numel()
    torch._dynamo.reset()
    metrics.num_bytes_accessed = 0
    set_logs(inductor_metrics=True)
    try:
        with inductor_config.patch(force_disable_caches=True):
            out = compile_rows(function)(*given)  # compiles its backward too
    finally:
        set_logs(inductor_metrics=False)
    assert metrics.num_bytes_accessed == compiled * out.numel()
    for got, plain in zip([out, *torch.autograd.grad(out, given, gradient)], [want, *gradients], strict=True):
        torch.testing.assert_close(got, plain)
