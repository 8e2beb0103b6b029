"""torch.compile makes one graph for each kind of layer, however many layers a model has."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from models.huggingface.args import args_from_config
from models.huggingface.model import HuggingFaceModel
from tests.support.compiled import counting_backend
from tests.support.deep import deep_rows
from tests.support.huggingface_families import FAMILIES, Keys, random_weights, with_layers
from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.config.training import Activation, Compile
from torchtitan_cp.parallel.blocks import wrap_blocks
from torchtitan_cp.parallel.experts import RoutingSums, dispatch_experts
from torchtitan_cp.training.model import LayerAttention

# Beam scales a residual by the square root of the layer's number, Gemma 3n's MLPs differ by layer.
NUMBERS = ("attn_residual_add_idx", "mlp_residual_add_idx", "activation_sparsity", "is_kv_shared_layer")
# Later layers reuse keys that earlier ones put into a dict: code is made for an empty dict, and for one or two entries.
OWN_ADAPTERS = "Zamba2"  # a block that its layers share adds the adapter of the layer's number, a constant of the code
SHARES_KEYS, MORE_GRAPHS = ("Gemma 3n", "Gemma 4", "Gemma 4 unified"), 3
DEPTHS = (1, 2, 4)  # times a family's own: 2, 4 and 8 layers, or 4, 8 and 16


# These have modules of their own in place of stacked experts.
APART = ("Flint", "JetMoE")
MIXTURES = [name for name, keys in FAMILIES.items() if any("expert" in key for key in keys) and name not in APART]


@deep_rows("family", MIXTURES, default=["Qwen3-MoE", "Nemotron-H"])
def test_what_lies_between_the_products_of_experts_takes_one_graph_where_ranks_share_them(family: str) -> None:
    args = args_from_config(FAMILIES[family], {})
    model = HuggingFaceModel(args, LayerAttention())
    random_weights(model, 0)
    dispatch_experts(model, RoutingSums(args.n_layers, args.n_experts, torch.device("cpu")), None)
    with counting_backend() as counter:
        wrap_blocks(model, Activation(), Compile(enable=True), "cpu", ep=2)
        for number in model.layers.keys() - set(map(str, model.experts)):
            del model.layers[number].forward  # compiled whole
        for length in (32, 48, 40):
            plans = {
                mixer.window: make_plan(length, mask=AttentionMask().windowed(mixer.window)) for mixer in args.mixers
            }
            tokens, positions = torch.randint(200, (1, length)), torch.arange(length)[None]
            model(tokens, positions, plans).float().square().mean().backward()  # type: ignore[attr-defined]
            assert counter.frame_count == 1


def graphs_and_kinds(config: Keys, checkpoint: str = "none", lengths: tuple[int, ...] = (32,)) -> tuple[int, int]:
    """How many graphs the layers of a model take in forward and backward, and of how many kinds they are."""
    args = args_from_config(config, {})
    model = HuggingFaceModel(args, LayerAttention())
    random_weights(model, 0)
    dispatch_experts(model, RoutingSums(args.n_layers, args.n_experts, torch.device("cpu")), None)
    layers = args.probe.layers
    with counting_backend() as counter:
        wrap_blocks(model, Activation(checkpoint=checkpoint), Compile(enable=True), "cpu")
        for length in lengths:
            plans: dict[int, Any] = {}
            for window in {0, *(mixer.window for mixer in args.mixers)}:
                plans[window] = make_plan(length, mask=AttentionMask().windowed(window))
            tokens, positions = torch.randint(200, (1, length)), torch.arange(length)[None]
            model(tokens, positions, plans).float().square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.layers["0"].parameters() if parameter.requires_grad)
    linear = (layer.linear and replace(layer.linear, module="") for layer in layers)
    looks = (
        replace(layer, name="", attention="", experts="", scale=0.0, linear=part)
        for layer, part in zip(layers, linear, strict=True)
    )
    return counter.frame_count, len(set(zip(looks, map(kind_of, model.layers.values()), strict=True)))


def kind_of(layer: nn.Module) -> tuple[object, ...]:
    """What else makes layers differ: the classes of their modules, and numbers that their code computes with."""
    modules = list(layer.modules())
    numbers = [getattr(module, name, None) for module in modules for name in NUMBERS]
    return (*map(type, modules), *numbers)


@deep_rows("family", FAMILIES, default=["Qwen3-MoE", "GPT-2"])
def test_each_kind_of_layer_takes_one_graph(family: str) -> None:
    own = FAMILIES[family]["num_hidden_layers"]
    found = {n * own: graphs_and_kinds(with_layers(FAMILIES[family], n * own)) for n in DEPTHS}
    more = MORE_GRAPHS if family in SHARES_KEYS else 0
    allowed = {n: n if family == OWN_ADAPTERS else kinds + more for n, (_, kinds) in found.items()}
    assert all(0 < graphs <= allowed[n] for n, (graphs, _) in found.items()), found


@deep_rows("checkpoint", ("full", "attention_saved", "selective"), default=["full"])
def test_recomputed_layers_of_a_mixture_take_one_graph_for_each_length(checkpoint: str) -> None:
    for layers in (2, 4):
        graphs, kinds = graphs_and_kinds(with_layers(FAMILIES["Qwen3-MoE"], layers), checkpoint, (32, 48))
        assert graphs == 2 * kinds == 2
