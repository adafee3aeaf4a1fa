"""Kernels for what a step does, compiled on this machine: the one place that chooses them.

`kernels.cpp` (attention, norms, gates), `products.cpp` (bf16 on processors that multiply its pairs, by matrix tiles or
in vectors), `lanes.cpp` (products on any processor) and `steps.cpp` (whole steps) are compiled once with the machine's
own compiler, for its own processor, and kept in the user's cache. Without a compiler, or with
`MESHWRIGHT_KERNELS=plain`, :func:`kernels` is None, and everything runs as plain PyTorch. The library shares the
threads of PyTorch: both are linked to the OpenMP that PyTorch has loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import POINTER, Structure, addressof, byref, c_float, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch

from meshwright.core.errors import InputError

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.cpp", "products.cpp", "lanes.cpp", "steps.cpp"))
HEADERS = tuple(
    Path(__file__).with_name(name)
    for name in ("kernels.hpp", "lanes.hpp", "chunks.hpp", "attention.hpp", "products.hpp")
)
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared")
FLAGS_OF_X86 = ("-mprefer-vector-width=512",)
COMPILE_S = 120
"""A compiler that takes longer is given up."""
SWITCH = "MESHWRIGHT_KERNELS"
"""Environment variable: set to `plain` to serve without compiled kernels."""
PLAIN = "plain"
TILE, PANEL = 16, 32
"""Rows of a tile; outputs of a panel, and inputs of a pair of tiles."""
PAGE_BYTES = 2**21
ARENA_BYTES = 2**26
"""Asked of the system at once: so much is never what another tensor has left."""
LINE = 64
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class _Shape(Structure):
    _fields_ = [(name, c_long) for name in ("heads", "kv_heads", "dim", "block_size")]


_ARRAYS = ("cos", "sin", "slots", "rows", "contexts", "firsts", "chunks", "wanted", "blocks")


class _Step(Structure):
    _fields_ = [
        *((name, c_void_p) for name in _ARRAYS),
        *((name, c_long) for name in ("num_tokens", "num_rows", "num_chunks", "num_wanted")),
        ("shape", _Shape),
        ("threads", c_long),
    ]


class NativeStep:
    """What the kernels need of a step beside its tensors, made once for all layers.

    Args:
        rotary: cos [T, 1, d] and sin [T, 1, d/2], fp32; None: positions do not turn.
        slots: [T] of the cache, where each token's keys and values go.
        rows: [n] tokens that are alone of their sequence.
        contexts: [n] tokens that each looks at, itself included.
        firsts: [n] where its blocks begin in `blocks`.
        chunks: [m, 4] of several tokens: first row, rows, tokens that the last row looks at, where its blocks begin.
        wanted: [w] rows whose logits are wanted.
        blocks: of the cache. All are int64.
        shape: query heads, key/value heads, head dim, block size.
    """

    def __init__(
        self,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        slots: torch.Tensor,
        rows: torch.Tensor,
        contexts: torch.Tensor,
        firsts: torch.Tensor,
        chunks: torch.Tensor,
        wanted: torch.Tensor,
        blocks: torch.Tensor,
        shape: tuple[int, int, int, int],
    ) -> None:
        cos, sin = rotary or (None, None)
        self._kept = cos, sin, slots, rows, contexts, firsts, chunks, wanted, blocks  # they outlive the pointers
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in self._kept]
        sizes = (len(kept) for kept in (slots, rows, chunks, wanted))
        self.c = _Step(*pointers, *sizes, _Shape(*shape), torch.get_num_threads())
        self.num_wanted = len(wanted)
        self.reference = byref(self.c)


class Kernels:
    """The compiled kernels. Tensors are on the CPU, fp32 or bf16, and contiguous in their last dimension."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer = c_void_p
        attention = [POINTER(_Step), pointer, pointer, pointer, c_long, c_long, c_long, pointer, pointer, pointer]
        norm = [pointer, pointer, pointer, c_long, c_long, c_float, c_long]
        gated = [pointer, pointer, pointer, c_long, c_long, c_long, c_long]
        self._attention = _by_dtype(library, "attention", attention)
        self._norm = _by_dtype(library, "norm", norm)
        self._gated = _by_dtype(library, "gated", gated)
        self._largest = library.largest_float32
        self._largest.argtypes, self._largest.restype = [pointer, pointer, pointer, c_long, c_long, c_long], None
        self._product = library.product
        self._product.argtypes = [pointer, pointer, pointer, pointer, pointer, c_long, c_long, c_long, c_long]
        self._product.restype = None
        self._lays_out = library.product_lays_out
        self._lays_out.argtypes = [c_long]
        self.has_tiles = bool(library.product_usable())
        """Whether :meth:`product` can be used: by matrix tiles, or in vectors of pairs."""
        self.lanes_panel = int(library.lanes_panel())
        """Outputs of a panel of a weight for :meth:`lanes_product`."""
        self._lanes_product = _by_dtype(library, "lanes_product", [*[pointer] * 5, *[c_long] * 4])
        self._stack_room, self._stack_run = library.stack_room, library.stack_run
        self._stack_room.argtypes, self._stack_room.restype = [pointer, POINTER(_Step)], c_long
        self._stack_run.argtypes, self._stack_run.restype = [pointer, POINTER(_Step), pointer, pointer, pointer], None

    def attention(
        self,
        step: NativeStep,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Turn queries and keys to their positions in place, write the cache, attend.

        Args:
            q: [T, a·d]; k and v: [T, g·d].
            keys: the layer's cache [slots, g, d], and values.
            out: [T, a·d], written.
        """
        self._attention[q.dtype](
            step.reference, q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0), v.stride(0),
            keys.data_ptr(), values.data_ptr(), out.data_ptr(),
        )  # fmt: skip

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x²) + eps) · weight over the last dim [.., n]."""
        x = x.contiguous()
        out, size = torch.empty_like(x), x.shape[-1]
        self._norm[x.dtype](
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps, torch.get_num_threads()
        )
        return out

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) · up of two halves [1, T, f] of the same rows."""
        assert gate.stride(-2) == up.stride(-2)
        size = gate.shape[-1]
        out = gate.new_empty(gate.shape)
        self._gated[gate.dtype](
            gate.data_ptr(), up.data_ptr(), out.data_ptr(), out.numel() // size, size, gate.stride(-2),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each row [n, V], fp32: the largest value [n], not-a-number where one is in it, and its first place."""
        logits = logits.contiguous()
        values, places = logits.new_empty(len(logits)), logits.new_empty(len(logits), dtype=torch.int64)
        self._largest(logits.data_ptr(), values.data_ptr(), places.data_ptr(), *logits.shape, torch.get_num_threads())
        return values, places

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_outputs: int
    ) -> torch.Tensor:
        """x [.., in] · Wᵀ + b, [.., out], all bf16 but the bias.

        Args:
            weight: as :func:`in_tiles` lays it out.
            bias: fp32, as long as whole panels.
        """
        x = x.contiguous()
        size = x.shape[-1]
        num_rows = x.numel() // size
        tiles = x.new_empty(-(-num_rows // TILE) * TILE * size) if self._lays_out(num_rows) else None
        out = x.new_empty(*x.shape[:-1], num_outputs)
        self._product(
            x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
            None if tiles is None else tiles.data_ptr(), num_rows, size, num_outputs, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def lanes_product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_outputs: int
    ) -> torch.Tensor:
        """x [.., in] · Wᵀ + b, [.., out], in the dtype of x.

        Args:
            weight: as :func:`in_lanes` lays it out.
            bias: fp32, as long as whole panels.
        """
        x = x.contiguous()
        size = x.shape[-1]
        room = None if x.dtype == torch.float32 else torch.empty(x.numel())
        out = x.new_empty(*x.shape[:-1], num_outputs)
        self._lanes_product[x.dtype](
            x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
            None if room is None else room.data_ptr(), x.numel() // size, size, num_outputs, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def stack_room_bytes(self, stack: Structure, step: NativeStep) -> int:
        """Bytes of the room that :meth:`run_stack` needs for a step."""
        return int(self._stack_room(addressof(stack), step.reference))

    def run_stack(
        self, stack: Structure, step: NativeStep, tokens: torch.Tensor, logits: torch.Tensor, room: torch.Tensor
    ) -> None:
        """A step from the embedding to the logits.

        Args:
            stack: of :mod:`meshwright.serve.stack`.
            tokens: [T], int64, all of the vocabulary.
            logits: [W, V] of the wanted rows, fp32, written.
            room: as many bytes as :meth:`stack_room_bytes` says.
        """
        self._stack_run(addressof(stack), step.reference, tokens.data_ptr(), logits.data_ptr(), room.data_ptr())


class LargePages:
    """Memory for weights, in pages of 2 MiB where the system gives them: a step looks up few addresses then, and the
    processor reads ahead beyond 4 KiB. What is taken lies behind each other, so that little is left unused."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, weight: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of a weight on the CPU."""
        num_bytes = weight.numel() * weight.itemsize
        if num_bytes > len(self._left):
            self._left = _pages(max(num_bytes, ARENA_BYTES))
        own = self._left[:num_bytes].view(weight.dtype).view(weight.shape)
        self._left = self._left[-(-num_bytes // LINE) * LINE :]
        return own.copy_(weight)


def _pages(num_bytes: int) -> torch.Tensor:
    """Untouched memory that begins with a large page."""
    room = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8)
    own = room[-room.data_ptr() % PAGE_BYTES :][:num_bytes]
    with suppress(AttributeError, OSError):  # a system without such pages
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [c_void_p, ctypes.c_size_t, ctypes.c_int]
        advise(own.data_ptr(), num_bytes // PAGE_BYTES * PAGE_BYTES, mmap.MADV_HUGEPAGE)
    return own


def in_tiles(weight: torch.Tensor, pages: LargePages | None = None) -> torch.Tensor:
    """A weight [out, in], bf16, as `products.cpp` reads it: panels of 32 outputs, the last one filled with zeros.

    `in` is a multiple of 32.
    """
    missing = -len(weight) % PANEL
    if missing:
        weight = torch.cat([weight, weight.new_zeros(missing, weight.shape[1])])
    tiles = weight.view(-1, 2, TILE, weight.shape[1] // PANEL, TILE, 2).permute(0, 3, 1, 4, 2, 5)
    return (pages or LargePages()).take(tiles)


def in_lanes(weight: torch.Tensor, panel: int, pages: LargePages | None = None) -> torch.Tensor:
    """A weight [out, in] as `lanes.hpp` reads it: panels of outputs [in, panel], the last one filled with zeros."""
    missing = -len(weight) % panel
    if missing:
        weight = torch.cat([weight, weight.new_zeros(missing, weight.shape[1])])
    return (pages or LargePages()).take(weight.unflatten(0, (-1, panel)).transpose(1, 2))


def _by_dtype(library: ctypes.CDLL, name: str, arguments: Sequence[object]) -> dict[torch.dtype, Callable[..., None]]:
    found = {}
    for dtype, suffix in NAMES.items():
        function = getattr(library, f"{name}_{suffix}")
        function.argtypes, function.restype = list(arguments), None
        found[dtype] = function
    return found


def kernels() -> Kernels | None:
    """The compiled kernels; None where they are switched off, or cannot be had. InputError: a switch that is none."""
    return None if _is_off() else _load()


def _is_off() -> bool:
    """Whether plain PyTorch was asked for."""
    value = os.environ.get(SWITCH, "")
    if value not in ("", PLAIN):
        raise InputError(f"{SWITCH}={value}: set it to `{PLAIN}` to serve without compiled kernels, or unset it")
    return value == PLAIN


def why_plain() -> str | None:
    """Why there are no kernels although nobody switched them off; None: they are there, or were switched off."""
    if _is_off() or _load() is not None:
        return None
    compiler = _compiler()
    if compiler is None:
        return f"no compiler ({', '.join(COMPILERS)}) was found"
    return f"{compiler} did not compile them, or the user's cache ($XDG_CACHE_HOME, ~/.cache) cannot keep them"


def _compiler() -> str | None:
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


@cache
def _load() -> Kernels | None:
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        return Kernels(ctypes.CDLL(str(_compiled(compiler))))
    except (OSError, subprocess.SubprocessError, AttributeError, RuntimeError):
        return (
            None  # no compiler that works, a library without the functions, no home, or nowhere to keep what it makes
        )


def _compiled(compiler: str) -> Path:
    """The library, compiled if this processor has none yet. Ranks that compile at once do not disturb each other."""
    flags = [*FLAGS, *(FLAGS_OF_X86 if platform.machine() in ("x86_64", "AMD64") else ())]
    key = "\n".join(
        [
            *(source.read_text() for source in (*HEADERS, *SOURCES)),
            compiler,
            *flags,
            platform.machine(),
            _processor(),
            torch.__version__,
        ]
    )
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"
    library = folder / f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            out = Path(made) / library.name
            command = [compiler, *flags, *map(str, SOURCES), "-o", str(out)]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
            os.replace(out, library)
    return library


def _processor() -> str:
    """What tells processors apart that need other instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
