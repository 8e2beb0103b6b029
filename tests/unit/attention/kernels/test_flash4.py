"""FlashAttention-4: what it makes of a band, what it is refused for, and gradients beside other kernels' outputs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.emulated_ops import emulate
from tests.support.emulated_ops.flash4 import _Options, visible
from tests.support.kernel_cases import draw, error
from tests.support.pages import REPOSITORY
from tests.support.plan_cases import in_band
from torchtitan_cp.attention import AttentionMask, PlanError, attend, make_plan
from torchtitan_cp.attention.kernels import KERNELS, Case, ScoreMod, choose_kernel, flash4
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.attention.tiles import CAUSAL, FULL

H100, B200, A100 = (9, 0), (10, 0), (8, 0)


def check_band(queries: int, keys: int, low: int | None, high: int | None) -> None:
    band = Band(low, high)
    meant = in_band(queries, keys, band)
    assume(meant.any(1).all())
    left, right = flash4.kind(queries, keys, band)
    if flash4.takes_band(queries, keys, band):
        assert torch.equal(visible(queries, keys, _Options(left, right, 1.0, 0.0)), meant)
        assert not meant.all() or (left, right) == (None, None), "full tiles share a kernel"
    else:
        assert not meant[:, -1].any(), "only tiles with keys that nobody sees are split"
    assert flash4.takes_band(queries, keys, band) or not (queries == keys and band in (FULL, CAUSAL))


@given(st.integers(1, 24), st.integers(1, 24), *2 * [st.none() | st.integers(-30, 30)])
@settings(max_examples=300, deadline=None)
def test_it_takes_the_bands_that_it_computes_correctly(
    queries: int, keys: int, low: int | None, high: int | None
) -> None:
    check_band(queries, keys, low, high)


@pytest.mark.parametrize("first", ["flash", "cudnn", "efficient", "flash4"])
@pytest.mark.parametrize("then", ["flash4", "cudnn"])
def test_the_backward_takes_the_out_and_log_sum_exp_of_another_kernel(first: str, then: str) -> None:
    q, k, v, dout = draw(48, 48, (4, 2), (16, 8), "cpu", torch.float64)
    scores = ScoreMod(0.3)
    with emulate():
        out, lse = KERNELS[first].forward(q, k, v, CAUSAL, scores)
        got = KERNELS[then].backward(dout, q, k, v, out, lse, CAUSAL, scores)
    reference = KERNELS["reference"]
    want_out, want_lse = reference.forward(q, k, v, CAUSAL, scores)
    want = reference.backward(dout, q, k, v, want_out, want_lse, CAUSAL, scores)
    for x, y in zip((out, lse, *got), (want_out, want_lse, *want), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(window=(7, -1), document_lengths=((20, 44),))])
@pytest.mark.parametrize(
    ("heads", "dims"), [((4, 2), (16, 8)), ((2, 2), (16, 8)), ((4, 1), (8, 24)), ((3, 3), (8, 24))]
)
def test_dims_of_values_may_differ_and_scores_may_be_capped(
    mask: AttentionMask, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    *inputs, dout = draw(64, 64, heads, dims, "cpu", torch.float64)
    answers = []
    for kernel in ("flash4", "reference"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        with emulate() as calls:
            out = attend(*leaves, make_plan(64, mask=mask, kernel=kernel), softcap=2.0)
            out.backward(dout)
        answers.append([out.detach(), *(leaf.grad for leaf in leaves)])
        assert (calls["flash4._flash_attn_bwd"] > 0) == (kernel == "flash4")
    for got, want in zip(*answers, strict=True):
        assert error(got, want) < 1e-12


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case("cuda", torch.bfloat16, 128, 128, capability=H100), None),
        (Case("cuda", torch.float16, 192, 128, softcap=True, capability=H100), None),
        (Case("cuda", torch.bfloat16, 64, 256, dense=False, capability=H100), None),
        (Case("cuda", torch.bfloat16, 128, 64, dense=False, softcap=True, capability=B200), None),
        (Case("cuda", torch.bfloat16, 192, 128, dense=False, capability=B200), None),
        (Case("cuda", torch.bfloat16, 256, 256, capability=B200), None),
        (Case("cuda", torch.bfloat16, 256, 256), None),
        (Case("cuda", torch.bfloat16, 256, 256, dense=False, capability=B200), "at head dim 256 has no window and no"),
        (Case("cuda", torch.bfloat16, 192, 192, capability=B200), "up to 128, 192 with 128, and 256, not 192 with 192"),
        (Case("cuda", torch.bfloat16, 128, 128, capability=A100), r"9 and 10 \(H100, H200, B200\), not 8.0"),
        (Case("cuda", torch.float32, 128, 128, capability=H100), "not torch.float32"),
        (Case("cuda", torch.bfloat16, 264, 264, capability=H100), "from 8 to 256 in steps of 8, not 264"),
        (Case("cuda", torch.bfloat16, 64, 64, capability=H100, deterministic=True), "backward is not deterministic"),
        (Case("cpu", torch.bfloat16, 64, 64), "on cuda, not cpu"),
    ],
)
def test_it_says_what_it_cannot_run(monkeypatch: pytest.MonkeyPatch, case: Case, why: str | None) -> None:
    monkeypatch.setattr(flash4, "_installed_version", lambda: flash4.VERSION)
    refusal = flash4.KERNEL.refusal(case) or ""
    if why is None:
        assert not refusal
    else:
        with pytest.raises(ValueError, match=why):
            raise ValueError(refusal)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("", r"it needs flash-attn-4 4\.0\.0b36: pip install 'torchtitan-cp\[flash4\]'"),
        ("4.0.0b11", r"it needs flash-attn-4 4\.0\.0b36, and 4\.0\.0b11 is installed: pip install"),
    ],
)
def test_another_version_of_the_package_or_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, found: str, message: str
) -> None:
    monkeypatch.setattr(flash4, "_installed_version", lambda: found)
    q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16, device="meta")
    monkeypatch.setitem(KERNELS, "flash4", replace(KERNELS["flash4"], device="meta"))
    with pytest.raises(PlanError, match=f"attention kernel 'flash4' cannot run this: {message}"):
        choose_kernel("flash4", q, q)


def test_a_package_that_cannot_be_imported_says_why_and_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"no library for {name}")

    monkeypatch.setattr(flash4.importlib, "import_module", fail)
    flash4.load_interface.cache_clear()
    wanted = r"flash-attn-4 cannot be imported: no library for flash_attn.cute.interface; pip install 'torchtitan-cp"
    with pytest.raises(PlanError, match=wanted):
        flash4.load_interface()


def test_the_version_is_the_one_that_the_extra_pins() -> None:
    wanted = f'"{flash4.PACKAGE}[cu13]=={flash4.VERSION}; '
    assert wanted in (REPOSITORY / "pyproject.toml").read_text("utf-8")
