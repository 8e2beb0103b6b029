"""Names and settings in PEFT's format."""

import pytest

from models.llama.hub import HUB
from models.moe.hub import HUB as MIXTURE
from torchtitan_cp.checkpoint.peft import Trained, adapter_config, peft_names
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
