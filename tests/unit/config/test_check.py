"""Checks between keys, given the number of ranks."""

import dataclasses
from typing import Any

import pytest

from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config import check as rules
from torchtitan_cp.config.data import Data, DataSource, StageData
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.config.run import Evaluation, Health, Job, Passkey, Profiling
from torchtitan_cp.config.sections import Curriculum, Model, Stage, StageLR, Tokenizer
from torchtitan_cp.config.training import (
    Activation,
    Compile,
    Lora,
    LRScheduler,
    Optimizer,
    Parallel,
    ParameterGroup,
    StageActivation,
    Training,
)
from torchtitan_cp.curriculum import resolve_stages

STAGE = Stage(seq_len=1024, steps=10, global_batch_tokens=8192)
GATED = dataclasses.replace(STAGE, steps=0, until={"validation_loss": 1.0, "max_tokens": 9.0})


def config_with(*stages: Stage, **sections: object) -> Config:
    return Config(curriculum=Curriculum(stages or (STAGE,)), **sections)  # type: ignore[arg-type]


def check_config(config: Config, ranks: int) -> None:
    """Resolve the stages for these ranks, and judge them."""
    rules.check_config(config, resolve_stages(config, ranks), ranks)


def refuse(config: Config, ranks: int) -> str:
    with pytest.raises(ConfigError) as caught:
        check_config(config, ranks)
    return str(caught.value)


@pytest.mark.parametrize(
    ("parallel", "ranks", "wanted"),
    [
        (Parallel(dp_shard=2, cp=2), 6, "[parallel] asks for dp_shard 2 x cp 2 and the job has 6 ranks: 4 are needed"),
        (Parallel(cp=4), 6, "4 does not divide them"),
        (Parallel(cp=-1), 4, "parallel.dp_shard and parallel.cp are all -1"),
    ],
)
def test_degrees_that_do_not_fit_the_ranks_are_refused(parallel: Parallel, ranks: int, wanted: str) -> None:
    assert wanted in refuse(config_with(parallel=parallel), ranks)


@pytest.mark.parametrize(
    ("stage", "ranks", "wanted"),
    [
        (dataclasses.replace(STAGE, cp=3), 8, "curriculum.stages[0].cp = 3 does not divide dp_shard x cp = 8"),
        (dataclasses.replace(STAGE, cp=3), 8, "use 1, 2, 4, 8 or -1 for all, e.g. '--curriculum.stages[0].cp=-1'"),
        (
            dataclasses.replace(STAGE, seq_len=1022, cp=2),
            2,
            "seq_len = 1022 cannot be shared by cp = 2 and tp = 1: it is not divisible by 4",
        ),
        (dataclasses.replace(STAGE, seq_len=1022, cp=2), 2, "use 1020 or 1024"),
        (dataclasses.replace(STAGE, seq_len=2, cp=2), 2, "fix: use 4, or another cp or tp"),
        (dataclasses.replace(STAGE, global_batch_tokens=3000), 2, "is not a multiple of seq_len 1024 x 2 sequences"),
        (dataclasses.replace(STAGE, global_batch_tokens=3000), 2, "fix: use 4096"),
        (dataclasses.replace(STAGE, steps=0), 1, "has none of steps, tokens and until"),
        (
            dataclasses.replace(STAGE, steps=0, until={"validation_loss": 1.0, "max_tokens": 1e30}),
            1,
            "until asks for more than 1e+15 tokens",
        ),
        (dataclasses.replace(STAGE, tokens=5), 1, "has steps and tokens"),
        (
            dataclasses.replace(STAGE, steps=0, until={"accuracy": 1.0}),
            1,
            "names accuracy, which no evaluation measures",
        ),
        (
            dataclasses.replace(STAGE, steps=0, until={"validation_loss": 1.0}),
            1,
            "needs max_tokens, which ends the stage in any case",
        ),
        (
            dataclasses.replace(STAGE, data=StageData(mixture={"books": 1.0})),
            1,
            "data.mixture names 'books', and the sources are corpus",
        ),
        *(
            (
                dataclasses.replace(STAGE, data=StageData(mixture={"corpus": weight})),
                1,
                "needs finite numbers that sum to more than zero",
            )
            for weight in (0.0, -1.0, float("inf"), float("nan"))
        ),
        (dataclasses.replace(STAGE, data=StageData(short_share=0.5)), 1, "give both, with a length below 1024"),
        (
            dataclasses.replace(STAGE, data=StageData(growth_from=1024, growth_steps=5)),
            1,
            "give both, with a length below 1024",
        ),
        (
            dataclasses.replace(STAGE, steps=0, tokens=4 * 8192 + 1, data=StageData(growth_from=512, growth_steps=6)),
            1,
            "growth_steps = 6 exceeds the stage's 5 steps, so attention would never see 1024 tokens",
        ),
        (dataclasses.replace(STAGE, seq_len=0), 1, "curriculum.stages[0] has no seq_len"),
        (dataclasses.replace(STAGE, global_batch_tokens=0), 1, "curriculum.stages[0] has no global_batch_tokens"),
        (
            dataclasses.replace(STAGE, rope=Rope(kind="llama3", low_freq_factor=4.0)),
            1,
            "curriculum.stages[0].rope: high_freq_factor must be above low_freq_factor",
        ),
    ],
)
def test_a_stage_that_cannot_run_is_refused_with_what_could(stage: Stage, ranks: int, wanted: str) -> None:
    assert wanted in refuse(config_with(stage), ranks)


def test_a_gate_is_refused_where_nothing_is_evaluated_within_a_stage() -> None:
    gated = dataclasses.replace(STAGE, steps=0, until={"validation_loss": 1.0, "max_tokens": 81920.0})
    said = refuse(config_with(gated, evaluation=Evaluation(interval=0)), 1)
    assert "decided after evaluations, and evaluation.interval is 0" in said
    assert "set evaluation.interval to a number of steps, or leave it out" in said
    check_config(config_with(gated), 1)


@pytest.mark.parametrize(
    ("stages", "wanted"),
    [
        (
            (STAGE, STAGE),
            ["lr_scheduler.warmup_steps = 21 exceeds the 20 steps of this schedule: the warm-up is shortened to 20"],
        ),
        (
            (dataclasses.replace(STAGE, steps=0, tokens=20 * 8192 - 5),),
            ["lr_scheduler.warmup_steps = 21 exceeds the 20 steps of this schedule: the warm-up is shortened to 20"],
        ),
        (
            (STAGE, dataclasses.replace(STAGE, steps=40, lr=StageLR(warmup_steps=41))),
            [
                "lr_scheduler.warmup_steps = 21 exceeds the 10 steps of this schedule: the warm-up is shortened to 10",
                "curriculum.stages[1].lr.warmup_steps = 41 exceeds the 40 steps of this schedule: the warm-up is "
                "shortened to 40",
            ],
        ),
        ((STAGE, STAGE, STAGE), []),
        ((STAGE, GATED), []),
        ((dataclasses.replace(STAGE, lr=StageLR(warmup_steps=10)),), []),
    ],
)
def test_a_warm_up_beyond_its_steps_is_shortened_unless_its_end_is_unknown(
    stages: tuple[Stage, ...], wanted: list[str]
) -> None:
    config = config_with(*stages, lr_scheduler=LRScheduler(warmup_steps=21), evaluation=Evaluation(interval=5))
    check_config(config, 1)
    assert rules.shortened_warmups(config, resolve_stages(config, 1)) == wanted


def test_a_profile_of_a_rank_that_does_not_exist_is_refused() -> None:
    profiling = Profiling(steps=(3,), ranks=(0, 2))
    assert "profiling.ranks = 2 does not exist on 2 ranks" in refuse(config_with(profiling=profiling), 2)
    check_config(config_with(profiling=profiling), 4)


def test_a_run_without_a_folder_is_refused() -> None:
    assert "job.dump_folder is empty\n  fix: name a folder" in refuse(config_with(job=Job(dump_folder="")), 1)
    assert "data.cache_folder is empty\n  fix: name a folder" in refuse(config_with(data=Data(cache_folder="")), 1)


def test_a_source_that_may_never_be_read_is_refused() -> None:
    wanted = "data.max_epochs is 0 for every source that curriculum.stages[0].data reads\n  fix: give one of them"
    assert wanted in refuse(config_with(data=Data(max_epochs={"corpus": 0.0})), 1)
    sources = (BOOKS, dataclasses.replace(BOOKS, name="code"))
    check_config(config_with(data=Data(sources=sources, max_epochs={"code": 0.0})), 1)
    mixture = {"books": 0.0, "code": 1.0}
    assert wanted in refuse(config_with(data=Data(sources=sources, mixture=mixture, max_epochs={"code": 0.0})), 1)


def test_no_stage_is_refused() -> None:
    assert "there is no stage to train" in refuse(Config(), 1)


@pytest.mark.parametrize(
    ("sections", "wanted"),
    [
        (
            {"parallel": Parallel(pp=2, pp_schedule="zbv_zero_bubble"), "compile": Compile(enable=True)},
            "splits the backward of a block, which a compiled block cannot\n  fix: use 1f1b, interleaved",
        ),
        (
            {
                "parallel": Parallel(pp=2, pp_schedule="zbv_zero_bubble"),
                "activation": Activation(checkpoint="selective"),
            },
            "activation.checkpoint = 'selective' in curriculum.stages[0] does not allow\n  fix: use 1f1b",
        ),
        (
            {"parallel": Parallel(pp=2), "training": Training(micro_batch_sequences=8)},
            "makes 1 micro-batches, which 1f1b cannot assign to 2 pipeline ranks\n  fix: use 16384 for 2 micro-batches",
        ),
        (
            {"parallel": Parallel(tp=2, async_tp=True)},
            "parallel.async_tp needs the compiler and tensor-parallel ranks\n  fix: set compile.enable",
        ),
        (
            {"parallel": Parallel(tp=2), "training": Training(float8="rowwise")},
            "training.float8 does not work with parallel.tp above 1",
        ),
        (
            {"parallel": Parallel(tp=2, dp_shard=1)},
            "seq_len = 1025 cannot be shared by cp = 1 and tp = 2: it is not divisible by 2\n  fix: use 1024 or 1026",
        ),
    ],
)
def test_what_the_dimensions_cannot_deal_out_is_refused_with_the_way_to_mend_it(
    sections: dict[str, object], wanted: str
) -> None:
    odd = dataclasses.replace(STAGE, seq_len=1025, global_batch_tokens=1025)
    stages = (odd,) if "1025" in wanted else ()
    assert wanted in refuse(config_with(*stages, **sections), 2)


@pytest.mark.parametrize(
    ("stage", "sections", "wanted"),
    [
        ({"tp": 2}, {"training": Training(float8="rowwise")}, "training.float8 does not work with parallel.tp above 1"),
        (
            {},
            {"parallel": Parallel(tp=-1, dp_shard=1), "training": Training(float8="rowwise")},
            "training.float8 does not work with parallel.tp above 1",
        ),
        (
            {},
            {
                "parallel": Parallel(pp=-1, dp_shard=1, pp_schedule="zbv_zero_bubble"),
                "compile": Compile(enable=True),
            },
            "splits the backward of a block",
        ),
        (
            {"activation": StageActivation(checkpoint="attention_saved")},
            {"parallel": Parallel(pp=2, pp_schedule="interleaved_zero_bubble"), "activation": Activation("full")},
            "activation.checkpoint = 'attention_saved' in curriculum.stages[0] does not allow",
        ),
        (
            {"tp": 1},
            {"parallel": Parallel(tp=2, async_tp=True), "compile": Compile(enable=True)},
            "parallel.async_tp needs",
        ),
        (
            {"activation": StageActivation(mlp_tiles=3)},
            {"training": Training(float8="rowwise")},
            "a rank's 1024 tokens of curriculum.stages[0] in 3 mlp_tiles are not multiples of 16\n"
            "  fix: use seq_len = 1056",
        ),
        (
            {"cp": 2},
            {"training": Training(float8="tensorwise"), "activation": Activation(mlp_tiles=64)},
            "a rank's 512 tokens of curriculum.stages[0] in 64 mlp_tiles are not multiples of 16\n"
            "  fix: use seq_len = 2048",
        ),
    ],
)
def test_what_a_stage_sets_for_itself_is_checked_too(
    stage: dict[str, Any], sections: dict[str, object], wanted: str
) -> None:
    own = dataclasses.replace(STAGE, seq_len=1024, global_batch_tokens=4096, **stage)
    assert wanted in refuse(config_with(own, **sections), 2)


def test_what_only_stages_have_is_enough_for_what_overlaps_products() -> None:
    split = dataclasses.replace(STAGE, seq_len=1024, global_batch_tokens=4096, tp=2)
    check_config(config_with(split, parallel=Parallel(async_tp=True), compile=Compile(enable=True)), 2)


def test_interleaved_schedules_want_whole_rounds() -> None:
    stage = dataclasses.replace(STAGE, global_batch_tokens=5 * 1024)
    looped = Parallel(pp=2, dp_shard=1, pp_schedule="interleaved_1f1b")
    message = refuse(config_with(stage, parallel=looped), 2)
    assert "makes 5 micro-batches, which interleaved_1f1b cannot assign" in message
    assert "fix: use 6144 for 6 micro-batches" in message
    check_config(config_with(stage, parallel=dataclasses.replace(looped, pp_schedule="1f1b")), 2)


def test_a_cp_of_minus_one_takes_every_rank() -> None:
    stage = dataclasses.replace(STAGE, cp=-1)
    config = config_with(stage, training=Training(micro_batch_sequences=2))
    check_config(config, 4)
    [resolved] = resolve_stages(config, 4)
    assert (resolved.cp, resolved.dp, resolved.round_tokens) == (4, 1, 2 * 1024)


@pytest.mark.parametrize(
    ("match", "wanted"),
    [
        ("layers.(", "optimizer.groups[1].match = 'layers.(' is not a valid regular expression: missing )"),
        ("", "optimizer.groups[1] has no match"),
    ],
)
def test_a_rule_for_parameters_that_is_no_regular_expression_is_refused(match: str, wanted: str) -> None:
    optimizer = Optimizer(groups=(ParameterGroup("norm"), ParameterGroup(match)))
    assert wanted in refuse(config_with(optimizer=optimizer), 1)


BOOKS = DataSource(name="books", source="text", path="books")


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (Data(path="books", sources=(BOOKS,)), "data.path is set beside [[data.sources]], and none of them reads it"),
        (Data(min_document=5, sources=(BOOKS,)), "fix: move min_document into the tables it is meant for"),
        (Data(sources=(BOOKS, BOOKS)), "data.sources[1].name = 'books' is taken\n  fix: give each source its own name"),
        (Data(sources=(BOOKS, DataSource())), "data.sources[1].name = '' is not a name\n  fix: use letters"),
        (Data(sources=(dataclasses.replace(BOOKS, name="a b"),)), "data.sources[0].name = 'a b' is not a name"),
        (
            Data(path="books"),
            "data.path does nothing with source = 'python-stdlib'\n  fix: remove it, or use source = 'text'",
        ),
        (Data(source="text", group_field="repo"), "data.group_field does nothing with source = 'text'"),
        (Data(source="text", text_field="t"), "data.text_field does nothing with source = 'text'"),
        (Data(token_field="ids"), "fix: remove it, or use source = 'jsonl' or 'parquet' or 'huggingface'"),
        (Data(source="jsonl", document="folder"), "data.document does nothing with source = 'jsonl'"),
        (Data(source="parquet", split="test"), "data.split does nothing with source = 'parquet'"),
        (Data(source="jsonl", token_field="ids", text_field="t"), "data has both text_field and token_field"),
        (Data(source="jsonl", token_field="ids"), "data.token_field = 'ids' holds token ids, and [tokenizer]"),
        (Data(min_document=10, max_document=9), "data.max_document = 9 is less than min_document = 10 or 2"),
        (Data(max_document=1), "fix: raise max_document, or set it to 0 to split nothing"),
    ],
)
def test_sources_that_contradict_themselves_are_refused(data: Data, wanted: str) -> None:
    assert wanted in refuse(config_with(data=data), 1)


def test_a_file_for_a_tokenizer_that_reads_none_is_refused() -> None:
    said = refuse(config_with(tokenizer=Tokenizer(kind="bytes", path="x")), 1)
    assert "tokenizer.path does nothing with kind = 'bytes'" in said
    assert "fix: remove it, or use kind = 'sentencepiece' or 'huggingface'" in said


def test_sources_that_fit_pass() -> None:
    rows = DataSource(
        "parquet", "rows", token_field="ids", group_field="repo", min_document=5, max_document=5, name="b"
    )
    check_config(config_with(data=Data(sources=(BOOKS, rows)), tokenizer=Tokenizer(kind="bytes")), 1)


def test_a_gate_at_a_length_that_the_ranks_cannot_share_is_refused() -> None:
    short = dataclasses.replace(STAGE, seq_len=8, global_batch_tokens=64)
    gated = dataclasses.replace(STAGE, cp=8, steps=0, until={"short_loss_rise": 0.1, "max_tokens": 9000.0})
    said = refuse(config_with(short, gated, evaluation=Evaluation(interval=5)), 8)
    assert "measures short_loss_rise at 8 tokens" in said
    assert "make that length a multiple of 16" in said


@pytest.mark.parametrize(
    ("passkey", "message"),
    [
        (Passkey(needle="the key is {key}"), "needle = 'the key is {key}' lacks the name or the key"),
        (Passkey(question="{name}: {kee}"), "cannot be filled in: 'kee'"),
        (Passkey(needle="{name}: {key"), "cannot be filled in: expected '}'"),
        (Passkey(needle="{name.first}: {key}"), "cannot be filled in: 'str' object has no attribute 'first'"),
        (Passkey(question="{key} is whose? {name}"), "does not end with the key"),
        (Passkey(question="{name}: {word}."), "does not end with the key"),
        (Passkey(lengths=(128, 24)), "passkey.lengths has 24 tokens, which the cp x tp = 8 ranks"),
    ],
)
def test_prompts_that_cannot_ask_or_be_shared_are_refused(passkey: Passkey, message: str) -> None:
    stage = dataclasses.replace(STAGE, cp=8)
    assert message in refuse(config_with(stage, evaluation=Evaluation(passkey=passkey)), 8)


def test_a_rank_alone_is_measured_at_odd_lengths() -> None:
    odd = dataclasses.replace(STAGE, seq_len=101, global_batch_tokens=101)
    gated = dataclasses.replace(odd, steps=0, until={"short_loss_rise": 0.1, "max_tokens": 9000.0})
    evaluation = Evaluation(interval=5, position_seq_len=203, passkey=Passkey(lengths=(101,)))
    check_config(config_with(odd, gated, evaluation=evaluation), 1)


def test_a_gate_that_nothing_measures_is_refused() -> None:
    gated = dataclasses.replace(STAGE, steps=0, until={"short_loss_rise": 0.1, "max_tokens": 9000.0})
    assert "compares with the end of the first stage: this one" in refuse(
        config_with(gated, evaluation=Evaluation(interval=5)), 1
    )
    gated = dataclasses.replace(STAGE, steps=0, until={"passkey_accuracy": 90.0, "max_tokens": 9000.0})
    assert "until.passkey_accuracy = 90.0 is never reached\n  fix: use a fraction" in refuse(
        config_with(gated, evaluation=Evaluation(interval=5)), 1
    )
    gated = dataclasses.replace(STAGE, steps=0, until={"passkey_accuracy": 0.9, "max_tokens": 9000.0})
    for passkey in (Passkey(trials=0), Passkey(variants=("multi_key",)), Passkey(lengths=(2 * STAGE.seq_len,))):
        said = refuse(config_with(gated, evaluation=Evaluation(interval=5, passkey=passkey)), 1)
        assert f"measures none at up to {STAGE.seq_len} tokens" in said
    check_config(config_with(gated, evaluation=Evaluation(interval=5)), 1)


def test_a_stages_own_degrees_are_named_where_they_do_not_fit() -> None:
    stage = dataclasses.replace(STAGE, tp=2)
    message = refuse(config_with(STAGE, stage, parallel=Parallel(dp_shard=2)), 2)
    assert "[parallel] with tp = 2 of a stage asks for dp_shard 2 x tp 2 and the job has 2 ranks" in message
    assert "fix: set parallel.dp_shard = -1, or change the stage's tp or pp" in message


def test_handling_spikes_needs_a_threshold() -> None:
    message = refuse(config_with(health=Health(on_spike="handle", spike_threshold=0.0)), 1)
    assert "health.on_spike = 'handle' has no effect with" in message


@pytest.mark.parametrize(
    ("lora", "sections", "wanted"),
    [
        (Lora(targets=("w(",)), {}, "lora.targets[0] = 'w(' is not a valid regular expression: missing )"),
        (Lora(train=("norm", "")), {}, "lora.train[1] is empty"),
        (Lora(dropout=0.1), {}, "lora.dropout = 0.1 is not supported: a recomputed block, and each rank"),
        (Lora(), {"training": Training(float8="rowwise")}, "training.float8 = 'rowwise' and [lora] exclude each other"),
        (
            None,
            {"model": Model(adapter="mine")},
            "model.adapter = 'mine' is trained on by [lora], which this file lacks",
        ),
        (Lora(), {"model": Model(checkpoint="run")}, "model.checkpoint = 'run' and [lora] exclude each other"),
        (
            Lora(base="nf4"),
            {"parallel": Parallel(tp=2)},
            "lora.base = 'nf4' does not work with parallel.tp above 1",
        ),
        (Lora(), {"optimizer": Optimizer(name="muon")}, "optimizer.name = 'muon' orthogonalises steps of whole"),
    ],
)
def test_what_adapters_cannot_be_is_refused(lora: Lora | None, sections: dict[str, object], wanted: str) -> None:
    assert wanted in refuse(config_with(lora=lora, **sections), 2 if "parallel" in sections else 1)
