"""Operations without data that torch gives another shape."""

import pytest
import torch

from torchtitan_cp.planner.fake import FakeMode


@pytest.mark.parametrize(
    ("a", "b", "grouped"), [((12, 4), (3, 4, 8), 12), ((4, 12), (12, 8), 12), ((3, 8, 4), (3, 4, 16), 0)]
)
def test_a_grouped_product_without_data_has_the_shape_of_the_real_one(
    a: tuple[int, ...], b: tuple[int, ...], grouped: int
) -> None:
    def product() -> torch.Tensor:
        ends = torch.tensor([2, 7, grouped], dtype=torch.int32) if grouped else None
        return torch._grouped_mm(torch.randn(a), torch.randn(b), offs=ends)

    with FakeMode(allow_non_fake_inputs=True):
        fake = product()
    real = product()
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
