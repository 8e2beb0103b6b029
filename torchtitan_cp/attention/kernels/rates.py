"""How fast attention kernels are on each generation of GPUs: `auto` chooses by it, and the planner counts with it."""

from typing import NamedTuple

WIDE = 1 << 16  # any head dim


class Rate(NamedTuple):
    """Fractions of the dense 16-bit peak that a kernel reaches.

    Attributes:
        capability: major compute capability: 8 (A100), 9 (H100, H200), 10 (B200).
        kernel: its name.
        head_dim: the wider of Dqk and Dv, up to which the rate holds.
        dense: of full and causal tiles (True), of windows and packed documents (False), or of both (None).
        forward, backward: the fractions.
    """

    capability: int
    kernel: str
    head_dim: int
    dense: bool | None
    forward: float
    backward: float


# Only what was measured or published, where no source is named assumed before. A kernel without a rate is chosen after
# those that have one. Head dim 128 stands for narrower heads too.
#
# flash and cudnn on 9: measured on an H100 in tiles of a ring at head dim 128 (docs/cuda.md): 325 to 347 TFLOP/s
# forward and 300 to 320 backward, 562 to 598 and 537 to 548. ATen's flash is FlashAttention-2, made for 8.0, where it
# reaches the fractions of the FlashAttention-3 paper (Shah et al., 2024, figure 5), and cuDNN is no faster
# (transformers PR 48163). On 10 both are ASSUMED to gain little over Hopper; on a B200 a step was 12 % faster with
# cuDNN (torchtitan PR 1196). cuDNN needs about a second to build a plan for every new length and has no window, so it
# has no rate for packed documents and windows. efficient up to 256 dims is ASSUMED to be as fast as flash.
#
# flash4 on 9: a packed document of 86,000 tokens with 32 heads took 88.9 ms forward and 246.3 backward on an H200 at
# head dim 128, and 166.2 forward at 256 (flash-attention issue 2878): 682, 615 and 729 TFLOP/s of a causal mask, as all
# pairs would exceed the peak. At 256 its backward reaches 373 since PR 2888 (PR 2889). Beside FlashAttention-2 on one
# Hopper GPU, forward and backward took 74.1 ms instead of 142.3 (ecmwf/anemoi-core PR 959). On 10: 1,388 and 1,081
# TFLOP/s for packed causal sequences of 8,192 at 128 (PR 2150), and as much with a window (PR 2046). A window on 9 is
# ASSUMED to cost as little. Nobody has published it beside cuDNN on one Hopper GPU, so it has no rate for dense tiles.
#
# efficient beyond 256, by the tables of ffpa-attn (docs/bench/README.md of xlite-dev/ffpa-attn, 2026): on an H200 119
# to 135 TFLOP/s forward and 42 to 47 backward at 512, on a B200 172 and 49, and on an L20, whose processor is nearest
# to an A100's there, half and a quarter of the peak.
RATES = (
    Rate(8, "flash", 256, None, 0.62, 0.52),
    Rate(8, "efficient", 256, None, 0.62, 0.52),
    Rate(8, "efficient", WIDE, None, 0.49, 0.25),
    Rate(9, "flash", 256, None, 0.34, 0.32),
    Rate(9, "cudnn", 128, True, 0.59, 0.54),
    Rate(9, "flash4", 128, False, 0.69, 0.62),
    Rate(9, "flash4", 256, False, 0.73, 0.37),
    Rate(9, "efficient", 256, None, 0.34, 0.32),
    Rate(9, "efficient", WIDE, None, 0.13, 0.045),
    Rate(10, "flash", 256, None, 0.25, 0.20),
    Rate(10, "cudnn", 128, True, 0.45, 0.35),
    Rate(10, "flash4", 128, False, 0.62, 0.48),
    Rate(10, "efficient", 256, None, 0.25, 0.20),
    Rate(10, "efficient", WIDE, None, 0.076, 0.022),
)


def find_rate(kernel: str, capability: tuple[int, int] | None, head_dim: int, dense: bool) -> Rate | None:
    """The rate of a kernel on a GPU of this compute capability, or None.

    Args:
        head_dim: the wider of Dqk and Dv; dense: whether all tiles are full or causal.
    """
    rows = (rate for rate in RATES if capability and (rate.capability, rate.kernel) == (capability[0], kernel))
    return next((rate for rate in rows if head_dim <= rate.head_dim and rate.dense in (None, dense)), None)
