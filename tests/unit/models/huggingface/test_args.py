"""Sizes of a model that a config.json describes."""

import json
from dataclasses import replace
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models.huggingface.args import HuggingFaceArgs, args_from_config
from models.huggingface.hub import settings
from tests.support.huggingface_families import FAMILIES, SIZES, WINDOW


def test_fewer_layers_shorten_what_has_a_value_for_each_layer() -> None:
    config = {**FAMILIES["Gemma 3"], "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    mixers = args_from_config(config, {"num_hidden_layers": 3}).mixers
    assert [mixer.window for mixer in mixers] == [WINDOW, 0, WINDOW]


def test_a_tokenizers_vocabulary_has_no_padding_of_the_configs() -> None:
    config = {**FAMILIES["Phi-3"], "vocab_size": 40_000, "pad_token_id": 32_000}
    args = args_from_config(config, {"vocab_size": 0})
    assert replace(args, vocab_size=260).probe.vocab_size == 260
    assert settings(replace(args, vocab_size=260))["pad_token_id"] is None
    assert settings(args_from_config(config, {}))["pad_token_id"] == 32_000


@pytest.mark.parametrize(
    ("config", "overrides", "says"),
    [
        ({"model_type": "mine"}, {}, "'mine', which transformers does not have"),
        ({"model_type": "llama"}, {"hidden": 1}, "LlamaConfig has no 'hidden'; did you mean 'hidden_act'"),
        ({"model_type": "llama"}, {"xyz": 1}, "LlamaConfig has no 'xyz'; it has .*, vocab_size"),
        ({"model_type": "llama"}, {"hidden_size": 50}, "refuses this config of 'llama'"),
        ({"model_type": "t5"}, {}, "no causal language model of type 't5'"),
        ({"model_type": "llama"}, {"num_hidden_layers": 0}, "LlamaForCausalLM has .* no list of its 0 layers"),
        (FAMILIES["JetMoE"], {"output_router_logits": True}, "the balance loss of JetMoeForCausalLM is not supported"),
    ],
)
def test_a_config_that_makes_no_model_is_refused(config: dict[str, Any], overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        args_from_config(config, overrides)


def test_a_multimodal_config_gives_its_text_model_with_overrides() -> None:
    text = {key: value for key, value in FAMILIES["Gemma 3"].items() if key != "model_type"}
    args = args_from_config({"model_type": "gemma3", "text_config": text}, {"vocab_size": 0})
    assert args.config["model_type"] == "gemma3_text"
    assert (args.vocab_size, args.probe.vocab_size) == (0, 288)
    assert args == HuggingFaceArgs(json.loads(json.dumps(args.config)), 0)


def test_a_multimodal_config_keeps_what_it_has_for_its_text_model() -> None:
    """Voxtral has a head_dim of 128 where its text model alone would divide hidden_size; Fuyu has the sizes flat."""
    sizes = {key: FAMILIES["Llama"][key] for key in SIZES}
    voxtral = {"model_type": "voxtral", "text_config": sizes}
    assert args_from_config(voxtral, {}).head_dim == 128
    assert args_from_config(voxtral, {"head_dim": 16}).head_dim == 16
    assert args_from_config({"model_type": "voxtral"}, {}).config["head_dim"] == 128
    fuyu = args_from_config({"model_type": "fuyu", **sizes}, {"num_hidden_layers": 3})
    assert (fuyu.probe.dim, fuyu.n_layers) == (sizes["hidden_size"], 3)


@pytest.mark.parametrize(
    ("kind", "family", "beside", "tied"),
    [
        ("llava", "Llama", {"tie_word_embeddings": True}, True),
        ("llava", "Llama, tied", {"tie_word_embeddings": False}, True),  # transformers takes either for true
        ("cohere_compass", "Cohere Compass", {"tie_word_embeddings": False}, False),
        ("mistral3", "Mistral", {}, False),
    ],
)
def test_whether_embeddings_are_tied_may_stand_beside_the_text_config(
    kind: str, family: str, beside: dict[str, Any], tied: bool
) -> None:
    config = {"model_type": kind, "text_config": FAMILIES[family], **beside}
    assert args_from_config(config, {}).tie_embeddings == tied
    saved = CONFIG_MAPPING[kind].from_dict(dict(config))
    assert args_from_config(saved.to_dict(), {}).tie_embeddings == saved.tie_word_embeddings
