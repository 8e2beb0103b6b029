"""Every option of the Llama block gives one process's losses and gradients on ranks, and plain PyTorch's on one."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from tests.ranks import RankPool
from tests.runs import first_gradients, losses, train, write_run
from tests.test_verify_parity import rows_of, verify

OPTIONS = {
    "windows, Mistral": ["--model.overrides.windows=[50]"],
    "bias, Qwen2": ["--model.overrides.qkv_bias=true"],
    "QK norm, Qwen3": ["--model.overrides.qk_norm=true"],
    "sinks and windows, gpt-oss": ["--model.overrides.sinks=true", "--model.overrides.windows=[50, 0]"],
    "all": [
        "--model.overrides.qkv_bias=true",
        "--model.overrides.qk_norm=true",
        "--model.overrides.sinks=true",
        "--model.overrides.windows=[0, 50]",
    ],
}
LAYOUTS = {
    "TP 2": (2, ["--parallel.tp=2"]),
    "CP 2": (2, ["--parallel.cp=2"]),
    "CP 2 x TP 2, all-to-all, attention saved": (
        4,
        [
            "--parallel.cp=2",
            "--parallel.tp=2",
            "--context_parallel.strategy=all_to_all",
            "--activation.checkpoint=attention_saved",
        ],
    ),
    "PP 2 x TP 2, compiled": (4, ["--parallel.pp=2", "--parallel.tp=2", "--compile.enable=true"]),
}
# Every option on the two plain layouts, all of them at once on the others.
CASES = [(option, layout) for layout in ("TP 2", "CP 2") for option in OPTIONS if option != "all"]
CASES += [("all", layout) for layout in list(LAYOUTS)[2:]]
Reference = tuple[list[float], dict[str, Tensor]]


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("options"))


@pytest.fixture(scope="module")
def references(ranks: Callable[[int], RankPool], run_toml: Path) -> Callable[[str], Reference]:
    found: dict[str, Reference] = {}

    def reference(option: str) -> Reference:
        if option not in found:
            overrides = [*OPTIONS[option], f"--job.dump_folder={run_toml.parent}/one-{len(found)}"]
            lines = ranks(1)(train, run_toml, "--checkpoint.enable=false", *overrides)[0]
            found[option] = losses(lines), ranks(1)(first_gradients, run_toml, *overrides)[0][1]
        return found[option]

    return reference


@pytest.mark.parametrize(("option", "layout"), CASES)
def test_an_option_gives_the_losses_and_gradients_of_one_rank_on_a_layout(
    ranks: Callable[[int], RankPool],
    run_toml: Path,
    references: Callable[[str], Reference],
    option: str,
    layout: str,
) -> None:
    want_losses, want = references(option)
    size, degrees = LAYOUTS[layout]
    overrides = [*degrees, *OPTIONS[option], f"--job.dump_folder={run_toml.parent}/{option}-{layout}"]
    loss, gradients = ranks(size)(first_gradients, run_toml, *overrides)[0]
    assert loss == pytest.approx(want_losses[0], rel=1e-5)
    assert gradients.keys() == want.keys()
    for name, gradient in gradients.items():
        assert want[name].norm() > 0, name
        error = (gradient - want[name]).abs().max() / want[name].abs().max()
        assert error < 1e-5, (name, error)
    lines = ranks(size)(train, run_toml, "--checkpoint.enable=false", *overrides)[0]
    assert losses(lines) == pytest.approx(want_losses, rel=1e-4)


def test_all_options_at_once_give_the_attention_and_gradients_of_plain_pytorch(
    ranks: Callable[[int], RankPool], run_toml: Path
) -> None:
    assert ranks(2)(verify, run_toml, "--parallel.cp=2", *OPTIONS["all"]) == [True] * 2
    (comparison,) = rows_of(run_toml.parent)
    assert comparison["holds"]
    assert len([row for row in comparison["rows"] if row["what"].startswith("attention output")]) == 2
