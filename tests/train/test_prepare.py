"""Text sources and preparing: formats agree, errors are one line, nothing is left half-written."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshwright.core.errors import InputError
from meshwright.train import prepare as prepare_module
from meshwright.train.prepare import RECORD_FILE, TOKENS_FILE, load_prepared, pack, prepare
from meshwright.train.sources import StandardLibrary, TextFiles, stdlib_texts
from meshwright.train.tokenizer import train_tokenizer

DOCUMENTS = ["def f(x):\n    return x + 1\n\n", "Grüße, 世界! 🙂\n", "<|endoftext|> spelt out\n", "x = 1\n" * 40]


def write_all(folder):
    """The same documents as a folder of texts, as JSON lines and as Parquet."""
    texts = folder / "texts"
    texts.mkdir(parents=True)
    for number, (text, suffix) in enumerate(zip(DOCUMENTS, (".py", ".txt", ".md", ".py"), strict=True)):
        (texts / f"{number}{suffix}").write_text(text, encoding="utf-8")
    (texts / ".hidden.txt").write_text("hidden")
    (texts / "picture.png").write_bytes(b"\x89PNG\xff")
    (texts / "empty.txt").write_text("")
    lines = folder / "texts.jsonl"
    lines.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in DOCUMENTS), encoding="utf-8")
    table = folder / "texts.parquet"
    pq.write_table(pa.table({"id": [1] * len(DOCUMENTS), "text": DOCUMENTS}), table)
    return texts, lines, table


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("sources"))


def test_text_jsonl_and_parquet_agree(sources):
    for path in sources:
        assert list(TextFiles(path).documents()) == DOCUMENTS


def test_formats_pack_to_the_same_tokens(sources, tmp_path):
    arrays = []
    for path in sources:
        data = prepare(path, tmp_path / path.name, vocab_size=300, seq_length=8, eval_fraction=0.1)
        arrays.append(np.concatenate([data.train_tokens(), data.eval_tokens()]))
    assert (arrays[0] == arrays[1]).all()
    assert (arrays[0] == arrays[2]).all()


def test_file_names_are_never_patterns(tmp_path):
    for name in ("[ab] *?.txt", "a.txt", "with space é.txt"):
        (tmp_path / name).write_text(name)
    assert list(TextFiles(tmp_path / "[ab] *?.txt").documents()) == ["[ab] *?.txt"]
    assert sorted(TextFiles(tmp_path).documents()) == ["[ab] *?.txt", "a.txt", "with space é.txt"]


def test_a_folder_may_mix_kinds(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("b")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    assert list(TextFiles(tmp_path).documents()) == ["b", "a"]


def test_standard_library_is_the_same_every_time():
    texts = list(stdlib_texts(50_000))
    assert texts == list(StandardLibrary(50_000).documents())
    assert len(texts) > 1
    assert 49_990 <= sum(len(text.encode()) for text in texts) <= 50_000


def test_packing_keeps_the_text_and_marks_the_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "_PIECE_CHARS", 50)
    monkeypatch.setattr(prepare_module, "_BATCH_CHARS", 80)
    tokenizer = train_tokenizer(DOCUMENTS, 300)
    num_tokens, num_documents = pack(DOCUMENTS, tokenizer, 0, tmp_path / "t.npy")
    tokens = np.load(tmp_path / "t.npy", mmap_mode="r")
    assert tokens.dtype == np.uint16
    assert tokens.shape == (num_tokens,)
    assert num_documents == (tokens == 0).sum() == len(DOCUMENTS)
    ends = np.flatnonzero(tokens == 0)
    for text, start, end in zip(DOCUMENTS, [0, *(ends[:-1] + 1)], ends, strict=True):
        assert tokenizer.decode(tokens[start:end].tolist()) == text


def test_large_vocabulary_uses_wide_tokens(tmp_path, monkeypatch):
    tokenizer = train_tokenizer(DOCUMENTS, 300)
    tokenizer.add_tokens([f"~{i}~" for i in range(2**16)])
    pack(["~65535~"], tokenizer, 0, tmp_path / "t.npy")
    tokens = np.load(tmp_path / "t.npy")
    assert tokens.dtype == np.uint32
    assert tokens[0] > 2**16


def test_prepare_splits_and_is_reused(sources, tmp_path):
    first = prepare(sources[1], tmp_path, vocab_size=300, seq_length=8, eval_fraction=0.2)
    stamps = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert set(stamps) == {"tokens.npy", "tokenizer.json", "tokenizer_config.json", "prepared.json"}
    assert first.eval_tokens().size == first.num_eval_tokens == int(first.num_tokens * 0.2)
    assert first.train_tokens().size + first.num_eval_tokens == first.num_tokens
    assert first.vocab_size == first.tokenizer().get_vocab_size() <= 300
    assert prepare(sources[1], tmp_path, vocab_size=300, seq_length=8, eval_fraction=0.2) == first
    assert load_prepared(tmp_path) == first
    assert stamps == {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}


def test_other_text_in_the_same_folder_is_refused(sources, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text(DOCUMENTS[3])
    prepare(text, tmp_path / "out", vocab_size=257, seq_length=8)
    text.write_text(DOCUMENTS[3].replace("1", "2"))
    with pytest.raises(InputError, match="made from other text"):
        prepare(text, tmp_path / "out", vocab_size=257, seq_length=8)


def test_prepare_with_a_given_tokenizer(sources, tmp_path):
    first = prepare(sources[1], tmp_path / "a", vocab_size=300, seq_length=8)
    second = prepare(sources[0], tmp_path / "b", tokenizer=tmp_path / "a", seq_length=8)
    assert (first.train_tokens() == second.train_tokens()).all()
    assert (tmp_path / "a" / "tokenizer.json").read_text() == (tmp_path / "b" / "tokenizer.json").read_text()
    with pytest.raises(InputError, match="either"):
        prepare(sources[0], tmp_path / "c", seq_length=8)


def test_too_short_text_leaves_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(InputError, match=r"too short: \d+ tokens, but 4 sequences of 64 .* need 257 besides 65 kept"):
        prepare(tmp_path / "a.txt", tmp_path / "out", vocab_size=257, seq_length=64, global_batch_size=4)
    assert not (tmp_path / "out").exists()


def test_reuse_checks_the_length_again(sources, tmp_path):
    prepare(sources[1], tmp_path, vocab_size=300, seq_length=8)
    with pytest.raises(InputError, match="too short"):
        prepare(sources[1], tmp_path, vocab_size=300, seq_length=8, global_batch_size=1000)


def test_a_failure_at_the_last_moment_leaves_nothing(sources, tmp_path, monkeypatch):
    def fail(*_args, **_kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(prepare_module, "pack", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare(sources[1], tmp_path / "out", vocab_size=300, seq_length=8)
    assert not (tmp_path / "out").exists()


def test_a_killed_preparation_is_cleaned_and_repeated(sources, tmp_path):
    (tmp_path / ".partial-dead").mkdir()
    (tmp_path / ".partial-dead" / TOKENS_FILE).write_bytes(b"half")
    (tmp_path / TOKENS_FILE).write_bytes(b"half")
    with pytest.raises(InputError, match="no such file"):
        load_prepared(tmp_path)
    assert prepare(sources[1], tmp_path, vocab_size=300, seq_length=8).train_tokens().size
    assert not (tmp_path / ".partial-dead").exists()


def test_damaged_folders_are_told(sources, tmp_path):
    prepare(sources[1], tmp_path, vocab_size=300, seq_length=8)
    raw = (tmp_path / TOKENS_FILE).read_bytes()
    (tmp_path / TOKENS_FILE).write_bytes(raw[:-10])
    with pytest.raises(InputError, match=r"tokens\.npy"):
        load_prepared(tmp_path)
    (tmp_path / RECORD_FILE).write_text("{")
    with pytest.raises(InputError, match=r"prepared\.json: damaged"):
        load_prepared(tmp_path)


def test_bad_input_is_one_line(tmp_path):
    def bad(name, data, match):
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(InputError, match=match) as error:
            list(TextFiles(path).documents())
        assert "\n" not in str(error.value)
        assert str(path) in str(error.value)

    table = tmp_path / "whole.parquet"
    pq.write_table(pa.table({"words": ["a"]}), table)
    bad("missing.txt", None, "no such file")
    bad("bytes.txt", b"\xff\xfe\x00abc", "UTF-8 was expected")
    bad("cut.jsonl", b'{"text": "a"}\n{"text": "b', "cannot be read as json")
    bad("other.jsonl", b'{"words": "a"}\n', 'no field "text"; it has words')
    bad("number.jsonl", b'{"text": 3}\n', "must hold text")
    bad("cut.parquet", table.read_bytes()[:50], "cannot be read as parquet")
    bad("whole.parquet", None, "cannot be read as parquet")
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="no files of text"):
        list(TextFiles(tmp_path / "none").documents())


def test_the_undecodable_file_of_a_folder_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"b\.txt: not a text file"):
        list(TextFiles(tmp_path).documents())


def test_reading_leaves_no_cache_behind(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    list(TextFiles(sources[1]).documents())
    assert os.listdir(tmp_path) == []
