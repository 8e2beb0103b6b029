"""Weights of Hugging Face models in and out, with transformers as the judge; each rank reads its share alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.chats import write_tokenizer
from tests.support.deep import deep_rows
from tests.support.huggingface_families import FAMILIES, eager_model
from tests.support.rank_pool import RankPool
from tests.support.runs import TINY, prepared, run_to_end, train, write_run
from torchtitan_cp.checkpoint import hub as hub_module
from torchtitan_cp.config import ConfigError
from torchtitan_cp.data.batches.micro_batches import read_step
from torchtitan_cp.training import export as export_module
from torchtitan_cp.training.export import export, written_config

# (family, keys of its config, ranks, overrides)
ROUND_TRIPS: dict[str, tuple[str, dict[str, Any], int, list[str]]] = {
    "Llama": ("Llama", {}, 2, []),
    "Llama, tied": ("Llama, tied", {}, 2, []),
    "Gemma 3": ("Gemma 3", {}, 2, ["--curriculum.stages[0].rope={theta = 2e6, kind = 'linear', factor = 2.0}"]),
    "gpt-oss, EP 2": ("gpt-oss", {}, 2, ["--parallel.ep=2"]),
    "Mixtral": ("Mixtral", {}, 2, []),
    "Mixtral, one expert on two ranks": (
        "Mixtral",
        {"num_local_experts": 1, "num_experts_per_tok": 1},
        2,
        ["--curriculum.stages[0].rope={kind = 'yarn', factor = 4.0, original_seq_len = 32}"],
    ),
    "Mixtral, three experts on four ranks": ("Mixtral", {"num_local_experts": 3}, 4, ["--parallel.cp=2"]),
    "Qwen3-MoE, replicated, EP 2": ("Qwen3-MoE", {}, 4, ["--parallel.dp_replicate=2", "--parallel.ep=2"]),
    "Qwen3-MoE, EP 2 on four ranks": ("Qwen3-MoE", {}, 4, ["--parallel.ep=2"]),
    "DeepSeek-V3, EP 2": ("DeepSeek-V3", {}, 2, ["--parallel.ep=2"]),
    "MiniMax-M2": ("MiniMax-M2", {}, 2, []),
    "Phi-3, longrope": ("Phi-3, longrope", {}, 2, []),
    "OLMo 3": ("OLMo 3", {}, 2, ["--curriculum.stages[0].rope={kind = 'yarn', factor = 2.0, truncate = false}"]),
    "Apertus 1.5": ("Apertus 1.5", {"vocab_size": 320, "output_vocab_size": 288}, 2, []),
    "Exaone 3": ("Exaone 3", {}, 2, []),
    "Sarvam MoE on four ranks": ("Sarvam MoE", {}, 4, []),
    "Sarvam MLA, EP 2": ("Sarvam MLA", {}, 2, ["--parallel.ep=2"]),
    "Nemotron-H, EP 2": ("Nemotron-H", {}, 2, ["--parallel.ep=2"]),
    "Qwen3-Next, EP 2 on four ranks": ("Qwen3-Next", {}, 4, ["--parallel.ep=2", "--parallel.cp=2"]),
    "Kimi Linear": ("Kimi Linear", {}, 2, []),
    "OLMo-Hybrid": ("OLMo-Hybrid", {}, 2, ["--curriculum.stages[0].rope={theta = 2e6}"]),
    "Granite 4 hybrid": ("Granite 4 hybrid", {}, 2, []),
    "Zamba2": ("Zamba2", {}, 2, []),
    "Lara Mini": ("Lara Mini", {}, 2, []),
    "LFM2": ("LFM2", {}, 2, []),
}


def write_start(folder: Path, config: dict[str, Any]) -> Path:
    """A model with random weights and persistent buffers, and a config of ours that starts from it."""
    model = eager_model(config)
    with torch.no_grad():
        saved = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in saved:
                buffer.uniform_(0.5, 0.6)
    model.save_pretrained(folder / "hub", max_shard_size="100KB")
    lines = [line for line in TINY.splitlines() if not line.startswith("overrides")]
    ours = f'architecture = "huggingface"\nhub_checkpoint = "{folder}/hub"'
    return write_run(folder, "\n".join(lines).replace('flavor = "debug"', ours))


def corpus_tokens(path: Path) -> dict[str, list[int]]:
    """On a rank: the first document of each source as the run has it."""
    sources = prepared(path).data_pipeline.corpus.sources
    return {
        name: source.train.read(0, 0, int(source.train.document_lengths[0])).tolist()
        for name, source in sources.items()
    }


class Watched:
    """A tensor in a file that counts what is read of it."""

    read_bytes = 0

    def __init__(self, stored: Any) -> None:
        self.stored, self.get_shape, self.get_dtype = stored, stored.get_shape, stored.get_dtype

    def __getitem__(self, where: Any) -> Tensor:
        values: Tensor = self.stored[where]
        Watched.read_bytes += values.nbytes
        return values


class WatchedFile:
    def __init__(self, file: Any) -> None:
        self.file, self.keys = file, file.keys

    def __enter__(self) -> "WatchedFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.__exit__(*error)

    def get_slice(self, name: str) -> Watched:
        return Watched(self.file.get_slice(name))


def whole_state(trainer: Any) -> dict[str, Tensor]:
    state = trainer.model.parts[0].state_dict()
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x.clone() for name, x in state.items()}


class Trained(NamedTuple):
    """Of one rank: whole weights as loaded, bytes read for them, whole weights at the end, logits of a sequence."""

    loaded: dict[str, Tensor]
    read_bytes: int
    trained: dict[str, Tensor]
    tokens: Tensor
    logits: Tensor


def loaded_and_trained(path: Path, *overrides: str) -> Trained:
    trainer = prepared(path, *overrides)
    Watched.read_bytes, open_plain = 0, hub_module._open
    hub_module._open = lambda file: WatchedFile(open_plain(file))
    try:
        trainer.resume()
    finally:
        hub_module._open = open_plain
    (model,) = trainer.model.parts
    loaded, read_bytes = whole_state(trainer), Watched.read_bytes
    names = {name for name, _ in model.named_parameters()}
    assert not names & model.causal.all_tied_weights_keys.keys(), "one parameter, which is updated once"
    run_to_end(trainer)
    shape = trainer.enter_stage(trainer.stages[0])
    batch = read_step(trainer.data_pipeline.samples, shape, 0)[0]
    with torch.no_grad():
        logits = model(batch.tokens, batch.positions, batch.plans)
    return Trained(loaded, read_bytes, whole_state(trainer), batch.tokens, logits)


def resumed(path: Path, *overrides: str) -> dict[str, Tensor]:
    """On a rank: whole weights of the newest checkpoint."""
    trainer = prepared(path, *overrides)
    trainer.resume()
    return whole_state(trainer)


def close(got: Tensor, want: Tensor) -> bool:
    return bool((got - want).abs().max() <= 1e-5 * want.abs().max())


@deep_rows(
    "case",
    [case for case, row in ROUND_TRIPS.items() if row[0] in FAMILIES],
    default=["Gemma 3", "Mixtral, one expert on two ranks"],
)
def test_a_model_comes_from_transformers_and_goes_back_there_after_training(
    ranks: Callable[[int], RankPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    family, keys, size, overrides = ROUND_TRIPS[case]
    path = write_start(tmp_path, {**FAMILIES[family], **keys})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", dtype=torch.float32)
    whole_bytes = sum(x.nbytes for file in (tmp_path / "hub").glob("*.safetensors") for x in load_file(file).values())
    overrides = ["--curriculum.stages[0].steps=1", *overrides]
    found = ranks(size)(loaded_and_trained, path, *overrides)
    for rank in found:
        assert rank.loaded.keys() == theirs.state_dict().keys()
        for name, values in theirs.state_dict().items():
            assert torch.equal(rank.loaded[name], values), name
        shards = 2 if "replicated" in case else size
        assert rank.read_bytes <= 1.1 * whole_bytes / shards, "norms and biases may be cut unevenly"

    monkeypatch.setattr(hub_module, "MAX_FILE_BYTES", 100_000)
    export(tmp_path / "run", tmp_path / "out")
    back = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    assert type(back) is type(theirs)
    # A shorter stage that changes no rotary embedding takes no positions away.
    assert back.config.max_position_embeddings == (128 if "rope" in str(overrides) else 512)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    rope = written.get("rope_parameters") or {}  # a rotary embedding that all layers share also stands where it used to
    assert written.get("rope_theta") == rope.get("rope_theta")
    if "rope_theta" in rope:
        assert written["rope_scaling"] == (None if rope["rope_type"] == "default" else rope)
    for name, values in back.state_dict().items():
        assert torch.equal(found[0].trained[name], values), name
    for rank in found if "--parallel.cp=2" not in overrides else ():
        with torch.no_grad():
            assert close(back(rank.tokens).logits, rank.logits)
            assert not close(theirs(rank.tokens).logits, rank.logits), "it was trained"


@pytest.mark.parametrize("is_there", [True, False])
def test_heads_that_predict_further_tokens_are_exported_as_they_were(
    ranks: Callable[[int], RankPool], tmp_path: Path, is_there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path, file = write_start(tmp_path, FAMILIES["LFM2"]), tmp_path / "hub" / "model.safetensors"
    for index in (tmp_path / "hub").glob("*.index.json"):
        index.unlink()
    files = list((tmp_path / "hub").glob("*.safetensors"))
    heads = {"mtp.layers.0.eh_proj.weight": torch.rand(3, 4).half(), "mtp.norm.weight": torch.rand(5)}
    stored = heads | {name: x for part in files for name, x in load_file(part).items()}
    for part in files:
        part.unlink()
    save_file(stored, file, metadata={"format": "pt"})
    ranks(2)(train, path, "--curriculum.stages[0].steps=1")
    if not is_there:
        file.unlink()
    export(tmp_path / "run", tmp_path / "out", "bfloat16")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    if is_there:
        assert all(torch.equal(exported[name], x) and exported[name].dtype == x.dtype for name, x in heads.items())
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    else:
        assert exported.keys().isdisjoint(heads)
        assert "heads that predict further tokens, if the run's start has any, are not exported" in caplog.text


def test_fresh_weights_are_exported_with_the_end_of_the_runs_tokenizer_and_read_back_before_they_count(
    ranks: Callable[[int], RankPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_start(tmp_path, FAMILIES["Llama"])
    ranks(2)(train, path, "--model.load_weights=false", "--curriculum.stages[0].steps=1")

    def other_theta(*given: Any) -> dict[str, Any]:
        theta = {"rope_type": "default", "rope_theta": 2e4}
        return written_config(*given) | {"rope_parameters": theta, "rope_scaling": theta}

    with monkeypatch.context() as patch:
        patch.setattr(export_module, "written_config", other_theta)
        with pytest.raises(ConfigError, match=r"step-1 is not exported: .* other rotary frequencies than training"):
            export(tmp_path / "run", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    export(tmp_path / "run", tmp_path / "out")
    written = (json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("config", "generation_config"))
    assert [values["eos_token_id"] for values in written] == [256, [256]], "of bytes; the config.json has 2"


@pytest.mark.deep
def test_persistent_buffers_are_in_checkpoints_that_other_numbers_of_ranks_resume(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path = write_start(tmp_path, FAMILIES["DeepSeek-V3"])
    trained = ranks(2)(loaded_and_trained, path, "--curriculum.stages[0].steps=2", "--parallel.ep=2")[0].trained
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert bias in trained
    for size in (1, 4):
        state = ranks(size)(resumed, path, "--curriculum.stages[0].steps=3")[0]
        assert state.keys() == trained.keys()
        for name, values in state.items():
            assert torch.equal(values, trained[name]), name


def test_a_run_trains_and_exports_with_the_tokenizer_of_the_checkpoint(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    """And goes on from the resolved config, which names it."""
    path, hub = write_start(tmp_path, FAMILIES["Llama"] | {"vocab_size": 448}), tmp_path / "hub"
    path.write_text(path.read_text().replace('[tokenizer]\nkind = "bytes"\n', ""))
    write_tokenizer(hub, tokenizer_class="PreTrainedTokenizerFast", eos_token="<|end|>", bos_token=None)
    (hub / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "<|return|>"}')
    (hub / "added_tokens.json").write_text('{"<|user|>": 420}')
    ranks(2)(train, path, "--curriculum.stages[0].steps=1")
    resolved = tmp_path / "run" / "config.toml"
    assert f'path = "{hub}/tokenizer.json"' in resolved.read_text()
    corpus = next(iter(ranks(1)(corpus_tokens, resolved)[0].values()))
    theirs = AutoTokenizer.from_pretrained(hub)
    assert corpus[-1] == theirs.eos_token_id == theirs.convert_tokens_to_ids("<|return|>")
    ranks(2)(train, resolved, "--curriculum.stages[0].steps=2")
    export(tmp_path / "run", tmp_path / "out")
    exported, text = AutoTokenizer.from_pretrained(tmp_path / "out"), "<s>one<|user|> two<|return|>"
    assert exported(text)["input_ids"] == theirs(text)["input_ids"]
    assert 420 in exported(text)["input_ids"]
    assert exported.special_tokens_map == theirs.special_tokens_map
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert theirs.eos_token_id in generation["eos_token_id"]
