"""What the patterns of [lora] find in a model, and what is refused by name."""

import dataclasses

import pytest
from torch import nn

from models import ARCHITECTURES
from models.llama import FLAVORS
from models.moe import FLAVORS as MIXTURES
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.contract import LanguageModel
from torchtitan_cp.config.sections import Model
from torchtitan_cp.config.training import Lora
from torchtitan_cp.parallel.lora_targets import check_pipeline_targets, check_targets, find_targets
from torchtitan_cp.training import registry


def model_of(architecture: str) -> LanguageModel:
    registry.register(ARCHITECTURES)
    flavors = MIXTURES if architecture == "moe" else FLAVORS
    args = dataclasses.replace(flavors["debug"], n_layers=2, vocab_size=64)  # type: ignore[type-var]
    return registry.empty_model(Model(architecture=architecture), args)


def test_every_linear_layer_of_the_blocks_but_routers_has_an_adapter_by_default() -> None:
    found = find_targets(model_of("moe"), Lora())
    assert found.adapted == tuple(f"layers.{n}.attention.w{m}" for n in range(2) for m in "qkvo")
    assert not found.trained


def test_what_is_trained_whole_has_no_adapter_and_a_tied_output_is_the_embedding() -> None:
    found = find_targets(model_of("llama"), Lora(targets=("wq", "w1"), train=("layers.1.*w1", "^norm$", "^output$")))
    assert found.adapted == ("layers.0.attention.wq", "layers.0.feed_forward.w1", "layers.1.attention.wq")
    assert found.trained == ("tok_embeddings.weight", "layers.1.feed_forward.w1.weight", "norm.weight")


def test_frozen_linear_layers_of_whole_groups_are_in_nf4_with_or_without_an_adapter() -> None:
    args = dataclasses.replace(FLAVORS["debug"], dim=128, head_dim=32, n_heads=4, n_kv_heads=2, ffn_dim=128, n_layers=1)
    model = registry.empty_model(Model(architecture="llama"), dataclasses.replace(args, vocab_size=256))
    found = find_targets(model, Lora(base="nf4", targets=("wq", "wk"), train=("w2", "norm")))
    assert found.adapted == ("layers.0.attention.wq", "layers.0.attention.wk")
    names = "attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w3"
    assert found.quantized == tuple(f"layers.0.{name}" for name in names), "wk and wv are half a group"


@pytest.mark.parametrize(
    ("lora", "wanted"),
    [
        (
            Lora(base="nf4", train=("attention",)),
            "no frozen linear layer of the blocks has a multiple of 16,384",
        ),
        (Lora(targets=("wq", "experts")), r"targets\[1\] = 'experts' .*layers.0.experts has all its experts in one te"),
        (Lora(targets=("gate",)), r"finds no linear layer of the blocks: layers.0.router.gate is none"),
        (Lora(targets=("q_proj",)), r"they are like layers.0.attention.wq and layers.1.attention.wo"),
        (Lora(train=("layernorm",)), r"lora.train\[0\] = 'layernorm' finds no module.*\n.*names are like tok_embeddi"),
    ],
)
def test_a_pattern_that_finds_nothing_is_refused_with_what_there_is(lora: Lora, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        check_targets(model_of("moe"), lora)


@pytest.mark.parametrize("lora", [Lora(), Lora(targets=("c_attn",), train=("ln_f",))])
def test_a_model_whose_blocks_have_no_linear_layer_is_refused(lora: Lora) -> None:
    model = model_of("llama")
    for block in model.layers.values():
        for name, module in list(block.named_modules()):
            if isinstance(module, nn.Linear):
                block.set_submodule(name, nn.Embedding(2, 2))  # as Conv1D of transformers is, no linear layer
    with pytest.raises(ConfigError, match=r"blocks of this model have no linear layer .*\n.*train whole in lora.train"):
        check_targets(model, lora)
    check_targets(model, Lora(train=("^norm$",)))


def test_a_pipeline_stage_without_trained_weights_is_refused() -> None:
    names = find_targets(model_of("llama"), Lora(targets=("layers.1.*wq",))).parameters
    assert names == ["layers.1.attention.wq.lora_a", "layers.1.attention.wq.lora_b"]
    check_pipeline_targets(names, [(0, 2)])
    with pytest.raises(ConfigError, match="trains nothing in layers 0 to 0, which are a pipeline stage"):
        check_pipeline_targets(names, [(0, 1), (1, 2)])
