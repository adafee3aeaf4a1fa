"""Where text comes from: files through `datasets`, or the running Python's standard library.

    source.documents()  ->  one str per document
    .txt .py ... file: one document | JSONL, Parquet: one per row, column "text"

Files are streamed: nothing is copied into a cache, and nothing is asked of the network.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from meshwright.core.errors import InputError

_TEXT_SUFFIXES = ".txt .md .rst .tex .html .py .pyi .c .cc .cpp .h .hpp .java .js .ts .css .go .rs .sh .sql .toml .yaml"
TEXT_SUFFIXES = frozenset(_TEXT_SUFFIXES.split())
JSON_SUFFIXES = frozenset((".jsonl", ".ndjson", ".json"))
PARQUET_SUFFIXES = frozenset((".parquet", ".pq"))
MAX_TEXT_FILE_BYTES = 2**30
"""A text file is one document and is held in memory whole."""

_SKIPPED_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data")
)


class TextSource(Protocol):
    """Something that yields documents, the same ones in the same order every time."""

    def describe(self) -> str:
        """Short name, for messages and run folders."""

    def fingerprint(self) -> str:
        """Changes where the text changes."""

    def documents(self) -> Iterator[str]:
        """One str per document. Raises InputError."""


@dataclass(frozen=True, slots=True)
class StandardLibrary:
    """Source code of the running Python's standard library: real text that every machine has."""

    max_bytes: int = 4_000_000

    def describe(self) -> str:
        """`standard library of Python 3.11.4`"""
        return f"standard library of Python {sys.version.split()[0]}"

    def fingerprint(self) -> str:
        """Hash of the documents."""
        digest = hashlib.sha256()
        for text in self.documents():
            digest.update(text.encode() + b"\0")
        return digest.hexdigest()

    def documents(self) -> Iterator[str]:
        """One document per module, in the order of the sorted paths."""
        return stdlib_texts(self.max_bytes)


@dataclass(frozen=True, slots=True)
class TextFiles:
    """A text, JSONL or Parquet file, or a folder of such files (sorted, hidden ones left out)."""

    path: Path

    def describe(self) -> str:
        """The path."""
        return str(self.path)

    def fingerprint(self) -> str:
        """Hash of the files' names and contents."""
        digest = hashlib.sha256()
        for file in self.files():
            name = file.name if self.path.is_file() else file.relative_to(self.path).as_posix()
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as handle:
                digest.update(hashlib.file_digest(handle, "sha256").digest())
        return digest.hexdigest()

    def files(self) -> list[Path]:
        """The files read, in order. Raises InputError where there are none."""
        if self.path.is_file():
            if not self.path.stat().st_size:
                raise InputError(f"{self.path}: is empty (or has no size, as files of /proc: copy it to a real file)")
            return [self.path]
        if not self.path.exists():
            raise InputError(f"{self.path}: no such file or folder")
        if not self.path.is_dir():
            raise InputError(f"{self.path}: neither a file nor a folder; text is read twice: copy it to a file")
        found = [file for file in self.path.rglob("*") if _is_wanted(file, self.path)]
        if not found:
            kinds = "text (.txt, .md, .py, ...), JSON lines (.jsonl) or Parquet (.parquet)"
            raise InputError(f"{self.path}: no files of {kinds} in this folder")
        return sorted(found, key=lambda file: file.relative_to(self.path).as_posix())

    def documents(self) -> Iterator[str]:
        """Documents of the text files, then of JSON lines, then of Parquet files; empty ones left out."""
        kinds: dict[str, list[Path]] = {"text": [], "json": [], "parquet": []}
        for file in self.files():
            kinds[_kind(file)].append(file)
        for kind, files in kinds.items():
            if files:
                yield from _read(kind, files)


def as_source(source: TextSource | Path | str) -> TextSource:
    """A path as :class:`TextFiles`; a source as it is."""
    return TextFiles(Path(source)) if isinstance(source, str | Path) else source


def stdlib_texts(max_bytes: int) -> Iterator[str]:
    """Modules of the running Python's standard library, sorted by path, `max_bytes` of UTF-8 in all.

    Tests and tables of character codes are left out; the last document may be cut.
    """
    return first_bytes(_stdlib_modules(Path(sysconfig.get_path("stdlib"))), max_bytes)


def first_bytes(texts: Iterable[str], max_bytes: int) -> Iterator[str]:
    """The first `max_bytes` of UTF-8; the last text may be cut, between two characters."""
    left = max_bytes
    for text in texts:
        raw = text.encode()
        yield text if len(raw) <= left else raw[:left].decode(errors="ignore")
        left -= len(raw)
        if left <= 0:
            return


def _stdlib_modules(root: Path) -> Iterator[str]:
    """Texts of the modules below `root` that can be read and are not empty."""
    for module in sorted(_python_files(root), key=lambda file: file.relative_to(root).as_posix()):
        try:
            text = module.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            yield text


def _python_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _kind(file: Path) -> str:
    suffix = file.suffix.lower()
    return "json" if suffix in JSON_SUFFIXES else "parquet" if suffix in PARQUET_SUFFIXES else "text"


def _is_wanted(file: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
    known = file.suffix.lower() in TEXT_SUFFIXES | JSON_SUFFIXES | PARQUET_SUFFIXES
    return known and not hidden and file.is_file()


def _read(kind: str, files: list[Path]) -> Iterator[str]:
    """Documents of files of one kind. Whatever a reader raises becomes one line that names the file."""
    files = [file for file in files if file.stat().st_size]
    if not files:
        return
    where = str(files[0]) if len(files) == 1 else f"{files[0].parent} ({len(files)} files)"
    count = 0
    try:
        for row in _rows(kind, files):
            count += 1
            if text := _text_of(row, where):
                yield text
    except InputError:
        raise
    except UnicodeDecodeError as error:
        raise InputError(
            f"{_first_undecodable(files) or where}: not a text file (UTF-8 was expected): {error}"
        ) from None
    except Exception as error:  # the readers of the formats have no common exception
        raise InputError(f"{where}: cannot be read as {kind}: {_first_line(error)}") from None
    if kind == "text" and count != len(files):
        raise InputError(f"{where}: only {count} of {len(files)} text files could be read")


def _rows(kind: str, files: list[Path]) -> Iterator[dict[str, Any]]:
    """Rows as `datasets` streams them, without its cache, its bars, its logging or the network."""
    too_large = [file for file in files if kind == "text" and file.stat().st_size > MAX_TEXT_FILE_BYTES]
    if too_large:
        raise InputError(
            f"{too_large[0]}: {too_large[0].stat().st_size:,} bytes in one document, at most {MAX_TEXT_FILE_BYTES:,}; "
            "cut it into files, or write documents as JSON lines"
        )
    options: dict[str, dict[str, Any]] = {"text": {"sample_by": "document"}, "parquet": {"columns": ["text"]}}
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # read once, when the library is imported
    import datasets

    datasets.disable_progress_bars()
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs, it raises too
    try:
        with tempfile.TemporaryDirectory(prefix="meshwright-") as cache:
            names = [glob.escape(str(file.absolute())) for file in files]
            yield from datasets.load_dataset(
                kind, data_files=names, split="train", streaming=True, cache_dir=cache, **options.get(kind, {})
            )
    finally:
        datasets.logging.set_verbosity(verbosity)


def _text_of(row: dict[str, Any], where: str) -> str:
    if "text" not in row:
        raise InputError(f'{where}: no field "text"; it has {", ".join(sorted(row)) or "no fields"}')
    text = row["text"]
    if text is not None and not isinstance(text, str):
        raise InputError(f'{where}: field "text" must hold text, found {type(text).__name__}')
    return text or ""


def _first_undecodable(files: list[Path]) -> Path | None:
    for file in files:
        try:
            file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return file
    return None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
