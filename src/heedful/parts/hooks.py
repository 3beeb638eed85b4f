"""Hooks on modules, which kernels that compute several modules at once would leave out."""

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """True if a module has forward hooks or forward pre-hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_any_hooks(module: nn.Module) -> bool:
    """True if a module has hooks of its forward or its backward pass."""
    return has_hooks(module) or bool(module._backward_hooks or module._backward_pre_hooks)
