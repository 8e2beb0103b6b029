"""Names and settings in PEFT's format."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from models.llama.hub import HUB
from models.moe.hub import HUB as MIXTURE
from torchtitan_cp.checkpoint.peft import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Trained,
    adapter_config,
    check_adapter,
    check_whole_modules,
    load_adapter,
    peft_names,
)
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.training import Lora


def test_a_tied_embedding_has_both_its_names() -> None:
    trained = {
        "layers.3.attention.wq.lora_a": Trained((4, 8)),
        "tok_embeddings.weight": Trained((9, 8), ("output.weight",)),
    }
    assert peft_names(trained, HUB) == {
        "layers.3.attention.wq.lora_a": ["base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"],
        "tok_embeddings.weight": ["base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"],
    }


def test_experts_that_are_trained_whole_have_no_place() -> None:
    with pytest.raises(ConfigError, match=r"no place for layers.0.experts.w1, which \[lora\] trains whole\n.*--merge"):
        peft_names({"layers.0.experts.w1": Trained((2, 8, 8))}, MIXTURE)


def test_a_weight_beside_inner_modules_has_no_place_as_peft_trains_whole_modules() -> None:
    model, mixer = nn.Module(), nn.Module()
    model.mixer, mixer.project, mixer.decay = mixer, nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    check_whole_modules(model, ["mixer.project.weight", "mixer.project.bias"])
    with pytest.raises(ConfigError, match=r"no place for mixer.decay, .* mixer contains project.weight too\n.*--merge"):
        check_whole_modules(model, ["mixer.decay"])


@pytest.mark.parametrize(
    ("others", "targets"),
    [
        (["model.layers.0.mlp.up_proj", "lm_head"], ["q_proj", "v_proj"]),
        (["model.layers.1.self_attn.q_proj"], ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"]),
    ],
)
def test_a_last_name_stands_for_all_layers_that_end_so(others: list[str], targets: list[str]) -> None:
    adapted = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"]
    assert adapter_config(Lora(), "base", adapted, others, [])["target_modules"] == targets


@pytest.mark.parametrize("first", ["pissa", "pissa_niter_4", "olora", "corda", "loftq"])
def test_first_values_that_change_the_base_model_are_refused(tmp_path: Path, first: str) -> None:
    config = {"r": 16, "lora_alpha": 32}
    for harmless in (True, "gaussian", "eva", "orthogonal"):
        (tmp_path / CONFIG_FILE).write_text(json.dumps({**config, "init_lora_weights": harmless}))
        check_adapter(tmp_path, Lora())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**config, "init_lora_weights": first}))
    with pytest.raises(
        ConfigError, match=rf"has init_lora_weights = '{first}', .*\n.*the model that PEFT merges it into"
    ):
        check_adapter(tmp_path, Lora())


EMBEDDING, OUTPUT = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"


@pytest.mark.parametrize(("output", "problem"), [(None, "and no"), (2.0, "and other values in")])
def test_an_adapter_that_unties_the_embedding_is_refused(tmp_path: Path, output: float | None, problem: str) -> None:
    trained = {"tok_embeddings.weight": Trained((9, 8), ("output.weight",))}
    save_file({EMBEDDING: torch.ones(9, 8), OUTPUT: torch.ones(9, 8)}, tmp_path / WEIGHTS_FILE)
    load_adapter(tmp_path, [], trained, HUB)
    tensors = {EMBEDDING: torch.ones(9, 8)} | ({} if output is None else {OUTPUT: torch.full((9, 8), output)})
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    message = (
        rf"has {re.escape(EMBEDDING)}, {problem} {re.escape(OUTPUT)}, which the model ties to it.*\n.*tie_word_emb"
    )
    with pytest.raises(ConfigError, match=message):
        load_adapter(tmp_path, [], trained, HUB)
