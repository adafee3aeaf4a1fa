"""Tokenizers: train a byte-level BPE, read one from a Hugging Face folder, write one for `transformers`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from meshwright.core.errors import InputError
from meshwright.core.values import parse_json, read_text, write_text
from meshwright.train.sources import first_bytes

END_OF_TEXT = "<|endoftext|>"
TRAINING_TEXT_BYTES = 4_000_000
"""A vocabulary is learnt from at most this much text: more takes longer and hardly changes it."""

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
_KNOWN_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[EOS]")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with one special token, ``<|endoftext|>`` (id 0).

    Any text can be encoded, and decodes to itself. The same texts give the same tokenizer. Only the
    first `TRAINING_TEXT_BYTES` of text are used; a short text gives fewer than `vocab_size` tokens.

    Raises:
        InputError: `vocab_size` is smaller than the 256 bytes and the special token.

    Source: Sennrich et al. 2016 (BPE); Radford et al. 2019 §2.2 (on bytes).
    """
    smallest = 256 + 1
    if vocab_size < smallest:
        raise InputError(f"vocabulary of {vocab_size} tokens: the 256 bytes and {END_OF_TEXT} need at least {smallest}")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(first_bytes(texts, TRAINING_TEXT_BYTES), trainer)
    return tokenizer


def end_of_text_id(tokenizer: Tokenizer, config: dict[str, Any] | None = None) -> int:
    """Id of the token that ends a document: the config's `eos_token`, else a well-known name.

    Raises:
        InputError: the tokenizer has none.
    """
    named = (config or {}).get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    for name in (named,) if named else _KNOWN_ENDS:
        found = tokenizer.token_to_id(name)
        if found is not None:
            return int(found)
    raise InputError(
        f"the tokenizer has no end-of-text token ({named or ', '.join(_KNOWN_ENDS)}); "
        f"name it as `eos_token` in {CONFIG_FILE}"
    )


def load_tokenizer(path: Path | str) -> tuple[Tokenizer, dict[str, Any]]:
    """Tokenizer and its `tokenizer_config.json` ({} where there is none).

    Args:
        path: a folder in Hugging Face form, or a `tokenizer.json`.

    Raises:
        InputError: missing, damaged, or not a `tokenizer.json`.
    """
    path = Path(path)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    text = read_text(file)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{file}: not a tokenizer: {error}") from None
    config_file = file.with_name(CONFIG_FILE)
    return tokenizer, parse_json(read_text(config_file), str(config_file)) if config_file.exists() else {}


def save_tokenizer(tokenizer: Tokenizer, folder: Path | str, config: dict[str, Any] | None = None) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`; `transformers.AutoTokenizer` loads the folder.

    Args:
        config: as :func:`load_tokenizer` gave it; by default one that names ``<|endoftext|>``.
    """
    if not config:
        end = tokenizer.id_to_token(end_of_text_id(tokenizer))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": end,
            "eos_token": end,
            "unk_token": end,
            "clean_up_tokenization_spaces": False,
        }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / TOKENIZER_FILE, tokenizer.to_str(pretty=True))
    write_text(folder / CONFIG_FILE, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
