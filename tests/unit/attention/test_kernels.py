"""Each kernel on its device against the reference kernel in fp64: tiles, groups of heads, and merged backwards.

The bodies run here with the kernels of the CPU, and on a GPU with those of CUDA.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.emulated_ops import EMULATED, emulate
from tests.support.kernel_cases import draw, error
from torchtitan_cp.attention import PlanError
from torchtitan_cp.attention.kernels import KERNELS, ScoreMod, choose_for_case, choose_kernel, flash4, rates
from torchtitan_cp.attention.kernels.kernel import Case
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.merge import GradientSum, RunningSoftmax
from torchtitan_cp.attention.strategies.strategy import KeyBlock, add_gradients, add_outputs
from torchtitan_cp.attention.tiles import ALL_ROWS, CAUSAL, FULL, Tile

CUDA = pytest.mark.cuda
FLASH4 = [CUDA, pytest.mark.skipif(bool(flash4.missing()), reason=f"flash4: {flash4.missing()}")]
RUNS = [
    pytest.param("cpu", "cpu", torch.float64, id="cpu-fp64"),
    pytest.param("cpu", "cpu", torch.float32, id="cpu-fp32"),
    pytest.param("cpu", "cpu", torch.bfloat16, id="cpu-bf16"),
    pytest.param("reference", "cpu", torch.float32, id="reference-fp32"),
    *(pytest.param(name, "cuda", torch.bfloat16, marks=CUDA, id=f"{name}-bf16") for name in ("flash", "cudnn", "flex")),
    *(pytest.param(name, "cuda", torch.float16, marks=CUDA, id=f"{name}-fp16") for name in ("flash", "cudnn")),
    pytest.param("flash4", "cuda", torch.bfloat16, marks=FLASH4, id="flash4-bf16"),
    pytest.param("flash4", "cuda", torch.float16, marks=FLASH4, id="flash4-fp16"),
    *(pytest.param("efficient", "cuda", x, marks=CUDA, id=f"efficient-{x}") for x in (torch.float32, torch.bfloat16)),
]
TILES = {
    "full": (128, 192, FULL),
    "causal": (160, 160, CAUSAL),
    "a window's band": (128, 200, Band(-20, 40)),
    "later keys": (96, 96, Band(0, None)),
    "keys before": (64, 200, Band(None, 136)),
    "more queries than keys, early": (160, 40, Band(None, 8)),
    "more queries than keys, late": (160, 40, Band(-130, None)),
}
HEADS = [(4, 4), (8, 2), (4, 1)]
DIMS = [(64, 64), (128, 64), (128, 128)]


def run_tiles(name: str, tiles: list[Tile], tensors: list[Tensor], together: bool = False) -> list[Tensor]:
    """out, dq, dk, dv of tiles in one step or a step each, merged, and backward from the merged log-sum-exp."""
    steps = [tuple(tiles)] if together else [(tile,) for tile in tiles]
    q, k, v, dout = tensors
    kernel = KERNELS[name]
    softmax = RunningSoftmax(q, v.shape[-1])
    for step in steps:
        add_outputs(softmax, q, KeyBlock(k, v, step, ScoreMod(0.11)), kernel)
    out, lse = softmax.result()
    sums = [GradientSum(x) for x in (q, k, v)]
    for step in steps:
        add_gradients(sums, (dout, q, out, lse), KeyBlock(k, v, step, ScoreMod(0.11)), kernel)
    return [out, *(gradient.total() for gradient in sums)]


# Of a kernel that keeps its sums in fp32: roundings of the inputs' dtype in P and dS, and of the result.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def check(name: str, dtype: torch.dtype, tiles: list[Tile], tensors: list[Tensor], together: bool = False) -> None:
    exact = run_tiles("reference", tiles, [x.double().cpu() for x in tensors])
    found = run_tiles(name, tiles, tensors, together)
    for part, got, want in zip(("out", "dq", "dk", "dv"), found, exact, strict=True):
        assert got.isfinite().all(), part
        assert error(got, want) < TOLERANCE[dtype], (part, error(got, want))


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("name", "device", "dtype"), RUNS)
def test_a_tile_equals_the_reference_forward_and_backward(
    name: str, device: str, dtype: torch.dtype, tile: str, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    queries, keys, band = TILES[tile]
    tensors = draw(queries, keys, heads, dims, device, dtype)
    check(name, dtype, [Tile(ALL_ROWS, 0, queries, 0, keys, band)], tensors)


@pytest.mark.deep
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", EMULATED)
def test_a_tile_over_emulated_operators_equals_the_reference(name: str, tile: str) -> None:
    queries, keys, band = TILES[tile]
    with emulate():
        for dtype in (torch.float64, torch.bfloat16):
            tensors = draw(queries, keys, (4, 2), (64, 32), "cpu", dtype)
            check(name, dtype, [Tile(ALL_ROWS, 0, queries, 0, keys, band)], tensors)


@pytest.mark.parametrize(("name", "device", "dtype"), RUNS)
def test_a_row_whose_keys_come_in_three_tiles_is_merged_and_differentiated_from_the_merged_sum(
    name: str, device: str, dtype: torch.dtype
) -> None:
    edges = [0, 64, 160, 256]
    tiles = [Tile(ALL_ROWS, 0, 128, start, stop) for start, stop in pairwise(edges)]
    check(name, dtype, tiles, draw(128, 256, (8, 2), (64, 64), device, dtype))


@pytest.mark.parametrize(("name", "device", "dtype"), RUNS)
def test_batch_rows_may_have_tiles_of_their_own(name: str, device: str, dtype: torch.dtype) -> None:
    tiles = [Tile(0, 0, 100, 0, 100, CAUSAL), Tile(1, 10, 90, 20, 128), Tile(1, 90, 128, 0, 60)]
    check(name, dtype, tiles, draw(128, 128, (4, 2), (64, 64), device, dtype))


PACKED = {
    "side by side": [Tile(ALL_ROWS, x, y, x, y, CAUSAL) for x, y in pairwise((0, 30, 31, 100, 101, 128))],
    "apart": [Tile(ALL_ROWS, 3, 40, 0, 20), Tile(ALL_ROWS, 60, 61, 40, 90), Tile(ALL_ROWS, 70, 120, 100, 128)],
    "of some rows": [Tile(0, 0, 100, 0, 100, CAUSAL), Tile(1, 10, 60, 20, 70, CAUSAL), Tile(1, 60, 128, 70, 128)],
    "one row each": [Tile(ALL_ROWS, x, x + 1, 3 * x, 3 * x + 3) for x in range(20)],
    "windows": [Tile(ALL_ROWS, x, y, x, y, Band(-20, 0)) for x, y in pairwise((0, 50, 128))],
}


@pytest.mark.parametrize("tiles", PACKED)
@pytest.mark.parametrize(("name", "device", "dtype"), RUNS)
def test_tiles_of_a_step_equal_the_reference_forward_and_backward(
    name: str, device: str, dtype: torch.dtype, tiles: str
) -> None:
    check(name, dtype, PACKED[tiles], draw(128, 128, (4, 2), (64, 64), device, dtype), together=True)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(pytest.param(n, torch.bfloat16, marks=CUDA) for n in ("flash", "cudnn", "efficient", "flex")),
        pytest.param("flash4", torch.bfloat16, marks=FLASH4),
    ],
)
def test_error_on_the_gpu_is_no_worse_than_one_sdpa_call(name: str, dtype: torch.dtype) -> None:
    tensors = draw(512, 512, (8, 2), (64, 64), "cuda", dtype)
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in tensors[:3]]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.11, enable_gqa=True)
    out.backward(tensors[3].transpose(1, 2))
    alone = [x.transpose(1, 2) for x in (out.detach(), *(leaf.grad for leaf in leaves))]
    whole = [Tile(ALL_ROWS, 0, 512, 0, 512, CAUSAL)]
    exact = run_tiles("reference", whole, [x.double().cpu() for x in tensors])
    split = [Tile(ALL_ROWS, 0, 256, 0, 256, CAUSAL), Tile(ALL_ROWS, 256, 512, 0, 256)]
    split.append(Tile(ALL_ROWS, 256, 512, 256, 512, CAUSAL))
    for got, single, want in zip(run_tiles(name, split, tensors), alone, exact, strict=True):
        assert error(got, want) <= 1.5 * error(single, want)


def test_a_kernel_asked_for_that_cannot_names_those_that_can() -> None:
    x = torch.zeros(1, 8, 2, 16)
    with pytest.raises(
        PlanError, match="attention kernel 'cudnn' cannot run this: it runs on cuda, not cpu; use cpu or"
    ):
        choose_kernel("cudnn", x, x)
    assert choose_kernel("auto", x, x) is KERNELS["cpu"]
    with pytest.raises(PlanError, match=r"cannot run this: it takes .* or torch.float16, not torch.int64; change"):
        choose_kernel("auto", x.long(), x.long())


def test_the_log_names_the_kernel_in_one_short_line_and_the_reasons_at_debug_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    choose_for_case.cache_clear()
    x = torch.zeros(1, 8, 2, 16)
    with caplog.at_level("DEBUG", "torchtitan_cp.attention.kernels"):
        choose_kernel("auto", x, x)
    [(_, _, chosen), (_, _, others)] = caplog.record_tuples
    assert [record.levelname for record in caplog.records] == ["INFO", "DEBUG"]
    assert chosen == "attention kernel cpu for float32 on cpu, for full and causal tiles"
    assert "flash: it runs on cuda, not cpu" in others


H100, B200, A100, RTX = (9, 0), (10, 0), (8, 0), (12, 0)
BFLOAT16 = Case("cuda", torch.bfloat16, 128, 128)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Whether the package of flash4 is to be found."""

    def install(found: bool) -> None:
        monkeypatch.setattr(flash4, "_installed_version", lambda: flash4.VERSION if found else "")
        choose_for_case.cache_clear()

    yield install
    choose_for_case.cache_clear()


# Of a case: the kernel for dense tiles, for windows and packed documents, and for these with the package of flash4.
@pytest.mark.parametrize(
    ("case", "chosen", "of_windows", "with_flash4"),
    [
        (BFLOAT16._replace(capability=H100), "cudnn", "flash", "flash4"),
        (BFLOAT16._replace(capability=B200, dtype=torch.float16), "cudnn", "flash", "flash4"),
        (BFLOAT16._replace(capability=H100, qk_dim=192), "flash", "flash", "flash4"),
        (BFLOAT16._replace(capability=H100, qk_dim=256, v_dim=256), "flash", "flash", "flash4"),
        (BFLOAT16._replace(capability=B200, qk_dim=192), "flash", "flash", "flash"),
        (BFLOAT16._replace(capability=H100, dtype=torch.float32), "efficient", "efficient", "efficient"),
        (BFLOAT16._replace(capability=H100, qk_dim=512, v_dim=512), "efficient", "efficient", "efficient"),
        (BFLOAT16._replace(capability=H100, softcap=True), "flex", "flex", "flex"),
        (BFLOAT16._replace(capability=H100, deterministic=True), "flash", "flash", "flash"),
        (BFLOAT16._replace(capability=A100), "flash", "flash", "flash"),
        (BFLOAT16._replace(capability=RTX), "flash", "flash", "flash"),
        (BFLOAT16, "flash", "flash", "flash"),
    ],
)
def test_auto_goes_by_the_rates_of_capability_dims_and_tiles(
    case: Case, chosen: str, of_windows: str, with_flash4: str, installed: Callable[[bool], None]
) -> None:
    for found, packed in ((False, of_windows), (True, with_flash4)):
        installed(found)
        for backward in (False, True):
            assert choose_for_case("auto", case._replace(backward=backward)) == chosen
            assert choose_for_case("auto", case._replace(backward=backward, dense=False)) == packed
    if case.dtype != torch.float32 and not case.softcap and case.qk_dim <= 256:
        assert choose_for_case("flash", case) == "flash", "a kernel by name is honoured"


@pytest.mark.parametrize("found", [False, True])
def test_a_plan_does_not_depend_on_the_packages_of_the_machine_that_makes_it(
    found: bool, installed: Callable[[bool], None]
) -> None:
    installed(found)
    case = BFLOAT16._replace(capability=H100, dense=False, planned=True)
    assert (choose_for_case("auto", case), choose_for_case("flash4", case)) == ("flash", "flash4")


def test_forward_and_backward_may_have_different_kernels(
    monkeypatch: pytest.MonkeyPatch, installed: Callable[[bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    installed(True)
    monkeypatch.setattr(rates, "RATES", (*rates.RATES, rates.Rate(9, "flash4", 128, True, 0.55, 0.60)))
    case = BFLOAT16._replace(capability=H100)
    with caplog.at_level("INFO", "torchtitan_cp.attention.kernels"):
        assert choose_for_case("auto", case._replace(backward=True)) == "flash4"
        assert choose_for_case("auto", case) == "cudnn"
        assert choose_for_case("auto", case._replace(backward=True)) == "flash4"
    assert [record.message for record in caplog.records] == [
        "attention kernel cudnn for bfloat16 on cuda 9.0, the fastest that can run full and causal tiles",
        "attention kernel flash4 for bfloat16 on cuda 9.0, the fastest that can run the backward of full and causal "
        "tiles",
    ]


def test_the_log_says_which_kernel_runs_on_a_gpu_and_for_what(
    caplog: pytest.LogCaptureFixture, installed: Callable[[bool], None]
) -> None:
    with caplog.at_level("INFO", "torchtitan_cp.attention.kernels"):
        for found in (False, True):
            installed(found)
            choose_for_case("auto", BFLOAT16._replace(capability=H100, dense=False))
        for backward in (False, True):
            choose_for_case("auto", BFLOAT16._replace(capability=H100, backward=backward))
        choose_for_case("auto", BFLOAT16._replace(capability=RTX))
        choose_for_case("auto", BFLOAT16._replace(capability=H100, qk_dim=512, v_dim=512))
    assert [record.message for record in caplog.records] == [
        "attention kernel flash for bfloat16 on cuda 9.0, the fastest that can run windows or packed documents; flash4 "
        "would be faster, but it needs flash-attn-4 4.0.0b36: pip install 'torchtitan-cp[flash4]'",
        "attention kernel flash4 for bfloat16 on cuda 9.0, the fastest that can run windows or packed documents",
        "attention kernel cudnn for bfloat16 on cuda 9.0, the fastest that can run full and causal tiles",
        "attention kernel flash for bfloat16 on cuda 12.0, the first that can run full and causal tiles",
        "attention kernel efficient for bfloat16 on cuda 9.0, the fastest that can run full and causal tiles; heads of "
        "512 dims are more than the 256 of the fast kernels: on an H200 it reaches an eighth of the peak forward and a "
        "twentieth backward",
    ]


def test_the_capability_is_asked_for_where_a_gpu_is_there(
    monkeypatch: pytest.MonkeyPatch, installed: Callable[[bool], None]
) -> None:
    installed(False)
    x: Any = SimpleNamespace(device=torch.device("cuda"), is_cuda=True, dtype=torch.bfloat16, shape=(1, 8, 2, 128))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_kernel("auto", x, x) is KERNELS["flash"], "tensors without data, where no GPU is"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: H100)
    assert choose_kernel("auto", x, x) is KERNELS["cudnn"]
    assert choose_kernel("auto", x, x, dense=False) is KERNELS["flash"]
    assert choose_kernel("efficient", x, x) is KERNELS["efficient"]
