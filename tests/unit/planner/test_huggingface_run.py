"""The planner and the dry run give a model of transformers what they give the same model of ours."""

import itertools
import json
from pathlib import Path

import pytest

from models import ARCHITECTURES
from models.huggingface.args import args_from_config
from tests.support.deep import deep_rows
from tests.support.huggingface_families import FAMILIES
from tests.support.huggingface_full_size import GEMMA3_27B, GPT_OSS_120B
from torchtitan_cp.config import Config, load_config
from torchtitan_cp.planner.devices import make_cluster
from torchtitan_cp.planner.dry_run import dry_run
from torchtitan_cp.planner.estimate import plan_config
from torchtitan_cp.planner.memory import block_bytes
from torchtitan_cp.planner.search import search
from torchtitan_cp.planner.search_report import reasons
from torchtitan_cp.training.registry import register

SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
NATIVE = """flavor = "8B"
overrides = {dim = 256, ffn_dim = 704, n_layers = 4, vocab_size = 512, n_heads = 4, n_kv_heads = 2, head_dim = 64}
"""
STAGES = """
[tokenizer]
vocab_size = 512
[training]
compute_dtype = "bfloat16"
[activation]
checkpoint = "full"
[[curriculum.stages]]
seq_len = 16384
steps = 20
global_batch_tokens = 65536
cp = 4
rope = {theta = 10000.0}
"""
OWN_ROPE = STAGES.replace("rope = {theta = 10000.0}", "")
LARGE = STAGES.replace("16384", "524288").replace("65536", "8388608").replace("cp = 4", "cp = 64")


def write(folder: Path, model: str, stages: str = STAGES) -> Config:
    register(ARCHITECTURES)
    path = folder / "run.toml"
    path.write_text(f'[job]\ndump_folder = "{folder}/out"\n[model]\n{model}{stages}')
    return load_config(path, [])


def of_config(folder: Path, config: dict[str, object]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return f'architecture = "huggingface"\nconfig = "{folder}/config.json"\n'


def test_a_plan_is_that_of_the_same_native_model(tmp_path: Path) -> None:
    cluster = make_cluster("cpu", 4)  # where no norm is fused
    ours = plan_config(write(tmp_path, NATIVE), cluster)[0]
    theirs = plan_config(write(tmp_path, of_config(tmp_path, {"model_type": "llama", **SIZES, **HEADS})), cluster)[0]
    assert theirs.memory == ours.memory
    assert theirs.seconds == ours.seconds
    assert (theirs.linear_flops, theirs.attention_flops) == (ours.linear_flops, ours.attention_flops)


def test_a_model_that_takes_no_tiles_is_searched_without_them(tmp_path: Path) -> None:
    model = of_config(tmp_path, {"model_type": "llama", **SIZES, **HEADS})
    result = search(write(tmp_path, model), make_cluster("h100-80g", ranks_per_node=2))
    assert {candidate.choice.savings.mlp_tiles for candidate in result.tried} == {1}
    said = reasons(result)
    assert any(reason.startswith("optimizer.offload_state = false: ") for reason in said)
    assert not [reason for reason in said if "mlp_tiles" in reason]


def test_norms_behind_the_attention_and_the_mlp_are_kept_too(tmp_path: Path) -> None:
    cluster, layers = make_cluster("h100-80g", ranks_per_node=4), ["sliding_attention", "full_attention"] * 2
    models = {"model_type": "llama"}, {"model_type": "gemma3_text", "layer_types": layers}
    stages = "[compile]\nenable = false\n" + STAGES
    two, four = (
        plan_config(write(tmp_path, of_config(tmp_path, {**model, **SIZES, **HEADS}), stages), cluster)[0]
        for model in models
    )
    assert (two.counts.more_norms, four.counts.more_norms) == (0, 2)
    assert block_bytes(four).more_norms == 2 * 4096 * 256 * (4 + 4)  # two copies in fp32 of each
    assert block_bytes(two).more_norms == 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_layer_that_ends_with_a_norm_repeats_its_last_product(tmp_path: Path, family: str) -> None:
    """As the operators of both do, by tests/unit/models/huggingface/test_probe.py."""
    config = {"model_type": family, "layer_types": ["sliding_attention", "full_attention"] * 2, **SIZES, **HEADS}
    cluster = make_cluster("h100-80g", ranks_per_node=4)
    text = of_config(tmp_path, config)
    full, none = (
        plan_config(write(tmp_path, text, STAGES.replace('"full"', f'"{mode}"')), cluster)[0]
        for mode in ("full", "none")
    )
    left_out = 704 * 256 if family == "llama" else 0
    assert full.counts.last_product == left_out
    again = full.seconds["linear layers"] - none.seconds["linear layers"]
    flops = 4 * 2 * (full.counts.active_matrices - left_out) * 4096 * full.stage.micro_batches
    assert again == pytest.approx(flops / (989e12 * cluster.accelerator.linear))


def test_layers_with_other_heads_are_planned_by_their_own() -> None:
    # Full attention has heads twice as wide: the work of both kinds is that of their own dims.
    config = {"model_type": "gemma4_text", **SIZES, **HEADS, "layer_types": ["sliding_attention", "full_attention"] * 2}
    config |= {"global_head_dim": 128, "sliding_window": 1024, "num_kv_shared_layers": 0}
    args = args_from_config(config, {})
    assert [mixer.width for mixer in args.mixers] == [2 * 4 * 64, 2 * 4 * 128] * 2
    assert [(mixer.window, mixer.head_dim) for mixer in args.mixers] == [(1024, 64), (0, 128)] * 2


def test_heads_of_512_dims_are_planned_by_the_one_kernel_that_takes_them(tmp_path: Path) -> None:
    config = {"model_type": "gemma4_text", **SIZES, **HEADS, "layer_types": ["sliding_attention", "full_attention"] * 2}
    config |= {"sliding_window": 1024, "num_kv_shared_layers": 0}
    cluster = make_cluster("h200-141g", 1)
    narrow, wide = (
        plan_config(write(tmp_path, of_config(tmp_path, config | {"global_head_dim": dim}), OWN_ROPE), cluster)[0]
        for dim in (256, 512)
    )
    assert (narrow.kernel(0), wide.kernel(0), wide.kernel(1024)) == ("flash", "efficient", "flash")
    assert wide.seconds["attention"] > 2 * 5 * narrow.seconds["attention"]  # twice the work, at less than a fifth
    assert cluster.accelerator.attention("efficient", 512) == (0.13, 0.045)
    assert cluster.accelerator.attention("efficient", 128) == (0.34, 0.32)


@pytest.mark.deep
def test_a_dry_run_takes_the_memory_of_the_same_native_model(tmp_path: Path) -> None:
    ours = dry_run(write(tmp_path, NATIVE), 8)[0]
    theirs = dry_run(write(tmp_path, of_config(tmp_path, {"model_type": "llama", **SIZES, **HEADS})), 8)[0]
    assert theirs.peak_bytes == pytest.approx(ours.peak_bytes, rel=0.05)
    for kind in ("weights", "gradients", "optimizer"):
        assert theirs.by_kind[kind] == pytest.approx(ours.by_kind[kind], rel=1e-3)


WIDTHS = {"hidden_size": 256, "intermediate_size": 704, "vocab_size": 512, "moe_intermediate_size": 352}
DELTA_NETS = {f"linear_{size}": 64 for size in ("key_head_dim", "value_head_dim", "head_dim")}
MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 64}
LATENT = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64}
SHARED = {"shared_expert_intermediate_size": 352, "moe_shared_expert_intermediate_size": 352}
HYBRIDS = {
    "Qwen3.5": {"head_dim": 64, **DELTA_NETS},
    "Qwen3-Next": {"head_dim": 64, **DELTA_NETS, **SHARED},
    "Kimi Linear": {**LATENT, **DELTA_NETS},
    "Nemotron-H": {"head_dim": 64, **MAMBA, **SHARED},
    "LFM2": {},
}
SHORT = OWN_ROPE.replace("16384", "4096").replace("65536", "8192").replace("cp = 4", "cp = 2")


@deep_rows(("family", "mode"), itertools.product(HYBRIDS, ("full", "attention_saved")), default=[])
def test_the_memory_of_a_hybrid_is_within_10_percent_of_a_dry_run(tmp_path: Path, family: str, mode: str) -> None:
    """Tensors of states and convolutions stand out."""
    model = of_config(tmp_path, {**FAMILIES[family], **WIDTHS, **HYBRIDS[family]})
    config = write(tmp_path, model, SHORT.replace('"full"', f'"{mode}"'))
    (walked,), (planned,) = dry_run(config, 2), plan_config(config, make_cluster("cpu", 1))
    assert planned.memory.total == pytest.approx(walked.peak_bytes, rel=0.10)


@pytest.mark.deep
@pytest.mark.parametrize("config", [GPT_OSS_120B, GEMMA3_27B], ids=["gpt-oss-120b", "Gemma 3 27B"])
def test_large_models_are_planned_on_256_ranks(config: dict[str, object], tmp_path: Path) -> None:
    cluster = make_cluster("h100-80g", 32, ranks_per_node=8, link_bandwidth=0.0, network_bandwidth=0.0)
    estimate = plan_config(
        write(tmp_path, of_config(tmp_path, config), LARGE.replace("vocab_size = 512", "")), cluster
    )[0]
    assert estimate.fits
    assert 0.1 < estimate.mfu < 0.6


@pytest.mark.deep
def test_a_mixture_is_walked_in_fp32_too(tmp_path: Path) -> None:
    """torch's own fake form of grouped products takes bf16 alone."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "sliding_window": None}  # whose tiles would be hundreds
    model = of_config(tmp_path, {**FAMILIES["Mixtral"], **sizes})
    single, half = (
        dry_run(write(tmp_path, model, STAGES.replace("bfloat16", dtype)), 4)[0] for dtype in ("float32", "bfloat16")
    )
    assert single.by_kind["weights"] == half.by_kind["weights"]
    assert half.peak_bytes < single.peak_bytes < 2 * half.peak_bytes
