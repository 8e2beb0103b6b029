"""A model that would be wrong across ranks is refused before a run, by the layer and class that stand in its way."""

import json
from pathlib import Path

import pytest

from tests.support.deep import deep_rows
from tests.support.huggingface_families import FAMILIES, REFUSED
from tests.support.huggingface_parity import write_config
from torchtitan_cp.cli.check import main

# What the message names.
AT_FAULT = {
    "PhiMoE": "model.layers.0.self_attn (PhimoeAttention)",
    "PhiMoE, jitter": "model.layers.0.mlp.router (PhimoeTopKRouter)",
    "Llama 4": "model.layers.0.self_attn (Llama4TextAttention)",
    "Qwen3-Next": "model.layers.0.linear_attn.conv1d (Conv1d)",
    "Qwen3.5": "model.layers.0.linear_attn.conv1d (Conv1d)",
    "Qwen3.5-MoE": "model.layers.0.linear_attn.conv1d (Conv1d)",
    "OLMo-Hybrid": "model.layers.0.linear_attn.conv1d (Conv1d)",
    "Kimi Linear": "model.layers.0.self_attn.conv1d (Conv1d)",
    "Bailing hybrid": "model.layers.0.self_attn.conv1d (Conv1d)",
    "MiniMax-01": "model.layers.0 (MiniMaxDecoderLayer)",
    "Nemotron-H": "model.layers.0.mixer.conv1d (Conv1d)",
    "LFM2": "model.layers.0.conv.conv (Conv1d)",
    "LFM2-MoE": "model.layers.0.conv.conv (Conv1d)",
    "LFM3": "model.layers.0.conv.conv (Conv1d)",
    "Falcon-H1": "model.layers.0.mamba.conv1d (Conv1d)",
    "Granite 4 hybrid": "model.layers.0.mamba.conv1d (Conv1d)",
    "Jamba": "model.layers.0.mamba.conv1d (Conv1d)",
    "Bamba": "model.layers.0.mamba.conv1d (Conv1d)",
    "Zamba2": "model.layers.0.mamba.conv1d (Conv1d)",
    "RecurrentGemma": "model.layers.0.temporal_block.conv_1d (Conv1d)",
    "ZAYA": "model.layers.0.self_attn.qkv_proj.conv_qk_depthwise (Conv1d)",
    "Bloom": "transformer.h.0 (BloomBlock)",
    "XGLM": "model.layers.0 (XGLMDecoderLayer)",
    "MPT": "transformer.blocks.0 (MptBlock)",
    "Mamba": "backbone.layers.0.mixer.conv1d (Conv1d)",
    "Mamba 2": "backbone.layers.0.mixer.conv1d (Conv1d)",
    "RWKV": "rwkv.blocks.0 (RwkvBlock)",
    "GPT-NeoX Japanese": "gpt_neox_japanese.layers.0 (GPTNeoXJapaneseLayer)",
    "DeepSeek-V3.2": "model.layers.0.self_attn (DeepseekV32Attention)",
    "DeepSeek-V4": "model.layers.0.self_attn (DeepseekV4Attention)",
    "DeepSeek-V4, sparse": "model.layers.1.self_attn (DeepseekV4Attention)",
    "GLM-DSA": "model.layers.0.self_attn (GlmMoeDsaAttention)",
    "Doge": "model.layers.0.self_attn (DogeAttention)",
    "Inkling": "model.layers.0.self_attn.k_sconv.conv1d (Conv1d)",
    "OPT": "model.decoder (OPTDecoder)",
    "Phi": "lm_head (Linear)",
}


@deep_rows("family", REFUSED, default=["PhiMoE", "Llama 4", "Kimi Linear", "MPT"])
def test_check_refuses_a_model_that_would_be_wrong_and_names_layer_and_class(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(write_config(tmp_path, REFUSED[family])), "--ranks=2"]) == 2
    assert AT_FAULT[family] in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantised"),
        ({"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Model"}}, "code from a checkpoint"),
    ],
)
def test_check_refuses_quantised_weights_and_code(
    change: dict[str, object], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, {"model_type": "llama"})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **change}))
    assert main([str(path)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"), [("parallel.tp", 2), ("parallel.pp", 2), ("activation.mlp_tiles", 2), ("model.flavor", "8B")]
)
def test_check_refuses_by_name_what_these_models_lack(
    key: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, FAMILIES["Llama"])
    assert main([str(path), "--ranks=2", f"--{key}={value}"]) == 2
    assert key in capsys.readouterr().err
