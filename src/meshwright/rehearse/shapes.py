"""Tensors without values: every operation of PyTorch costs the look-up of its result's shape, and no memory.

    with shapes_only():
        y = model(x)      x on the meta device; autograd, hooks and saved tensors are the real ones

Tensors on other devices are computed as ever.

An operation is run once on the meta device for each combination of its arguments' shapes, strides and dtypes; from then
on its results are made as the first were. Views are always taken, writes in place are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")

_CHANGE_THE_VIEW = ("set_", "resize_", "detach_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_")
"""Write into a tensor's description, not into its memory."""

Run = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]


@contextmanager
def shapes_only() -> Iterator[None]:
    """What runs inside on the meta device costs nothing, and looks at no value."""
    kernels: Any = functional
    attention = kernels.scaled_dot_product_attention
    kernels.scaled_dot_product_attention = _flash_attention
    try:
        with _ShapesMode():
            yield
    finally:
        kernels.scaled_dot_product_attention = attention


def _flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False, **_: object
) -> torch.Tensor:
    """The kernel that devices have, instead of the plain products that the meta device falls back to: it keeps q, k, v,
    its output and the log-sum-exp of the scores, and no score (Dao et al. 2022)."""
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
    kept: torch.Tensor = out
    return kept


class _ShapesMode(TorchDispatchMode):
    """Below autograd: decides per operation what has to be run."""

    def __init__(self) -> None:
        super().__init__()
        self._ways: dict[Any, Run] = {}
        self._known: dict[tuple[Any, ...], Callable[[], Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; the check would import the compiler, and run before each operation."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        way = self._ways.get(func)
        if way is None:
            way = self._ways[func] = self._way(func)
        return way(func, args, kwargs or {})

    def _way(self, func: Any) -> Run:
        schema = func._schema
        name = schema.name.partition("::")[2]
        written = [(at, a.name, a.kwarg_only) for at, a in enumerate(schema.arguments) if _is_written(a)]
        aliases = any(result.alias_info is not None for result in schema.returns)
        if name in _CHANGE_THE_VIEW or not any("Tensor" in str(a.type) for a in schema.arguments):
            return _run
        if written and not schema.returns:
            return _leave_out
        if len(written) == len(schema.returns) == 1:
            at, name, is_named = written[0]
            return _written_named(name) if is_named else _written_at(at)
        return _run if aliases or written else self._remembered

    def _remembered(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        key = (func, *map(_described, args), *((name, _described(value)) for name, value in kwargs.items()))
        make = self._known.get(key)
        if make is not None:
            return make()
        result = func(*args, **kwargs)
        if (again := _maker(result)) is not None:
            self._known[key] = again
        return result


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return func(*args, **kwargs)


def _written_at(at: int) -> Run:
    def way(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return args[at] if args[at].is_meta else func(*args, **kwargs)

    return way


def _written_named(name: str) -> Run:
    def way(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return kwargs[name] if kwargs[name].is_meta else func(*args, **kwargs)

    return way


def _leave_out(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    return None


def _described(value: Any) -> Any:
    """All of an argument that a result's shape depends on."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return value


def _maker(result: Any) -> Callable[[], Any] | None:
    """What makes the same result again; None where it is not of tensors without values alone."""
    if isinstance(result, torch.Tensor):
        if not result.is_meta:
            return None
        shape, stride, dtype = result.shape, result.stride(), result.dtype
        return lambda: torch.empty_strided(shape, stride, dtype=dtype, device=META)
    if not isinstance(result, tuple | list):
        return None
    parts = [None if part is None else _maker(part) for part in result]
    if any(made is None and part is not None for made, part in zip(parts, result, strict=True)):
        return None
    form = type(result)
    return lambda: form(None if make is None else make() for make in parts)
