"""Operations without data that torch gives another shape, and what of torch is replaced meanwhile."""

from types import ModuleType

import pytest
import torch
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.attention import flex_attention

from torchtitan_cp.planner.fake import FakeMode, StepTracker, fake_flex, replaced


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


def test_real_tensors_are_made_in_their_context_alone() -> None:
    def makes_fake() -> bool:
        return isinstance(torch.zeros(2), torch._subclasses.FakeTensor)

    mode = FakeMode()
    with mode:
        assert makes_fake()
        with mode.real_tensors():
            assert not makes_fake()
        with pytest.raises(ZeroDivisionError), mode.real_tensors():
            _ = 1 // 0
        assert makes_fake()


def test_what_a_dry_run_replaces_of_torch_is_there_again_behind_it() -> None:
    """`resize_` is inherited: its own attribute is gone."""

    def found() -> list[object]:
        own: list[tuple[type | ModuleType, str]] = [
            (flex_attention, "flex_attention_hop"),
            (flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"),
            (torch.UntypedStorage, "resize_"),
            (ShardingPropagator, "_propagate_tensor_meta_non_cached"),
        ]
        return [vars(owner).get(name) for owner, name in own]

    before = found()
    with fake_flex(), StepTracker().tracking():
        assert all(now is not then for now, then in zip(found(), before, strict=True))
    assert found() == before
    with pytest.raises(ZeroDivisionError), replaced(torch.UntypedStorage, "resize_", None):
        _ = 1 // 0
    assert found() == before
