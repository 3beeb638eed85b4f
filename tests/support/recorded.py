"""A CUDA graph on the CPU: operations recorded once, and run again on the same memory."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recording(TorchDispatchMode):
    """The operations of a block of code, each with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self._changed: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function._schema.is_mutable:
            self._changed += [(t, t.clone()) for t in tree_leaves(args) if isinstance(t, Tensor)]
        actual = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, actual))
        return actual

    def undo(self) -> None:
        """Restore the memory that the operations changed."""
        for tensor, before in reversed(self._changed):
            tensor.copy_(before)

    def replay(self) -> None:
        """Run them again: each writes its results to the memory of its former results."""
        for function, args, kwargs, former in self.operations:
            if any(item.alias_info is not None for item in function._schema.returns):
                if function._schema.is_mutable:
                    function(*args, **kwargs)
                continue  # a view shows what its base holds now
            results = tree_leaves(function(*args, **kwargs))
            for old, new in zip(tree_leaves(former), results, strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def signature(self) -> Iterator[Any]:
        """Constant in a replay: the operations, their shapes and their numbers."""
        for function, args, kwargs, _ in self.operations:
            yield str(function)
            for leaf in tree_leaves((args, kwargs)):
                yield (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


def record(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Like `record_on_cuda`, which does not run the operations either."""
    with Recording() as recording:
        result = run()
    recording.undo()
    return recording.replay, result
