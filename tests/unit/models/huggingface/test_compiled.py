"""torch.compile makes one graph for each kind of layer, however many layers a model has."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from models.huggingface.args import args_from_config
from models.huggingface.model import HuggingFaceModel
from tests.support.deep import deep_rows
from tests.support.huggingface_families import FAMILIES, Keys, random_weights, with_layers
from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.config.sections import Activation, Compile
from torchtitan_cp.parallel.apply import wrap_blocks
from torchtitan_cp.parallel.experts import RoutingSums, dispatch_experts
from torchtitan_cp.training.model import LayerAttention

DEPTHS = (1, 2, 4)  # times a family's own: 2, 4 and 8 layers, or 4, 8 and 16


@contextmanager
def counting_backend() -> Iterator[CompileCounterWithBackend]:
    """torch.compile that counts graphs and runs them as they are."""
    torch._dynamo.reset()
    counter, compile_with = CompileCounterWithBackend("eager"), torch.compile
    with mock.patch(
        "torch.compile", lambda function, mode=None, **keys: compile_with(function, backend=counter, **keys)
    ):
        yield counter


def graphs_and_kinds(config: Keys, checkpoint: str = "none", lengths: tuple[int, ...] = (32,)) -> tuple[int, int]:
    """How many graphs the layers of a model take in forward and backward, and of how many kinds they are."""
    args = args_from_config(config, {})
    model = HuggingFaceModel(args, LayerAttention())
    random_weights(model, 0)
    dispatch_experts(model, RoutingSums(args.n_layers, args.n_experts, torch.device("cpu")), None)
    layers = args.look.layers
    with counting_backend() as counter:
        wrap_blocks(model, Activation(checkpoint=checkpoint), Compile(enable=True), "cpu")
        for length in lengths:
            plans: dict[int, Any] = {}
            for window in {0, *args.layer_windows}:
                plans[window] = make_plan(length, mask=AttentionMask().windowed(window))
            tokens, positions = torch.randint(200, (1, length)), torch.arange(length)[None]
            model(tokens, positions, plans).float().square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.layers["0"].parameters() if parameter.requires_grad)
    kinds = {replace(layer, name="", attention="", experts="", scale=0.0) for layer in layers}
    return counter.frame_count, len(kinds)


@deep_rows("family", FAMILIES, default=["Qwen3-MoE", "GPT-2"])
def test_each_kind_of_layer_takes_one_graph(family: str) -> None:
    own = FAMILIES[family]["num_hidden_layers"]
    found = {n * own: graphs_and_kinds(with_layers(FAMILIES[family], n * own)) for n in DEPTHS}
    assert all(0 < graphs <= kinds for graphs, kinds in found.values()), found


@deep_rows("checkpoint", ("full", "attention_saved", "selective"), default=["full"])
def test_recomputed_layers_of_a_mixture_take_one_graph_for_each_length(checkpoint: str) -> None:
    for layers in (2, 4):
        graphs, kinds = graphs_and_kinds(with_layers(FAMILIES["Qwen3-MoE"], layers), checkpoint, (32, 48))
        assert graphs == 2 * kinds == 2
