"""FlashAttention-4 on Hopper and Blackwell, many tiles in one call. No other file knows the package flash-attn-4.

We call two private functions of it, since their backward takes a merged out and log-sum-exp; so one version fits.
Packed rows are `[T, H, D]`, with int32 lengths; the log-sum-exp is `[H, T]`. A window is aligned at the last query and
key of each tile, and only a side of None is unbounded, so there `kind` may drop any side that hides nothing. The
package compiles each kind of call once a process: dims, group size, which sides, packed or not, one block or several.
Source: `_flash_attn_fwd` and `_flash_attn_bwd` of its cute/interface.py.
"""

import importlib
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, cast

from torch import Tensor

from torchtitan_cp.attention.errors import PlanError
from torchtitan_cp.attention.kernels.kernel import HALF, Case, Kernel, ScoreMod, same_dims
from torchtitan_cp.attention.kernels.packed import Packed
from torchtitan_cp.attention.mask import Band

PACKAGE, VERSION = "flash-attn-4", "4.0.0b36"
INSTALL = "pip install 'torchtitan-cp[flash4]'"
HOPPER, BLACKWELL = 9, 10  # major compute capabilities
Window = tuple[int | None, int | None]


def forward(q: Tensor, k: Tensor, v: Tensor, shape: Band | Packed, scores: ScoreMod) -> tuple[Tensor, Tensor]:
    if v.shape[-1] > q.shape[-1]:
        q, k = same_dims(v, q, k)[1:]  # the package sizes its blocks by Dqk
    out, lse, *_ = load_interface()._flash_attn_fwd(
        q, k, v, softmax_scale=scores.scale, softcap=scores.softcap, return_lse=True, **_arguments(q, k, shape)
    )
    return out, lse.mT


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, shape: Band | Packed, scores: ScoreMod
) -> tuple[Tensor, Tensor, Tensor]:
    interface, qk_dim, v_dim = load_interface(), q.shape[-1], v.shape[-1]
    # On Hopper the backward of grouped heads needs Dqk = Dv (FlashAttentionBackwardSm90).
    grouped_on_hopper = q.shape[-2] != k.shape[-2] and interface._get_device_arch() // 10 == HOPPER
    if v_dim > qk_dim or (v_dim < qk_dim and grouped_on_hopper):
        dout, q, k, v, out = same_dims(dout, q, k, v, out)
    # Broadcast strides would be another kind of call.
    rows = (q, k, v, out.contiguous(), dout.contiguous(), lse.mT.contiguous())
    dq, dk, dv = interface._flash_attn_bwd(
        *rows, softmax_scale=scores.scale, softcap=scores.softcap, **_arguments(q, k, shape)
    )
    return dq.narrow(-1, 0, qk_dim), dk.narrow(-1, 0, qk_dim), dv.narrow(-1, 0, v_dim)


def _arguments(q: Tensor, k: Tensor, shape: Band | Packed) -> dict[str, Any]:
    """Window and lengths of a single tile, whose rows have a batch dim, or of packed tiles.

    The package does not need the longest lengths, and would compile again where all tiles are shorter than a block.
    """
    if isinstance(shape, Packed):
        left, right = cast(Window, shape.kind)
        lengths = {"cu_seqlens_q": shape.cu_seqlens_q, "cu_seqlens_k": shape.cu_seqlens_k}
        return {"window_size_left": left, "window_size_right": right, **lengths}
    left, right = kind(q.shape[1], k.shape[1], shape)
    return {"window_size_left": left, "window_size_right": right}


def kind(queries: int, keys: int, band: Band) -> Window:
    """A band as the package's (left, right) window, aligned at the last query and key, without sides that hide nothing.

    So tiles that a window does not reach share the kernel, and the call, of full tiles.
    """
    low, high = band.shifted(0, queries, keys)
    corner = keys - queries
    return None if low is None else corner - low, None if high is None else high - corner


def takes_band(queries: int, keys: int, band: Band) -> bool:
    """Whether one call computes this band: the package takes two negative sides for unbounded ones."""
    return all(side is None or side >= 0 for side in kind(queries, keys, band))


def missing() -> str:
    """What this environment lacks and how to install it, or ""."""
    found = _installed_version()
    if found == VERSION:
        return ""
    instead = f", and {found} is installed" if found else ""
    return f"it needs {PACKAGE} {VERSION}{instead}: {INSTALL}"


@lru_cache(maxsize=1)
def _installed_version() -> str:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return ""


@lru_cache(maxsize=1)
def load_interface() -> ModuleType:
    """The module of the package that has the two functions; its import takes seconds.

    Raises:
        PlanError: it cannot be imported.
    """
    try:
        return importlib.import_module("flash_attn.cute.interface")
    except ImportError as error:
        raise PlanError(f"{PACKAGE} cannot be imported: {error}", fix=INSTALL) from error


def _refuses(case: Case) -> str | None:
    """Hopper takes head dims up to 256; Blackwell up to 128, and two pairs that have kernels of their own."""
    if case.capability and case.capability[0] not in (HOPPER, BLACKWELL):
        return "it is made for compute capability 9 and 10 (H100, H200, B200), not {}.{}".format(*case.capability)
    dims = (case.qk_dim, case.v_dim)
    if case.capability and case.capability[0] == BLACKWELL and max(dims) > 128 and dims != (192, 128):
        if dims != (256, 256):
            return "on Blackwell it takes head dims up to 128, 192 with 128, and 256, not {} with {}".format(*dims)
        if case.softcap or not case.dense:  # BlackwellFusedMultiHeadAttentionBackward
            return "on Blackwell its backward at head dim 256 has no window and no soft-cap"
    return None


KERNEL = Kernel(
    forward,
    backward,
    "cuda",
    HALF,
    range(8, 257, 8),
    takes_band=takes_band,
    kind=kind,
    has_softcap=True,
    deterministic=False,  # its flag has no packed form that compiles without a device, and none is tested
    refuses=_refuses,
    missing=missing,
)
