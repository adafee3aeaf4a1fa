"""Prepare a text for training: tokenise it once, into a folder that all ranks read.

OUT/tokenizer.json, tokenizer_config.json     loadable by `transformers` too
OUT/tokens.npy                                all documents, flat; | training ... | evaluation |
OUT/prepared.json                             written last: its presence says that the rest is whole
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tokenizers import Tokenizer

from meshwright.core.errors import InputError
from meshwright.core.values import read_text
from meshwright.train.data import TokenArray, check_enough_tokens
from meshwright.train.sources import TextSource, as_source
from meshwright.train.tokenizer import end_of_text_id, load_tokenizer, save_tokenizer, train_tokenizer

FORMAT = 1
TOKENS_FILE = "tokens.npy"
RECORD_FILE = "prepared.json"
_SCRATCH = ".partial-"
_PIECE_CHARS = 2**20
_BATCH_CHARS = 2**22


@dataclass(frozen=True, slots=True)
class Record:
    """What `prepared.json` says of the tokens beside it."""

    key: str
    """Hash of the text, the vocabulary and the split."""
    source: str
    num_tokens: int
    num_eval_tokens: int
    num_documents: int
    vocab_size: int
    end_of_text: int


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A folder with packed tokens and their tokenizer."""

    folder: Path
    record: Record

    @property
    def source(self) -> str:
        """Where the text came from."""
        return self.record.source

    @property
    def num_tokens(self) -> int:
        """All tokens; the last `num_eval_tokens` are kept for evaluation."""
        return self.record.num_tokens

    @property
    def num_eval_tokens(self) -> int:
        return self.record.num_eval_tokens

    @property
    def vocab_size(self) -> int:
        """Of the tokenizer; a model's vocabulary must have at least as many entries."""
        return self.record.vocab_size

    @property
    def end_of_text(self) -> int:
        """Id of the token that ends each document."""
        return self.record.end_of_text

    @property
    def tokens_path(self) -> Path:
        return self.folder / TOKENS_FILE

    def train_tokens(self) -> TokenArray:
        """[num_tokens − num_eval_tokens], memory-mapped."""
        return self._tokens()[: self.num_tokens - self.num_eval_tokens]

    def eval_tokens(self) -> TokenArray:
        """[num_eval_tokens], memory-mapped."""
        return self._tokens()[self.num_tokens - self.num_eval_tokens :]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        return load_tokenizer(self.folder)[0]

    def _tokens(self) -> TokenArray:
        try:
            tokens: TokenArray = np.load(self.tokens_path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise InputError(f"{self.tokens_path}: cannot be read: {error}") from None
        if tokens.shape != (self.num_tokens,):
            raise InputError(f"{self.tokens_path}: {tokens.size:,} tokens, {self.num_tokens:,} were written")
        return tokens


def prepare(
    source: TextSource | Path | str,
    out_dir: Path | str,
    *,
    vocab_size: int | None = None,
    tokenizer: Path | str | None = None,
    seq_length: int,
    global_batch_size: int = 1,
    eval_fraction: float = 0.02,
) -> PreparedData:
    """Tokenise a text once, into `out_dir`; a second call with the same text and tokenizer reuses it.

    Either all files appear or none. Only one process may prepare a folder; the other ranks call
    :func:`load_prepared` afterwards.

    Args:
        source: a file, a folder, or another :class:`~meshwright.train.sources.TextSource`.
        vocab_size: train a tokenizer of this size on the text, or
        tokenizer: use this one (a `tokenizer.json`, or a folder in Hugging Face form).
        seq_length, global_batch_size: what must fit; the text is refused where it is too short.
        eval_fraction: share of the tokens kept for evaluation, at the end; at least one sample unless 0.

    Raises:
        InputError: unreadable or too short text, or a folder that holds other data.
    """
    if (vocab_size is None) == (tokenizer is None):
        raise InputError("give either `vocab_size`, to train a tokenizer, or `tokenizer`, to use one")
    if not 0 <= eval_fraction < 1:
        raise InputError(f"eval_fraction {eval_fraction}: a share of the tokens, at least 0 and below 1")
    source, out_dir = as_source(source), Path(out_dir)
    vocabulary = vocab_size if tokenizer is None else load_tokenizer(tokenizer)[0].to_str()
    key = _digest(FORMAT, source.fingerprint(), vocabulary, eval_fraction)
    if not (out_dir / RECORD_FILE).exists():
        with _all_or_nothing(out_dir) as folder:
            used, config = _make_tokenizer(source, vocab_size, tokenizer)
            save_tokenizer(used, folder, config)
            end = end_of_text_id(used, config)
            num_tokens, num_documents = pack(source.documents(), used, end, folder / TOKENS_FILE)
            num_eval = max(int(num_tokens * eval_fraction), seq_length + 1) if eval_fraction else 0
            check_enough_tokens(num_tokens, seq_length, global_batch_size, reserved=num_eval)
            record = Record(key, source.describe(), num_tokens, num_eval, num_documents, used.get_vocab_size(), end)
            (folder / RECORD_FILE).write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
    prepared = load_prepared(out_dir)
    if prepared.record.key != key:
        raise InputError(
            f"{out_dir}: holds tokens of {prepared.source}, made from other text or by another tokenizer; "
            "choose another folder or remove this one"
        )
    check_enough_tokens(prepared.num_tokens - prepared.num_eval_tokens, seq_length, global_batch_size)
    return prepared


def load_prepared(folder: Path | str) -> PreparedData:
    """What :func:`prepare` left in `folder`. Raises InputError where it is missing or damaged."""
    path = Path(folder) / RECORD_FILE
    try:
        prepared = PreparedData(Path(folder), Record(**json.loads(read_text(path))))
    except (json.JSONDecodeError, TypeError) as error:
        raise InputError(f"{path}: damaged: {error}") from None
    prepared.train_tokens()
    return prepared


def pack(documents: Iterable[str], tokenizer: Tokenizer, end_of_text: int, path: Path) -> tuple[int, int]:
    """Tokenise documents and write them as one flat array, each followed by the end-of-text token.

    The file is a `.npy` of uint16, or of uint32 where the vocabulary has more than 65,536 tokens.
    A special token spelt out in the text stays ordinary text. Memory does not grow with the text.

    Returns:
        Number of tokens and of documents.
    """
    encoder = Tokenizer.from_str(tokenizer.to_str())
    encoder.encode_special_tokens = True
    encoder.no_truncation()
    encoder.no_padding()
    dtype = np.dtype("<u2" if tokenizer.get_vocab_size() <= 2**16 else "<u4")
    num_tokens = num_documents = 0
    with path.open("wb") as file:
        _write_header(file, dtype, 0)
        for pieces in _batches(documents):
            texts = [text for text, _ in pieces]
            for encoding, (_, is_end) in zip(
                encoder.encode_batch_fast(texts, add_special_tokens=False), pieces, strict=True
            ):
                ids = encoding.ids + [end_of_text] * is_end
                file.write(np.array(ids, dtype).tobytes())
                num_tokens += len(ids)
                num_documents += is_end
        file.seek(0)
        _write_header(file, dtype, num_tokens)
    return num_tokens, num_documents


def _write_header(file: BinaryIO, dtype: np.dtype[Any], num_tokens: int) -> None:
    """The `.npy` header; its length does not depend on the number of tokens (it is padded to grow)."""
    header = {"descr": dtype.str, "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(file, header)


def _batches(documents: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """(piece, whether it ends a document), about `_BATCH_CHARS` at a time: enough to keep all cores busy."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for document in documents:
        for piece in _pieces(document):
            batch.append(piece)
            size += len(piece[0])
            if size >= _BATCH_CHARS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(document: str) -> Iterator[tuple[str, bool]]:
    """A long document cut after line breaks, so that no text is too long for one encoder thread."""
    at = 0
    while len(document) - at > _PIECE_CHARS:
        cut = document.rfind("\n", at, at + _PIECE_CHARS) + 1 or at + _PIECE_CHARS
        yield document[at:cut], False
        at = cut
    yield document[at:], True


def _make_tokenizer(
    source: TextSource, vocab_size: int | None, path: Path | str | None
) -> tuple[Tokenizer, dict[str, Any]]:
    if path is not None:
        return load_tokenizer(path)
    assert vocab_size is not None
    return train_tokenizer(source.documents(), vocab_size), {}


@contextmanager
def _all_or_nothing(out_dir: Path) -> Iterator[Path]:
    """A scratch folder whose files move to `out_dir` at the end, the record last; on failure none do."""
    existed = out_dir.exists()
    out_dir.mkdir(parents=True, exist_ok=True)
    for stale in out_dir.glob(f"{_SCRATCH}*"):  # of a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=out_dir))
    try:
        yield scratch
        for file in sorted(scratch.iterdir(), key=lambda file: file.name == RECORD_FILE):
            os.replace(file, out_dir / file.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if not existed and not any(out_dir.iterdir()):
            out_dir.rmdir()


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
