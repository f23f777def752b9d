"""How far memory grows while something runs: the peak of what is allocated and not yet freed, above the start."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_growth(work: Callable[[], Any], device: torch.device) -> int | None:
    """
    Runs `work`, and tells the bytes by which memory on `device` grew at most; what `work` returns is among them.

    Args:
        work (`Callable`): What to run.
        device (`torch.device`): Where: CUDA, by its allocator, or the CPU, by the tensors that live at a time (what a
            kernel allocates and frees within itself is not seen).

    Returns:
        `int`: Bytes; `None` on other devices.
    """
    if device.type == "cuda":
        return _cuda_growth(work, device)
    if device.type != "cpu":
        return None
    with LiveBytes() as live:
        kept = work()
    del kept
    return live.peak


class LiveBytes(TorchDispatchMode):
    """
    Follows the storages of CPU tensors that operations allocate while it is entered, each once however many tensors
    look at it, until it is freed.

    Attributes:
        now (`int`): Bytes of those that live.
        peak (`int`): The most that there were at a time.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}  # bytes, by the storage object's id

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # The result of a view or an in-place operation looks at what was given. `torch.tensor` alone allocates before
        # it dispatches, and then gives what is new.
        given = [] if func is torch.ops.aten.lift_fresh.default else _storages((args, kwargs))
        result = func(*args, **(kwargs or {}))
        old = {id(storage) for storage in given}
        for storage in _storages(result):
            if id(storage) not in old and id(storage) not in self._known:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._known[id(storage)] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, id(storage)).atexit = False

    def _free(self, key: int) -> None:
        self.now -= self._known.pop(key)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    # Subclasses (the weights of a quantized model) have no storage of their own.
    plain = (leaf for leaf in tree_leaves(tree) if type(leaf) in (torch.Tensor, torch.nn.Parameter))
    return [leaf.untyped_storage() for leaf in plain if leaf.device.type == "cpu"]


def _cuda_growth(work: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
