"""What each kernel says that it cannot run."""

import pytest
import torch

from torchtitan_cp.attention.kernels import KERNELS, flash4
from torchtitan_cp.attention.kernels.kernel import Case

CASES = {
    "cpu": [(Case("cpu", torch.bfloat16, 64, 128), None), (Case("cuda", torch.float32, 64, 64), "on cpu, not cuda")],
    "flash": [
        (Case("cuda", torch.bfloat16, 256, 64), None),
        (Case("cuda", torch.float32, 64, 64), "not torch.float32"),
        (Case("cuda", torch.float16, 60, 64), None),
        (Case("cuda", torch.float16, 60, 60), "from 8 to 256 in steps of 8, not 60"),
        (Case("cpu", torch.bfloat16, 64, 64), "on cuda, not cpu"),
    ],
    "flash4": [
        (Case("cuda", torch.bfloat16, 256, 64), None),
        (Case("cuda", torch.bfloat16, 128, 128, deterministic=True), "its backward is not deterministic"),
        (Case("cuda", torch.bfloat16, 128, 128, capability=(8, 6)), "compute capability 9 and 10 (H100, H200, B200)"),
    ],
    "cudnn": [
        (Case("cuda", torch.bfloat16, 128, 64), None),
        (Case("cuda", torch.bfloat16, 192, 128), "from 8 to 128 in steps of 8, not 192 and 128"),
    ],
    "efficient": [
        (Case("cuda", torch.float32, 192, 128), None),
        (Case("cuda", torch.float64, 64, 64), "not torch.float64"),
    ],
    "flex": [
        (Case("cuda", torch.bfloat16, 64, 64), None),
        (Case("cpu", torch.float32, 64, 64), "on cuda, not cpu"),
    ],
    "reference": [
        (Case("cuda", torch.float64, 3, 5), None),
        (Case("cpu", torch.int64, 8, 8), "or torch.float16, not torch.int64"),
    ],
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_says_what_it_cannot_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash4, "_installed_version", lambda: flash4.VERSION)
    for case, reason in CASES[name]:
        refusal = KERNELS[name].refusal(case)
        assert (refusal is None) if reason is None else (refusal is not None and reason in refusal), case
