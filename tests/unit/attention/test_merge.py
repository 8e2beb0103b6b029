"""Tiles merged into a running softmax: compiled for CUDA, in few graphs and few passes."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor_config
from torch._inductor import metrics
from torch._logging import set_logs

from torchtitan_cp.attention import merge
from torchtitan_cp.attention.compiling import compile_on_cuda
from torchtitan_cp.attention.merge import ALL, Rows, RunningSoftmax

B, S, H, D = 2, 96, 3, 16
BATCH_ROWS = torch.arange(B).repeat_interleave(40)
LOCAL_ROWS = torch.cat([torch.arange(S)[start : start + 40] for start in (3, 50)])
# As the kernels' calls give them: spans of all batch rows or of one, and rows of documents.
TILES: list[Rows] = [
    ALL,
    (slice(None), slice(48, 96)),
    (slice(None), slice(0, 31)),
    (slice(1, 2), slice(10, 50)),
    (slice(None), LOCAL_ROWS),
    (BATCH_ROWS, LOCAL_ROWS),
    ALL,
]


def merged(tiles: list[Rows], dtype: torch.dtype, wide: torch.dtype, sequences: int = B) -> tuple[Tensor, Tensor]:
    """(out, lse) of tiles with outputs in `dtype` and log-sum-exps in `wide`; some rows have no key in any tile."""
    generator = torch.Generator().manual_seed(1)
    softmax = RunningSoftmax(torch.zeros(sequences, S, H, D, dtype=dtype), D)
    for rows in tiles:
        shape = torch.empty(sequences, S)[rows].shape
        lse = torch.randn(*shape, H, generator=generator, dtype=wide)
        lse[..., :5, :] = -torch.inf
        softmax.add(rows, torch.randn(*shape, H, D, generator=generator, dtype=wide).to(dtype), lse)
    return softmax._totals()


def test_rows_are_merged_in_one_graph_for_each_way_to_name_them_whatever_their_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    want = merged(TILES, torch.float32, torch.float32)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(merge._merge, backend=counter, fullgraph=True)
    monkeypatch.setattr(merge, "compile_on_cuda", lambda function, on_cuda: compiled)
    again = [(slice(None), slice(48 - rows, 96 - rows)) for rows in range(0, 48, 5)]
    for tiles in (TILES, TILES, [ALL, *again], [ALL, *((slice(None), LOCAL_ROWS[rows:]) for rows in range(9))]):
        got = merged(tiles, torch.float32, torch.float32)
        if tiles is TILES:
            for one, other in zip(got, want, strict=True):
                assert torch.equal(one, other)
    # Spans of all rows and of one sequence, rows of all and of each; each kind again at a length that is not fixed.
    assert counter.frame_count <= 8


@pytest.mark.deep
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_compiled_a_merge_gives_what_its_operators_give(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float
) -> None:
    tiles = [ALL, (slice(1, 2), slice(10, 50)), (BATCH_ROWS, LOCAL_ROWS)]
    want = merged(tiles, dtype, dtype)
    monkeypatch.setattr(merge, "compile_on_cuda", lambda function, on_cuda: compile_on_cuda(function, True))
    for one, other in zip(merged(tiles, dtype, dtype), want, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.deep
def test_compiled_a_merge_reads_and_writes_each_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator at a time would move 18 bytes an element: 6 to widen the tile and 12 to weigh it."""
    of_one = partial(merged, [ALL, (slice(None), slice(32, 96))], torch.bfloat16, torch.float32, sequences=1)
    want = of_one()
    monkeypatch.setattr(merge, "compile_on_cuda", lambda function, on_cuda: compile_on_cuda(function, True))
    monkeypatch.setattr(metrics, "num_bytes_accessed", 0)
    torch._dynamo.reset()  # else the code of another test may serve
    set_logs(inductor_metrics=True)
    try:
        with inductor_config.patch(force_disable_caches=True):
            got = of_one()
    finally:
        set_logs(inductor_metrics=False)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    moved = metrics.num_bytes_accessed / (64 * H * D)
    assert 10 < moved < 12  # 4 and 4 of the running output, 2 of the tile; log-sum-exps are 1 / D of it
