"""Qwen3.5 beside transformers' own, and its checkpoints, with a vision tower and without."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

from models import ARCHITECTURES
from models.qwen3_5 import FLAVORS, Hybrid, HybridArgs
from models.qwen3_5.hub import HUB, NAMES, config, sizes
from tests.support.runs import write_run
from torchtitan_cp.attention import make_plan
from torchtitan_cp.checkpoint.hub import hub_names, load_parts
from torchtitan_cp.cli import check as preflight
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.sections import Model, Rope
from torchtitan_cp.curriculum import rope_frequencies
from torchtitan_cp.training.model import LayerAttention
from torchtitan_cp.training.plain_attention import PlainAttention
from torchtitan_cp.training.registry import model_args_of, register

ARGS = dataclasses.replace(FLAVORS["debug"], vocab_size=120)
TOKENS = 150  # more than two chunks of the gated delta rule
ROPE = {"rope_type": "default", "rope_theta": 1e4}


def build(args: HybridArgs, attend: Any) -> Hybrid:
    """Random weights, none of them zero or one."""
    model = Hybrid(args, attend)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15, generator=generator)
    model.set_rope(*rope_frequencies(Rope(theta=1e4), args.rotary_dim, TOKENS), torch.device("cpu"))
    return model


def names_of(model: Hybrid) -> dict[str, str]:
    """Our names -> theirs."""
    return {name: hub_names(name, p.shape, NAMES)[0][0] for name, p in model.named_parameters()}


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
    plan: Any = {0: make_plan(TOKENS)} if isinstance(attend, LayerAttention) else torch.zeros_like(tokens)
    with Float64():
        got, gradients = loss_and_gradients(model, model(tokens, torch.arange(TOKENS), plan), tokens)
        want, their_gradients = loss_and_gradients(theirs, theirs(tokens).logits, tokens)
    assert (got - want).norm() < 1e-7 * want.norm()
    for name, gradient in gradients.items():
        apart = (gradient - their_gradients[names[name]]).norm() / their_gradients[names[name]].norm()
        assert apart < 1e-6, (name, apart)


def test_every_size_holds_as_many_numbers_as_it_says() -> None:
    for name, published in FLAVORS.items():
        args = dataclasses.replace(published, vocab_size=published.vocab_size or 120)
        with torch.device("meta"):
            model = Hybrid(args, LayerAttention())
        layers = list(model.layers.parameters())
        matrices = sum(p.numel() for p in layers if p.ndim > 1) + args.dim * args.vocab_size
        assert (args.problem(), args.linear_parameters()) == (None, matrices), name
        assert args.small_parameters(1) * args.n_layers == sum(p.numel() for p in layers if p.ndim == 1), name


def test_a_checkpoint_that_sees_pictures_gives_its_text_model(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": ARGS.dim}
    text = config(ARGS) | {"rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]}}
    whole = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    saved = Qwen3_5ForConditionalGeneration(whole)
    saved.save_pretrained(tmp_path)
    register(ARCHITECTURES)
    assert model_args_of(Model(architecture="qwen3_5", hub_checkpoint=str(tmp_path))) == ARGS
    model = build(ARGS, LayerAttention())
    load_parts(tmp_path, [model], names_of(model), HUB)
    theirs = {name.replace("language_model.", ""): p for name, p in saved.named_parameters()}
    for name, their_name in names_of(model).items():
        if name != "output.weight":
            assert torch.equal(model.get_parameter(name), theirs[their_name]), name


def test_what_this_block_is_not_is_refused(tmp_path: Path) -> None:
    register(ARCHITECTURES)
    whole = config(ARGS)
    assert HybridArgs(**sizes(whole)) == ARGS
    kinds = ["full_attention", *["linear_attention"] * 3]
    for changed, why in (
        ({"layer_types": kinds}, "layer_types is not full attention in the last of every few layers"),
        ({"model_type": "qwen3_next"}, "model_type is 'qwen3_next', and this architecture is qwen3_5"),
        ({"attention_bias": True}, "attention_bias is True, and these blocks have False"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(whole | changed))
        with pytest.raises(ConfigError, match=why):
            model_args_of(Model(architecture="qwen3_5", config=str(tmp_path)))
    for size, why in (
        ({"linear_value_heads": 4}, "linear_value_heads = 4 is not a multiple of 3"),
        ({"n_layers": 3}, "n_layers = 3 leaves no layer of full attention"),
        ({"rotary_share": 0.1}, "is no even number of entries"),
        ({"windows": (5,)}, "no windows, biases or sinks"),
        ({"conv_width": 0}, "every size of the gated delta net"),
    ):
        assert why in (dataclasses.replace(ARGS, **size).problem() or ""), size


def test_tensor_parallelism_is_refused_before_a_rank_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Elsewhere the gradient of the delta nets' norm was not summed over its ranks."""
    path = write_run(tmp_path)
    overrides = ("--model.architecture=qwen3_5", "--model.overrides.n_layers=4", "--parallel.tp=2")
    assert preflight.main([str(path), "--ranks", "2", *overrides]) == 2
    refused = "parallel.tp is not supported by the architecture 'qwen3_5': the heads of its gated delta nets"
    assert refused in capsys.readouterr().err
