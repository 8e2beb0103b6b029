"""Every key of the TOML, so that a new one is added knowingly: it costs a combination in every later change.

A key stays if a recipe sets it, a page says when to set it and to what, or a machine forces it. Otherwise it is a
constant beside its code, with the reason.
"""

import re
from pathlib import Path

from torchtitan_cp.config.reference import section_name, sections

REPOSITORY = Path(__file__).parents[3]
KEYS = """
job.dump_folder job.description job.timeout_seconds job.startup_timeout_seconds job.max_restarts job.log_level
model.architecture model.flavor model.overrides model.hub_checkpoint model.load_weights model.config
model.checkpoint model.adapter
tokenizer.kind tokenizer.path tokenizer.bos tokenizer.vocab_size
data.sources data.mixture data.max_epochs data.order data.packing data.packing_window data.document_mask
data.restart_positions data.workers data.cache_folder data.source data.path data.subset data.split data.revision
data.text_field data.token_field data.messages_field data.prompt_field data.completion_field data.chat_template
data.loss_on data.too_long data.group_field data.document data.min_document data.max_document data.validation_fraction
data.name
training.seed training.compute_dtype training.float8 training.deterministic training.micro_batch_sequences
training.reduce_dtype training.max_grad_norm training.loss_chunk_tokens training.z_loss training.router_bias_update
training.loss_normalization
lora.rank lora.alpha lora.rslora lora.targets lora.train lora.base lora.dropout
optimizer.name optimizer.lr optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.weight_decay optimizer.state
optimizer.offload_state optimizer.groups
lr_scheduler.shape lr_scheduler.warmup_steps lr_scheduler.decay_fraction lr_scheduler.end_fraction
parallel.pp parallel.pp_schedule parallel.pp_stages_per_rank parallel.dp_replicate parallel.dp_shard parallel.cp
parallel.tp parallel.ep parallel.async_tp parallel.fsdp_reshard parallel.fsdp_cpu_offload
context_parallel.strategy context_parallel.all_to_all_ranks context_parallel.kernel context_parallel.layout
context_parallel.kv_transfer
activation.checkpoint activation.offload activation.mlp_tiles
compile.enable
checkpoint.enable checkpoint.interval checkpoint.interval_minutes checkpoint.keep
checkpoint.asynchronous checkpoint.export checkpoint.timeout_seconds
health.on_nonfinite health.on_spike health.spike_threshold health.max_rollbacks health.replay
metrics.interval metrics.tensorboard metrics.wandb metrics.peak_tflops
profiling.steps profiling.ranks profiling.memory_snapshot
evaluation.interval evaluation.at_start evaluation.tokens evaluation.max_share evaluation.position_seq_len
evaluation.context_gain_tokens evaluation.passkey.variants evaluation.passkey.lengths evaluation.passkey.trials
evaluation.passkey.needle evaluation.passkey.question
curriculum.stages.name curriculum.stages.seq_len curriculum.stages.steps curriculum.stages.tokens
curriculum.stages.until curriculum.stages.global_batch_tokens curriculum.stages.cp curriculum.stages.strategy
curriculum.stages.tp curriculum.stages.pp curriculum.stages.rope.theta curriculum.stages.rope.kind
curriculum.stages.rope.factor curriculum.stages.rope.original_seq_len curriculum.stages.rope.low_freq_factor
curriculum.stages.rope.high_freq_factor curriculum.stages.rope.attention_factor curriculum.stages.rope.beta_fast
curriculum.stages.rope.beta_slow curriculum.stages.rope.mscale curriculum.stages.rope.mscale_all_dim
curriculum.stages.rope.truncate curriculum.stages.rope.long_factor curriculum.stages.rope.short_factor
curriculum.stages.lr.shape curriculum.stages.lr.warmup_steps curriculum.stages.lr.decay_fraction
curriculum.stages.lr.end_fraction curriculum.stages.lr.peak curriculum.stages.optimizer_state
curriculum.stages.activation.checkpoint curriculum.stages.activation.offload curriculum.stages.activation.mlp_tiles
curriculum.stages.data.mixture curriculum.stages.data.packing curriculum.stages.data.packing_window
curriculum.stages.data.document_mask curriculum.stages.data.restart_positions curriculum.stages.data.short_share
curriculum.stages.data.short_seq_len curriculum.stages.data.growth_from curriculum.stages.data.growth_steps
"""
MOST = 170


def test_the_keys_are_these_and_no_others() -> None:
    found = [f"{section_name(header)}.{key.name}" for header, _, keys in sections() for key in keys]
    assert sorted(found) == sorted(KEYS.split())
    assert len(found) <= MOST


def test_every_key_is_set_by_a_recipe_or_named_by_a_page() -> None:
    recipes = [path.read_text() for path in (REPOSITORY / "train_configs").glob("*.toml")]
    pages = [path.read_text() for path in (REPOSITORY / "docs").glob("*.md") if path.name != "config.md"]
    text = "\n".join(recipes + pages)
    unknown = [name for name in KEYS.split() if not re.search(rf"(?<!\w){name.split('.')[-1]}(?!\w)", text)]
    assert not unknown
