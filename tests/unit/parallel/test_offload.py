"""What blocks keep goes to host memory and comes back, and no number changes."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models.llama import Llama, LlamaArgs
from tests.support.compiled import counting_backend
from tests.support.deep import deep_rows
from tests.support.small_moe import make_mixture, step
from torchtitan_cp.attention import OPERATOR, AttentionMask, Plan, attend, make_plan
from torchtitan_cp.config.training import Activation, Compile
from torchtitan_cp.parallel import blocks
from torchtitan_cp.parallel.activation import _is_kept, _saving_contexts, checkpointed, recomputed
from torchtitan_cp.parallel.offload import HostMemory, OffloadedTensor, restore

SHAPE = LlamaArgs(32, 3, 4, 2, 8, 48, vocab_size=61)
S = 64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def attend_layer(q: Tensor, k: Tensor, v: Tensor, plan: Plan, window: int) -> Tensor:
    return attend(q, k, v, plan)


def make_model(device: str) -> Llama:
    torch.manual_seed(3)
    model = Llama(SHAPE, attend_layer).to(device)
    model.set_rope([1.0, 0.1, 0.01, 0.001], 1.0, torch.device(device))
    return model


def micro_batches(device: str) -> list[tuple[Tensor, Plan]]:
    """Two, with masks of their own."""
    tokens = torch.randint(0, 61, (2, 2, S), device=device, generator=torch.Generator(device).manual_seed(1))
    masks = [AttentionMask(), AttentionMask(document_lengths=((10, 54),))]
    return [(part, make_plan(S, mask=mask, kernel="reference")) for part, mask in zip(tokens, masks, strict=True)]


def gradients(model: Llama, device: str, order: Callable[[list[Tensor]], Iterator[Tensor]]) -> dict[str, Tensor]:
    """Of both micro-batches, both forwards first, and the backwards in an order."""
    positions = torch.arange(S, device=device)
    losses = [model(tokens, positions, plan).square().sum() for tokens, plan in micro_batches(device)]
    for loss in order(losses):
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]


class CountingMemory(HostMemory):
    """Counts the bytes that it copies out, and the copies back (True) and out."""

    offloaded_bytes = 0

    def __init__(self, device: torch.device, min_bytes: int) -> None:
        super().__init__(device, min_bytes)
        self.copies = Counter[bool]()

    def copy_stream(self, source: Tensor | None = None) -> Any:
        self.copies[source is None] += 1
        return super().copy_stream(source)

    def offload(self, tensor: Tensor) -> Any:
        held = super().offload(tensor)
        self.offloaded_bytes += tensor.nbytes * isinstance(held, OffloadedTensor)
        return held


def offloaded(model: nn.Module, kind: str, tiles: int, compiled: bool, device: str) -> CountingMemory:
    host = CountingMemory(torch.device(device), min_bytes=1024)
    activation = Activation(checkpoint=kind, mlp_tiles=tiles, offload=True)
    with (
        patch.object(blocks, "HostMemory", lambda _: host),
        patch.object(torch.accelerator, "current_device_index", lambda: 0),
    ):
        # For a CPU it would not offload.
        blocks.wrap_blocks(model, activation, Compile(enable=compiled), "cuda")
    return host


HIDDEN = 2 * S * 32 * 4
ATTENTION = HIDDEN + 2 * S * 4 * 4
# wq, wk and wv, wo, w1 and w3, w2.
PRODUCTS = 2 * S * (32 + 2 * 16 + 32 + 2 * 48 + 32) * 4
# [checkpoint, tiles, compiled] -> bytes offloaded by a block in a forward; None: more than the inputs.
KINDS = {
    ("full", 1, False): HIDDEN,
    ("attention_saved", 1, False): HIDDEN + ATTENTION,
    ("attention_saved", 2, False): HIDDEN + ATTENTION,
    ("none", 1, False): None,
    ("selective", 1, False): HIDDEN + ATTENTION + PRODUCTS,
    ("attention_saved", 1, True): HIDDEN + ATTENTION,
}
# Which loss goes backward before the other.
ORDERS: dict[str, Callable[[list[Tensor]], Iterator[Tensor]]] = {"first": iter, "last": reversed}


@pytest.mark.parametrize("device", DEVICES)
@deep_rows(
    ("kind", "tiles", "compiled", "order"),
    [(*kind, order) for kind in KINDS for order in ORDERS],
    default=[(*kind, order) for kind in KINDS for order in ORDERS if order == "first" or not kind[2]],
)
def test_gradients_are_the_same_bits_and_what_is_kept_was_offloaded(
    kind: str, tiles: int, compiled: bool, order: str, device: str
) -> None:
    plain, model = make_model(device), make_model(device)
    blocks.wrap_blocks(plain, Activation(mlp_tiles=tiles), Compile(), device)
    want = gradients(plain, device, ORDERS[order])
    host = offloaded(model, kind, tiles, compiled, device)
    offloaded_bytes = KINDS[kind, tiles, compiled]
    got = gradients(model, device, ORDERS[order])
    for name, gradient in want.items():
        if compiled:
            torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(got[name], gradient), name
    assert host.copies[True] <= host.copies[False], "what went comes back once at most"
    forwards = 2 * SHAPE.n_layers
    if offloaded_bytes:
        assert host.offloaded_bytes == forwards * offloaded_bytes
    else:
        assert host.offloaded_bytes > 5 * forwards * HIDDEN


@deep_rows("kind", ("full", "attention_saved"), default=["attention_saved"])
def test_of_a_compiled_mixture_the_inputs_of_both_halves_are_offloaded(kind: str) -> None:
    plain, model = make_mixture(), make_mixture()
    with counting_backend("aot_eager"):
        host = offloaded(model, kind, 1, True, "cpu")
        for got, want in zip(step(model, S, 0), step(plain, S, 0), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert host.offloaded_bytes == 2 * (2 * HIDDEN + ATTENTION * (kind == "attention_saved"))


def test_what_linear_layers_save_leaves_the_device_once_and_their_weights_stay() -> None:
    model, plain = make_model("cpu"), make_model("cpu")
    want = gradients(plain, "cpu", iter)
    host = offloaded(model, "none", 1, False, "cpu")
    copied = list[Tensor]()
    offload = host.offload
    host.offload = lambda tensor: (copied.append(tensor), offload(tensor))[1]  # type: ignore[method-assign, func-returns-value]
    got = gradients(model, "cpu", iter)
    assert all(torch.equal(got[name], gradient) for name, gradient in want.items())
    # Inputs of wq, wk, wv in one tensor, of wo, of w1 and w3 in one, and of w2, as their 2-D views.
    rows = [tuple(tensor.shape) for tensor in copied if tensor.ndim == 2]
    assert rows.count((2 * S, 32)) == 3 * 2 * SHAPE.n_layers
    assert rows.count((2 * S, 48)) == 2 * SHAPE.n_layers
    assert len(rows) == 4 * 2 * SHAPE.n_layers
    kept = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert not kept & {tensor.untyped_storage().data_ptr() for tensor in copied}


def test_hidden_states_may_be_given_by_name_and_other_inputs_stay() -> None:
    host, block, weight = CountingMemory(torch.device("cpu"), min_bytes=1), nn.Identity(), torch.ones(8, 8)
    run = host.offload_saved(lambda *, hidden, other: hidden * 2 @ other, block)
    run(hidden=torch.ones(3, 8, requires_grad=True), other=weight.requires_grad_()).sum().backward()
    assert host.offloaded_bytes == 3 * 8 * 4


@pytest.mark.parametrize("min_bytes", [1, 1 << 20])
def test_a_write_to_what_was_saved_is_refused_as_without_offload(min_bytes: int) -> None:
    host = HostMemory(torch.device("cpu"), min_bytes)
    run = host.offload_saved(lambda x: (y := x.exp(), y.square(), y.add_(1))[1], nn.Identity())
    output = run(torch.ones(3, 8, requires_grad=True))
    with pytest.raises(RuntimeError, match="was written to in place after it was saved"):
        output.sum().backward()


def test_a_tensor_saved_twice_comes_back_twice() -> None:
    host = HostMemory(torch.device("cpu"), min_bytes=8)
    x = torch.full((4,), 2.0)
    twice = host.offload(x)
    twice.uses += 1
    assert torch.equal(restore(twice), x)
    assert twice.back is not None
    assert torch.equal(restore(twice), x)
    assert twice.back is None


def test_the_attention_is_not_run_twice_when_it_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, runs = make_model("cpu"), []
    host = HostMemory(torch.device("cpu"), min_bytes=1)
    for layer in model.layers.values():
        layer.forward = checkpointed(layer.forward, "attention_saved", host, compiled=False)  # type: ignore[method-assign]
    with Counted(runs):
        gradients(model, "cpu", iter)
    assert len(runs) == 2 * SHAPE.n_layers


class Counted(TorchDispatchMode):
    """Counts runs of the attention's forward that reach the device."""

    def __init__(self, runs: list[object]) -> None:
        super().__init__()
        self.runs = runs

    def __torch_dispatch__(self, function: object, types: object, args: object = (), kwargs: object = None) -> object:
        if function is OPERATOR:
            self.runs.append(function)
        return function(*args, **(kwargs or {}))  # type: ignore[operator,misc]


def test_a_tensor_is_fetched_while_the_one_kept_after_it_is_used() -> None:
    host = HostMemory(torch.device("cpu"), min_bytes=8)
    tensors = [torch.full((4,), float(number)) for number in range(3)]
    offloaded = [host.offload(tensor) for tensor in tensors]
    assert all(isinstance(each, OffloadedTensor) and each.back is None for each in offloaded)
    assert host.offload(torch.zeros(1)).shape == (1,)
    assert torch.equal(restore(offloaded[2]), tensors[2])
    assert [each.back is not None for each in offloaded] == [False, True, False]
    del offloaded[2]
    assert torch.equal(restore(offloaded[1]), tensors[1])
    assert offloaded[0].back is not None


def test_a_cpu_says_that_offloading_is_inactive(caplog: pytest.LogCaptureFixture) -> None:
    blocks.wrap_blocks(make_model("cpu"), Activation(offload=True), Compile(), "cpu")
    assert "activation.offload is inactive" in caplog.text


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["full", "attention_saved"])
def test_the_device_holds_less(kind: str) -> None:
    peaks = []
    for offload in (False, True):
        shape = LlamaArgs(512, 8, 8, 8, 64, 512, vocab_size=61)
        model = Llama(shape, attend_layer).to("cuda", torch.bfloat16)
        model.set_rope([1.0] * 32, 1.0, torch.device("cuda"))
        blocks.wrap_blocks(model, Activation(checkpoint=kind, offload=offload), Compile(), "cuda")
        tokens = torch.zeros(1, 16384, dtype=torch.int64, device="cuda")
        positions = torch.arange(16384, device="cuda")
        gc.collect()  # the model before it holds itself, as its blocks' forwards are replaced
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(tokens, positions, make_plan(16384), lambda hidden, output: hidden.float().square().sum()).backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del model
    # Eight inputs of 16 MiB each, and for attention_saved as much again.
    assert peaks[1] < peaks[0] - 4 * 16384 * 512 * 2


def add_in_place(x: Tensor, weight: Tensor, row: Tensor) -> Tensor:
    """A product that is written to behind autograd's back: its view has a version counter of its own."""
    return torch.ops.aten._unsafe_view(x @ weight, [-1]).add_(row).square()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("min_bytes", [None, 1, 1 << 20], ids=["device", "host", "host, too small"])
def test_a_product_that_is_written_to_in_place_is_kept_as_it_was_before(min_bytes: int | None, device: str) -> None:
    waits = list[Tensor]()
    host = HostMemory(torch.device(device), min_bytes) if min_bytes else None
    if host:
        host.wait_for = lambda tensor, wait=host.wait_for: (waits.append(tensor.clone()), wait(tensor))  # type: ignore
    contexts = partial(_saving_contexts, partial(_is_kept, "selective"), host)
    inputs = [torch.randn(*shape, device=device, requires_grad=True) for shape in ((3, 4), (4, 5), (15,))]
    want = torch.autograd.grad(add_in_place(*inputs).sum(), inputs)
    output = recomputed(add_in_place, contexts)(*inputs)
    assert not waits or torch.equal(waits[0], (inputs[0] @ inputs[1]).flatten()), "it waited before it wrote"
    assert len(waits) == (min_bytes == 1)
    for got, gradient in zip(torch.autograd.grad(output.sum(), inputs), want, strict=True):
        assert torch.equal(got, gradient)
