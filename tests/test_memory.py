"""Peak memory on a CPU: bytes of tensors that live at a time, above the start. An fp32 number has 4 bytes."""

import pytest
import torch

from hf_mot.evaluation.memory import LiveBytes, peak_growth

CPU = torch.device("cpu")


def test_peak_is_the_most_that_lives_at_a_time():
    def work():
        first = torch.zeros(1000)
        second = torch.ones(5000)
        del second
        return first, torch.zeros(2000)  # 3000 now, 6000 before

    assert peak_growth(work, CPU) == 4 * 6000


def test_what_is_freed_in_inner_calls_is_free_again():
    def inner(depth):
        own = torch.zeros(100)
        return own.sum() if depth == 0 else inner(depth - 1)

    def work():
        for _ in range(5):
            inner(3)

    assert peak_growth(work, CPU) == 4 * (4 * 100 + 1)


def test_what_was_there_before_does_not_count_even_when_it_is_freed():
    held = [torch.zeros(10_000)]

    def work():
        held[0].t().view(100, 100)[3:]
        held.clear()
        return torch.zeros(7)

    assert peak_growth(work, CPU) == 4 * 7


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x[2:].view(2, -1).transpose(0, 1),
        lambda x: x.add_(1).mul_(2).clamp_(0),
        lambda x: x.copy_(x),
        lambda x: x.split(10),
        lambda x: x.detach().requires_grad_(False),
    ],
)
def test_views_and_operations_in_place_count_nothing(operation):
    x = torch.zeros(1000)
    assert peak_growth(lambda: operation(x), CPU) == 0
    assert peak_growth(lambda: operation(torch.zeros(1000)), CPU) == 4 * 1000


def test_a_view_keeps_its_whole_storage_alive():
    with LiveBytes() as live:
        view = torch.zeros(1000)[:3]
        assert live.now == 4 * 1000
        del view
        assert live.now == 0
        kept = torch.tensor([1.0, 2.0])
        assert live.now == 4 * 2
    del kept
    assert (live.now, live.peak) == (0, 4 * 1000)


class Wrapper(torch.Tensor):
    """As quantized weights are: it stands for a tensor, and has no storage."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(arg.inner if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


def test_weights_without_a_storage_do_not_disturb():
    weight, x = Wrapper(torch.ones(10, 10)), torch.zeros(3, 10)
    assert peak_growth(lambda: x @ weight, CPU) == 4 * 30


def test_other_devices_tell_nothing():
    assert peak_growth(lambda: torch.zeros(3, device="meta"), torch.device("meta")) is None
