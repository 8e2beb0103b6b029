"""The rotary embedding of every export is the run's, as transformers' own modules compute it from the config.json."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models import ARCHITECTURES
from models.huggingface.args import args_from_config
from models.huggingface.model import HuggingFaceModel
from tests.support.deep import deep_rows
from tests.support.huggingface_families import FAMILIES, rope, two_ropes, yarn
from tests.support.ropes import draw
from torchtitan_cp.checkpoint.hub_rope import hub_rope
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.names import ROPE_KINDS
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.config.sections import Model
from torchtitan_cp.training.export import written_config
from torchtitan_cp.training.model import set_rope
from torchtitan_cp.training.read_back import TOLERANCE, check_rotaries, rotaries
from torchtitan_cp.training.registry import NO_ATTENTION, args_from, config_for_hub, register, sizes_of

CPU = torch.device("cpu")
HUGGING_FACE = Model(architecture="huggingface")
# What a family refuses, and the words it says it with.
REFUSED = {
    ("Ministral 3", "yarn"): "original_seq_len has to be that",
    ("Ministral 3", "longrope"): "original_seq_len has to be that",
    ("Ministral 3", "llama3"): "original_seq_len has to be that",
    ("Phi-3", "linear"): "type field must",
    ("Phi-3", "yarn"): "Missing required keys",
    ("Phi-3", "llama3"): "type field must",
    ("Phi-3, longrope", "linear"): "type field must",
    ("Phi-3, longrope", "yarn"): "Missing required keys",
    ("Phi-3, longrope", "llama3"): "type field must",
}
# Two rotary embeddings; no head_dim.
DEFAULT = ("OLMo 3", "Mixtral")


@pytest.fixture(autouse=True)
def architectures() -> None:
    register(ARCHITECTURES)


def read(values: dict[str, Any]) -> Any:
    """A model of transformers with real weights, from a config.json as it is in a file."""
    values = PreTrainedConfig._decode_special_floats(json.loads(json.dumps(values, allow_nan=False)))
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[values["model_type"]].from_dict(values))


def check_modules(ours: Any, theirs: Any, last_position: int) -> None:
    """Compare the rotary embeddings of two models, module by module."""
    modules, compared = dict(theirs.named_modules()), 0
    for name, mine in ours.named_modules():
        kinds = getattr(mine, "rope_type", None)
        for layer_type in kinds if isinstance(kinds, dict) else [] if kinds is None else [""]:
            other, prefix = modules[name], f"{layer_type}_" if layer_type else ""
            kind = other.rope_type[layer_type] if layer_type else other.rope_type
            if kind in ("longrope", "dynamic"):
                other(torch.zeros(1, 1, 2), torch.tensor([[last_position]]), *filter(None, [layer_type]))
            have, want = (getattr(module, f"{prefix}inv_freq").double() for module in (mine, other))
            # transformers blends in fp32: in parts of the unscaled frequencies, which are at most 1.
            assert torch.allclose(have, want, rtol=TOLERANCE, atol=TOLERANCE), (name, layer_type)
            scalings = [getattr(module, f"{prefix}attention_scaling") for module in (mine, other)]
            assert scalings[0] == pytest.approx(scalings[1], rel=1e-9), (name, layer_type)
            compared += 1
    assert compared


@deep_rows("family", FAMILIES, default=[family for family in DEFAULT if family in FAMILIES])
def test_an_export_of_every_rope_has_the_frequencies_of_the_run(family: str) -> None:
    args = args_from_config(FAMILIES[family], {})
    model = HuggingFaceModel(args, NO_ATTENTION)
    for number, kind in enumerate(kind for kind in ROPE_KINDS for _ in range(3)):
        drawn, _, seq_len = draw(kind, random.Random(number), args.rotary_dim or 16)
        if problem := args.rope_problem(kind):
            assert str(args.probe.model_class) in problem
            continue
        refused = REFUSED.get((family, kind), "")
        if family == "Cohere Compass" and not drawn.truncate:
            refused = "beside full_attention, where cohere_compass_text does not take it"
        if refused:
            with pytest.raises(ConfigError, match=refused):
                config_for_hub(HUGGING_FACE, args, seq_len, drawn)
            continue
        values = config_for_hub(HUGGING_FACE, args, seq_len, drawn)
        set_rope(model, args, drawn, seq_len, CPU)
        check_modules(model, read(values), seq_len - 1)


@deep_rows("family", FAMILIES, default=["Phi-3, longrope"])
def test_an_export_of_the_models_own_rope_has_the_frequencies_of_the_run(family: str) -> None:
    args = args_from_config(FAMILIES[family], {})
    if not args.probe.rotaries:
        return
    model = HuggingFaceModel(args, NO_ATTENTION)
    for seq_len in (128, 2048):
        set_rope(model, args, None, seq_len, CPU)
        check_modules(model, read(config_for_hub(HUGGING_FACE, args, seq_len, None)), seq_len - 1)


NO_FACTOR = {"rope_parameters": {**yarn(1e4), "factor": None}}


def test_a_factor_that_follows_from_the_length_keeps_that_length() -> None:
    args = args_from_config({**FAMILIES["Llama"], **NO_FACTOR}, {})
    values = config_for_hub(HUGGING_FACE, args, 128, None)
    assert values["max_position_embeddings"] == 512
    check_modules(read(args.config), read(values), 127)


@deep_rows(
    "family",
    [name for name in ("OLMo 3", "Gemma 3", "Gemma 3n", "Mellum", "MiMo-V2-Flash") if name in FAMILIES],
    default=["OLMo 3"],
)
@pytest.mark.parametrize("beside", [False, True])
def test_a_stages_yarn_takes_truncate_from_where_transformers_reads_it(family: str, beside: bool) -> None:
    ropes = two_ropes(**yarn(3e4, truncate=False))["rope_parameters"]
    config = {**FAMILIES[family], "rope_parameters": ropes | ({"truncate": False} if beside else {})}
    args = args_from_config(config, {})
    found = hub_rope(args.config)
    assert found.truncate is not beside
    check_rotaries(args.config, found, args.rotary_dim, 256, args.config)
    values = config_for_hub(HUGGING_FACE, args, 256, found)
    assert values["rope_parameters"].get("truncate", True) is not beside


def test_what_a_config_leaves_out_is_left_out_or_filled_in() -> None:
    args = args_from_config(FAMILIES["Mixtral"], {})
    assert args.config["head_dim"] is None
    for stage_rope in (None, Rope(3e4, "yarn", 4.0, original_seq_len=128)):
        values = config_for_hub(HUGGING_FACE, args, 512, stage_rope)
        assert values["head_dim"] == 12
        assert None not in values.values()
    windowless = args_from_config({**FAMILIES["Mistral"], "sliding_window": None}, {})
    values = config_for_hub(HUGGING_FACE, windowless, 512, None)
    assert values["sliding_window"] is None, "the class has 4096"


OURS = {
    "llama": ("llama", {}),
    "mistral": ("llama", {"windows": [64]}),
    "ministral": ("llama", {"windows": [64, 0]}),
    "qwen2": ("llama", {"qkv_bias": True}),
    "qwen3": ("llama", {"qk_norm": True, "head_dim": 16}),
    "qwen3_moe": ("moe", {"qk_norm": True}),
    "qwen3_5_text": ("qwen3_5", {}),
}


@deep_rows("family", OURS, default=["qwen3"])
def test_an_export_of_our_own_architectures_has_the_frequencies_of_the_run(family: str) -> None:
    name, options = OURS[family]
    model = Model(architecture=name)
    debug = next(one for one in ARCHITECTURES if one.name == name).flavors["debug"]
    args = args_from(model, {**sizes_of(debug), "windows": [0], "vocab_size": 288, **options})
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    for number, kind in enumerate(kind for kind in ROPE_KINDS for _ in range(3)):
        drawn, _, seq_len = draw(kind, random.Random(number), args.rotary_dim)
        config = config_for_hub(model, args, seq_len, drawn)
        values = written_config(model, config, args, seq_len, drawn, tokens)
        assert values["model_type"] == family
        check_rotaries(values, drawn, args.rotary_dim, seq_len)
        assert hub_rope(values).theta == pytest.approx(values["rope_theta"])
        other = replace(drawn, theta=1.01 * drawn.theta)
        with pytest.raises(ValueError, match="would give its layers other rotary frequencies than training does"):
            check_rotaries(values, other, args.rotary_dim, seq_len)


def test_a_config_that_transformers_does_not_read_is_refused() -> None:
    args = args_from_config(FAMILIES["Mixtral"], {})
    unread = {**args.config, "rope_parameters": yarn(1e4)}  # and "head_dim": null
    with pytest.raises(ValueError, match=r"transformers does not read the config.json: unsupported operand"):
        rotaries(json.dumps(unread), 128)


def test_rotaries_of_layers_with_windows_are_to_stay() -> None:
    args = args_from_config(FAMILIES["Gemma 3"], {})
    local = {"sliding_attention": rope(2e4), "full_attention": rope(3e4)}
    with pytest.raises(ValueError, match=r"give layers of sliding_attention other .* with the model's own kind"):
        check_rotaries({**args.config, "rope_parameters": local}, Rope(3e4), 16, 128, args.config)
