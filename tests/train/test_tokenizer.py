"""Tokenizers: deterministic, lossless, and read by `transformers`."""

import json

import pytest

from meshwright.core.errors import InputError
from meshwright.train import tokenizer as module
from meshwright.train.sources import stdlib_texts
from meshwright.train.tokenizer import END_OF_TEXT, end_of_text_id, load_tokenizer, save_tokenizer, train_tokenizer

TRICKY = "if x:\n\treturn 'Grüße 世界 🙂'  # \x00\r\n\n   trailing   "


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(stdlib_texts(60_000), 500)


def test_training_is_deterministic(tokenizer):
    assert train_tokenizer(stdlib_texts(60_000), 500).to_str() == tokenizer.to_str()


def test_vocabulary_has_the_size_asked_for_and_learns(tokenizer):
    assert tokenizer.get_vocab_size() == 500
    assert end_of_text_id(tokenizer) == tokenizer.token_to_id(END_OF_TEXT) == 0
    text = next(stdlib_texts(5_000))
    assert len(tokenizer.encode(text).ids) < len(text) / 1.8


def test_any_text_decodes_to_itself(tokenizer):
    assert tokenizer.decode(tokenizer.encode(TRICKY).ids) == TRICKY


def test_only_the_head_of_a_long_text_is_used(monkeypatch):
    monkeypatch.setattr(module, "TRAINING_TEXT_BYTES", 1000)
    taken = []

    def texts():
        for _ in range(10):
            taken.append(1)
            yield "word " * 100

    train_tokenizer(texts(), 300)
    assert len(taken) == 2


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(InputError, match="256 bytes"):
        train_tokenizer(["a"], 256)


def test_transformers_loads_it(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    save_tokenizer(tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(TRICKY)["input_ids"] == tokenizer.encode(TRICKY).ids
    assert theirs.decode(theirs(TRICKY)["input_ids"]) == TRICKY
    assert theirs.eos_token == END_OF_TEXT
    assert theirs.eos_token_id == 0
    assert len(theirs) == 500


def test_round_trip_keeps_the_config(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path / "a", {"eos_token": {"content": "!"}, "chat_template": "é"})
    loaded, config = load_tokenizer(tmp_path / "a")
    assert loaded.to_str() == tokenizer.to_str()
    assert config["chat_template"] == "é"
    assert end_of_text_id(loaded, config) == tokenizer.token_to_id("!")
    assert load_tokenizer(tmp_path / "a" / "tokenizer.json")[0].to_str() == tokenizer.to_str()


def test_bad_tokenizers_are_one_line(tokenizer, tmp_path):
    with pytest.raises(InputError, match="no such file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 1}))
    with pytest.raises(InputError, match="not a tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(InputError, match="no end-of-text token"):
        end_of_text_id(tokenizer, {"eos_token": "<nothing>"})
