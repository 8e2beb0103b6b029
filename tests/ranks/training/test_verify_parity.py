"""--verify-parity: it holds where the program is right, and names what is wrong where it is not."""

import io
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from models import ARCHITECTURES
from tests.support.doctor import diagnose
from tests.support.hub_models import write_start
from tests.support.parity import rows_of, verify
from tests.support.rank_pool import RankFailure, RankPool
from tests.support.runs import EXPERTS, IN_NF4, TINY, needs_bytes, write_conversations, write_run
from torchtitan_cp.attention.strategies import STRATEGIES
from torchtitan_cp.attention.strategies.strategy import Strategy
from torchtitan_cp.cli.check import main as check
from torchtitan_cp.config import ConfigError, load_config
from torchtitan_cp.runtime.device import start_ranks
from torchtitan_cp.training.parity import verify_parity
from torchtitan_cp.training.registry import register
from torchtitan_cp.training.trainer import Trainer


def verify_and_listen(path: Path, *overrides: str) -> tuple[bool, str]:
    """On a rank: whether parity holds, and what was printed."""
    with redirect_stdout(io.StringIO()) as printed:
        holds = verify(path, *overrides)
    return holds, printed.getvalue()


def verify_broken(path: Path, *overrides: str) -> bool:
    """With a ring that loses a thousandth of what each query attends to."""
    ring = STRATEGIES["ring"]

    def leaking(*arguments: Any) -> tuple[Tensor, Tensor, Any]:
        out, lse, residuals = ring.forward(*arguments)
        return out * 0.999, lse, residuals

    STRATEGIES["ring"] = Strategy(leaking, ring.backward)
    try:
        return verify(path, *overrides)
    finally:
        STRATEGIES["ring"] = ring


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["--parallel.cp=2"], marks=pytest.mark.deep),
        ["--parallel.cp=4", "--context_parallel.strategy=hybrid", "--context_parallel.layout=balanced"],
        pytest.param(
            ["--parallel.cp=2", "--training.compute_dtype=bfloat16", "--activation.checkpoint=full"],
            marks=pytest.mark.deep,
        ),
        ["--parallel.pp=2", "--parallel.tp=2", "--model.overrides.windows=[100, 0]"],
        pytest.param(["--parallel.tp=2", "--lora.rank=4", "--lora.train=['tok_embeddings']"], marks=pytest.mark.deep),
        pytest.param(["--parallel.pp=2", "--lora.rank=4", "--lora.train=['tok_embeddings']"], marks=pytest.mark.deep),
        pytest.param(
            ["--parallel.cp=2", *IN_NF4, "--lora.train=['tok_embeddings']"], marks=[pytest.mark.deep, needs_bytes]
        ),
    ],
)
def test_parity_holds_on_every_layout(ranks: Callable[[int], RankPool], tmp_path: Path, overrides: list[str]) -> None:
    path = write_run(tmp_path)
    assert ranks(4)(verify, path, *overrides) == [True] * 4
    (comparison,) = rows_of(tmp_path)
    assert comparison["holds"]
    compared = [row["quantity"] for row in comparison["rows"]]
    assert compared[:3] == ["loss", "attention output, layers.0.attention", "attention output, layers.1.attention"]
    assert {"gradients, layers.0", "gradients, layers.1", "gradients, tok_embeddings"} <= set(compared)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        ["--parallel.cp=2"],
        pytest.param(
            ["--parallel.cp=2", "--parallel.tp=2", "--training.loss_normalization=batch_tokens"], marks=pytest.mark.deep
        ),
        pytest.param(["--parallel.cp=4", "--context_parallel.strategy=hybrid"], marks=pytest.mark.deep),
        pytest.param(["--parallel.pp=2", "--parallel.cp=2"], marks=pytest.mark.deep),
    ],
)
def test_parity_holds_on_packed_conversations_with_a_masked_loss(
    ranks: Callable[[int], RankPool], tmp_path: Path, overrides: list[str]
) -> None:
    assert ranks(4)(verify, write_conversations(tmp_path), *overrides) == [True] * 4


def test_neither_comparison_looks_for_the_corpus(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    path = write_run(tmp_path)
    shutil.rmtree(tmp_path / "corpus")
    trained, once = "--tokenizer.kind=sentencepiece", "--data.max_epochs={corpus = 1}"
    assert ranks(2)(verify, path, "--parallel.cp=2", "--tokenizer.vocab_size=300", trained, once) == [True] * 2
    assert [safe for safe, _ in ranks(2)(diagnose, path)] == [True] * 2
    assert not (tmp_path / "cache").exists()
    for comparison in ("--parity", "--doctor"):
        assert check([str(path), "--ranks", "2", comparison]) == 0
    assert check([str(path), "--ranks", "2"]) == 2


@pytest.mark.deep
def test_every_stage_is_compared_with_its_own_tp(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    text = EXPERTS + "tp = 2\n[[curriculum.stages]]\nseq_len = 128\nsteps = 1\nglobal_batch_tokens = 512\ncp = 2\n"
    assert ranks(2)(verify, write_run(tmp_path, text)) == [True] * 2
    assert [found["layout"] for found in rows_of(tmp_path)] == [
        "128: cp 1 x dp 1 x tp 2, ring",
        "128-stage-2: cp 2 x dp 1, ring",
    ]


LIKE_THE_FIRST = "[[curriculum.stages]]\nseq_len = 128\nsteps = 1\nglobal_batch_tokens = 512\n"


def test_stages_of_the_same_layout_with_another_mask_positions_or_rope_are_compared_too(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    packed = "data = {{document_mask = true, restart_positions = %s}}\n"
    others = packed % "false", packed % "true", "", "rope = {{theta = 5e4}}\n"
    path = write_run(tmp_path, TINY + "".join("\n" + LIKE_THE_FIRST + own for own in others))
    assert ranks(2)(verify, path, "--parallel.cp=2") == [True] * 2
    compared = [found["layout"].partition(":")[0] for found in rows_of(tmp_path)]
    assert compared == ["128", "128-stage-2", "128-stage-3", "128-stage-5"]


def test_parity_holds_with_a_z_loss_and_without_what_rounds_on_purpose(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    rounding = "--training.reduce_dtype=bfloat16", "--context_parallel.kv_transfer=float8", "--parallel.cp=2"
    assert ranks(2)(verify, write_run(tmp_path), "--training.z_loss=1e-3", *rounding) == [True] * 2


def test_the_table_names_the_model_of_a_checkpoint_cut_to_fewer_layers(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path, ours = write_start(tmp_path, "llama"), ["--model.flavor=", "--model.overrides={}", "--parallel.cp=2"]
    with pytest.raises(RankFailure, match=r"n_layers = 2, not 4\n.*, or set model.load_weights = false"):
        ranks(2)(verify, path, *ours, "--model.overrides.n_layers=2")
    fresh = (*ours, "--model.overrides.n_layers=2", "--model.load_weights=false")
    (holds, printed), (also, _) = ranks(2)(verify_and_listen, path, *fresh)
    assert holds
    assert also
    (comparison,) = rows_of(tmp_path)
    parameters = 2 * 288 * 48 + 48 + 2 * (48 * 12 * (2 * 4 + 2 * 2) + 3 * 48 * 96 + 2 * 48)
    named = f"llama {tmp_path}/hub with n_layers = 2: 2 layers, {parameters:,} parameters, fresh weights"
    assert comparison["model"] == named
    assert "".join(named.split()) in "".join(printed.split()), "in lines as long as the console's"


def test_a_broken_exchange_is_found_and_the_first_layer_named(
    ranks: Callable[[int], RankPool], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path)
    assert ranks(2)(verify_broken, path, "--parallel.cp=2", "--context_parallel.strategy=ring") == [False] * 2
    (comparison,) = rows_of(tmp_path)
    apart = [row["quantity"] for row in comparison["rows"] if row["difference"] > row["allowed"]]
    assert "attention output, layers.0.attention" in apart


def refuse(path: Path, free_bytes: int, length: int) -> str:
    register(ARCHITECTURES)
    world = start_ranks(60.0)
    config = load_config(path, [])
    trainer = Trainer(config, world)
    assert trainer.device.free_memory_bytes() > 2**20
    device = type(world.device)
    free, device.free_memory_bytes = device.free_memory_bytes, lambda self: free_bytes  # type: ignore[method-assign]
    try:
        verify_parity(config, world, length)
    except ConfigError as error:
        return str(error)
    finally:
        device.free_memory_bytes = free  # type: ignore[method-assign]
    return ""


@pytest.mark.parametrize(("free_bytes", "length"), [(1000, 0), (1 << 43, 1 << 20)])
def test_a_model_too_large_for_one_rank_is_refused_with_a_smaller_one(
    ranks: Callable[[int], RankPool], tmp_path: Path, free_bytes: int, length: int
) -> None:
    message = ranks(1)(refuse, write_run(tmp_path), free_bytes, length)[0]
    assert "parity needs the whole model on one rank" in message
    assert "--model.overrides.n_layers=2" in message


def parity_at(path: Path, length: int, *overrides: str) -> str:
    register(ARCHITECTURES)
    with pytest.raises(ConfigError) as refused:
        verify_parity(load_config(path, overrides), start_ranks(60.0), length)
    return str(refused.value)


def test_a_length_that_the_ranks_cannot_share_is_refused(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    said = ranks(2)(parity_at, write_run(tmp_path), 101, "--parallel.tp=2")[1]
    assert said == "the length 101 cannot be shared by cp = 1 and tp = 2\n  fix: give a multiple of 2"


def test_peak_memory_counts_from_the_reset(ranks: Callable[[int], RankPool]) -> None:
    grown, after = ranks(1)(take_and_drop)[0]
    assert 60 * 2**20 < grown < 100 * 2**20
    assert after < 20 * 2**20


def take_and_drop() -> tuple[int, int]:
    """Growth while 64 MiB are held, and while nothing is."""
    device = start_ranks(60.0).device
    device.reset_peak_memory()
    before = device.peak_memory_bytes()
    held = b"x" * (64 * 2**20)
    grown = device.peak_memory_bytes() - before
    del held
    device.reset_peak_memory()
    return grown, device.peak_memory_bytes() - before
