"""The doctor of a config: safe where the program is right, and each of fourteen faults named where it is broken."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from tests.support.deep import deep_rows
from tests.support.doctor import diagnose, write_family
from tests.support.rank_pool import RankFailure, RankPool
from tests.support.runs import EXPERTS, IN_NF4, TINY, needs_bytes, write_run
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.data.batches.packed_stream import PackedSequence, Span
from torchtitan_cp.training.doctor import ProbeSamples

WINDOWS = TINY.replace("ffn_dim = 96", "ffn_dim = 96, windows = [40, 0], sinks = true")


@deep_rows("text", [WINDOWS, EXPERTS], default=[EXPERTS])
def test_an_architecture_of_ours_is_safe(ranks: Callable[[int], RankPool], tmp_path: Path, text: str) -> None:
    (safe, printed), (other, nothing) = ranks(2)(diagnose, write_run(tmp_path, text))
    assert (safe, other, nothing) == (True, True, "")
    lines = printed.splitlines()
    assert lines[1].split()[:4] == ["layers.0.attention", "Attention", "4/2", "16/16"]
    assert any(line.startswith("gradients, layers.1: relative difference") for line in lines)
    assert "MiB on one process" in lines[-2]
    assert lines[-1] == "safe: nothing differs"


@pytest.mark.deep
@pytest.mark.parametrize("keys", [("--lora.rank=4",), pytest.param(IN_NF4, marks=needs_bytes)])
def test_adapters_are_safe(ranks: Callable[[int], RankPool], tmp_path: Path, keys: tuple[str, ...]) -> None:
    safe, printed = ranks(2)(diagnose, write_run(tmp_path), "", *keys, "--lora.train=['norm']")[0]
    assert safe, printed


@pytest.mark.deep
def test_a_fault_in_adapters_is_named_by_layer_and_class(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    safe, printed = ranks(2)(diagnose, write_run(tmp_path), "adapters", "--lora.rank=4")[0]
    assert not safe
    assert "NOT SAFE: a recurrence or convolution: layers.0.attention.wq (LoRALinear)" in printed, printed


@pytest.mark.deep
def test_experts_are_safe_where_the_run_has_a_z_loss(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    safe, printed = ranks(2)(diagnose, write_run(tmp_path, EXPERTS), "", "--training.z_loss=1e-2")[0]
    assert safe, printed


def test_a_sequence_too_short_for_documents_is_refused(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    short = ("--curriculum.stages[0].seq_len=8", "--curriculum.stages[0].global_batch_tokens=16")
    with pytest.raises(RankFailure, match="documents, for which 8 tokens are too few"):
        ranks(2)(diagnose, write_run(tmp_path), "", *short)


def test_tokens_count_in_the_loss_where_no_label_of_the_text_does() -> None:
    """As in the first tokens of a long conversation."""
    tokens = np.arange(12)
    row = PackedSequence(tokens, np.full(12, IGNORED), tokens, (12,), (Span("chats", 0, 0, 12),))
    probe = ProbeSamples(Mock(sequence=lambda number: row), (5, 7)).sequence(0)
    assert (probe.labels != IGNORED).tolist() == [False] * 4 + [True] * 8


FOUND = {
    ("window", "Gemma 3"): "a window lost: model.layers.0.self_attn (Gemma3Attention): one process has 20, the ranks 0",
    ("sink", "gpt-oss"): "a sink lost: model.layers.0.self_attn (GptOssAttention)",
    ("cap", "Gemma 2"): "a soft cap lost: model.layers.0.self_attn (Gemma2Attention): one process has 5, the ranks 0",
    (
        "scale",
        "Gemma 3",
    ): "a dropped attention scale: model.layers.0.self_attn (Gemma3Attention): one process has 0.204",
    ("documents", "gpt-oss"): "documents leaking: model.layers.0.self_attn (GptOssAttention)",
    ("positions", "Llama"): "positions counted by the model itself: model.",
    ("recurrence", "Qwen3"): "a recurrence or convolution: model.layers.1.mlp (Qwen3MLP)",
    ("twice", "Llama"): "a sequence sharded twice: model.embed_tokens (Embedding)",
    ("average", "Llama"): "a loss averaged by shard: HuggingFaceModel: no layer differs",
    ("unreached", "OLMo 3"): "an attention that never reaches us: model.layers.1.self_attn (Olmo3Attention)",
    ("state", "Nemotron-H"): "a state lost between ranks: model.layers.0.mixer (NemotronHMamba2Mixer): its output",
    ("convolution", "LFM2"): "documents leaking: model.layers.0.conv (Lfm2ShortConv): its output differs from token 7",
    ("gates", "Kimi Linear"): "another computation: model.layers.0.self_attn (KimiLinearDeltaAttention): its output",
}


@deep_rows(("fault", "family"), FOUND, default=[])
def test_a_fault_under_a_model_of_transformers_is_named(
    ranks: Callable[[int], RankPool], tmp_path: Path, fault: str, family: str
) -> None:
    safe, printed = ranks(2)(diagnose, write_family(tmp_path, family), fault)[0]
    assert not safe
    assert f"NOT SAFE: {FOUND[fault, family]}" in printed, printed


@pytest.mark.deep
@pytest.mark.parametrize(("family", "routers"), [("gpt-oss", 2), ("DeepSeek-V3", 1)])
def test_a_family_of_transformers_is_safe(
    ranks: Callable[[int], RankPool], tmp_path: Path, family: str, routers: int
) -> None:
    safe, printed = ranks(2)(diagnose, write_family(tmp_path, family))[0]
    assert safe, printed
    assert f" dims of a head by model.rotary_emb.inv_freq; {routers} routers of experts; logits x 1" in printed
