"""Hugging Face checkpoints in and out: `safetensors` files beside a `config.json`.

A rank reads only the boxes that it holds: :class:`HFCheckpoint` slices the files on disk.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from meshwright.core.errors import CheckpointError, MeshwrightWarning
from meshwright.core.hf_config import to_hf_config
from meshwright.core.model import ModelSpec, ParamSpec
from meshwright.core.placement import Box
from meshwright.core.values import writing
from meshwright.models.decoder import Decoder
from meshwright.models.hf_names import Source, name_map

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_TIED_HEAD = "lm_head.weight"


class HFCheckpoint:
    """A folder of `safetensors` files, opened to read boxes of `spec`'s parameters. A context manager.

    Raises:
        CheckpointError: nothing to read there, a missing or damaged file, or tensors of another model.
        UnsupportedError: a family without a name map.
    """

    def __init__(self, folder: Path | str, spec: ModelSpec) -> None:
        self.folder = Path(folder)
        self.spec = spec
        self._sources = name_map(spec).sources(spec)
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}
        try:
            self._where = self._find_tensors()
            self._prefix = self._find_prefix()
            self._check_strangers()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def read(self, param: ParamSpec, box: Box) -> torch.Tensor:
        """`box` of `param`, in the dtype of the file, on the CPU. Reads no more than that from disk."""
        source = self._sources[param.name]
        if source.is_by_expert:
            return self._read_experts(param, source, box)
        return self._read(param, source, box)

    def _read_experts(self, param: ParamSpec, source: Source, box: Box) -> torch.Tensor:
        """Of each expert within `box` its part."""
        one = replace(param, shape=param.shape[1:], dims=param.dims[1:])
        part = Box(box.offsets[1:], box.sizes[1:])
        numbers = range(box.offsets[0], box.offsets[0] + box.sizes[0])
        return torch.stack([self._read(one, source.of_expert(number), part) for number in numbers])

    def _read(self, param: ParamSpec, source: Source, box: Box) -> torch.Tensor:
        name = self._name(param, source)
        path = self._where[name]
        data = self._open(path).get_slice(name)
        found, wanted = tuple(data.get_shape()), source.shape(param)
        if found != wanted:
            raise CheckpointError(
                f"{path}: tensor `{name}` is {list(found)}, but `{self.spec.name}` needs {list(wanted)}; "
                "the checkpoint is of another model"
            )
        try:
            values = data[source.slices(param, box)]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor `{name}` cannot be read: {error}") from None
        return values.t() if source.transposed else values

    def _name(self, param: ParamSpec, source: Source) -> str:
        name = source.name.replace("{prefix}", self._prefix)
        if name in self._where:
            return name
        if self.spec.tied_embeddings and param.name == "embedding.weight" and _TIED_HEAD in self._where:
            return _TIED_HEAD
        raise CheckpointError(f"{self.folder}: no tensor `{name}`, which `{self.spec.name}` needs for `{param.name}`")

    def _find_tensors(self) -> dict[str, Path]:
        """Tensor name → file."""
        index = self.folder / INDEX_FILE
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                return {name: self.folder / file for name, file in weight_map.items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                raise CheckpointError(f"{index}: not an index of safetensors files; fetch it again") from None
        single = self.folder / SINGLE_FILE
        if single.is_file():
            return dict.fromkeys(self._open(single).keys(), single)
        hint = "; convert it to safetensors first" if any(self.folder.glob("*.bin")) else ""
        raise CheckpointError(f"{self.folder}: neither `{SINGLE_FILE}` nor `{INDEX_FILE}` is there{hint}")

    def _find_prefix(self) -> str:
        prefixes = name_map(self.spec).prefixes
        final = self._sources["final_norm.weight"].name
        for prefix in prefixes:
            if final.replace("{prefix}", prefix) in self._where:
                return prefix
        return prefixes[0]

    def _check_strangers(self) -> None:
        """Refuse a checkpoint with weights that the model would leave out, such as further layers."""
        params = (*self.spec.parameters(), *self.spec.router_biases())
        names = (name for param in params for name in self._sources[param.name].names(param))
        known = {name.replace("{prefix}", self._prefix) for name in names}
        if self.spec.tied_embeddings:
            known.add(_TIED_HEAD)
        names_of = name_map(self.spec)
        ignored, further = names_of.ignored, self._further_layers() if names_of.skips_further_layers else frozenset()
        strangers = sorted(n for n in self._where if n not in known and n not in further and not n.endswith(ignored))
        if strangers:
            raise CheckpointError(
                f"{self.folder}: {len(strangers)} tensors have no place in `{self.spec.name}`, for instance "
                f"`{strangers[0]}`; the checkpoint is of another model"
            )

    def _further_layers(self) -> frozenset[str]:
        """Names of tensors of layers behind the last, which the model has no use for; says so."""
        found = re.compile(rf"{re.escape(self._prefix)}layers\.(\d+)\.")
        numbers = {name: int(at[1]) for name in self._where if (at := found.match(name))}
        further = {name for name, layer in numbers.items() if layer >= self.spec.num_layers}
        if further:
            warnings.warn(
                f"{self.folder}: {len(further)} tensors of layers from {self.spec.num_layers} on are left out: they "
                "predict further tokens in training, and are no part of the model",
                MeshwrightWarning,
                stacklevel=2,
            )
        return frozenset(further)

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            except FileNotFoundError:
                raise CheckpointError(f"{path}: the index names this file, but it is missing") from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: damaged or truncated ({error}); fetch it again") from None
        return self._files[path]


@torch.no_grad()
def load(model: Decoder, folder: Path | str) -> None:
    """Fill a plain model that has storage, in place and in its own dtype. Raises CheckpointError."""
    parameters = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    with HFCheckpoint(folder, model.spec) as checkpoint:
        for param in (*model.spec.parameters(), *model.spec.router_biases()):
            parameters[param.name].copy_(checkpoint.read(param, Box.whole(param.shape)))


def export(
    folder: Path | str,
    spec: ModelSpec,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    extra_files: Mapping[str, bytes] | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a checkpoint that `transformers` loads: all of it, or nothing.

    Args:
        folder: where to; must not exist yet, or be empty.
        spec: the model's shape.
        tensors: (our name, whole parameter), each parameter and router bias of `spec` once, in any order; consumed one
            by one, so that no more than about one file's worth is held.
        extra_files: further files by name, such as `tokenizer.json`.
        max_shard_bytes: size at which a further file is begun.

    Raises:
        InputError: the folder cannot be made.
        CheckpointError: the folder is in use; a parameter is missing, unknown, given twice or misshapen.
        UnsupportedError: the family cannot be written.
    """
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder}: already exists and is not an empty folder; name another one")
    config = to_hf_config(spec)
    with _staged(folder) as staging:
        writer = _Writer(staging, max_shard_bytes)
        for name, tensor in _to_hf(spec, tensors):
            writer.add(name, tensor)
        writer.finish()
        config["torch_dtype"] = str(writer.dtype).removeprefix("torch.")
        (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name, content in (extra_files or {}).items():
            (staging / name).write_bytes(content)


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` that takes its place on success and vanishes on failure."""
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield staging
        staging.chmod(0o755)
        staging.rename(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _to_hf(spec: ModelSpec, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """(their name, their tensor), as soon as all its blocks have come."""
    names = name_map(spec)
    sources = names.sources(spec)
    wanted = {param.name: param for param in (*spec.parameters(), *spec.router_biases())}
    blocks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors:
        param = wanted.pop(name, None)
        if param is None:
            raise CheckpointError(f"`{name}` is not a parameter of `{spec.name}`, or was given twice")
        if tuple(tensor.shape) != param.shape:
            raise CheckpointError(f"`{name}` is {list(tensor.shape)}, but `{spec.name}` has {list(param.shape)}")
        source = sources[name]
        if source.is_by_expert:
            each = (name.replace("{prefix}", names.prefixes[0]) for name in source.names(param))
            yield from ((theirs, one.clone()) for theirs, one in zip(each, tensor.detach().to("cpu"), strict=True))
            continue
        theirs = source.name.replace("{prefix}", names.prefixes[0])
        parts = blocks.setdefault(theirs, {})
        parts[source.block] = tensor.detach().to("cpu")
        if len(parts) == source.num_blocks:
            del blocks[theirs]
            whole = torch.cat([parts[block] for block in sorted(parts)])
            yield theirs, whole.t().contiguous() if source.transposed else whole
    if wanted:
        raise CheckpointError(f"{len(wanted)} parameters of `{spec.name}` are missing, first `{next(iter(wanted))}`")


class _Writer:
    """Numbered `safetensors` files of bounded size, and their index."""

    def __init__(self, folder: Path, max_shard_bytes: int) -> None:
        self.dtype: torch.dtype | None = None
        self._folder = folder
        self._max_shard_bytes = max_shard_bytes
        self._open: dict[str, torch.Tensor] = {}
        self._open_bytes = 0
        self._written: list[tuple[Path, list[str]]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._open and self._open_bytes + tensor.nbytes > self._max_shard_bytes:
            self._close()
        self.dtype = self.dtype or tensor.dtype
        self._open[name] = tensor
        self._open_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def _close(self) -> None:
        path = self._folder / f"part-{len(self._written)}"
        save_file(self._open, path, metadata={"format": "pt"})
        self._written.append((path, list(self._open)))
        self._open, self._open_bytes = {}, 0

    def finish(self) -> None:
        """Give the files their final names, now that their number is known."""
        self._close()
        if len(self._written) == 1:
            self._written[0][0].rename(self._folder / SINGLE_FILE)
            return
        weight_map = {}
        for number, (path, names) in enumerate(self._written, start=1):
            file = f"model-{number:05d}-of-{len(self._written):05d}.safetensors"
            path.rename(self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
