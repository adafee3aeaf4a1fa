"""Text in pieces: no half characters, nothing of a stop string, and together what decoding all at once gives."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from meshwright.serve.text import UNKNOWN, Spelling, StopFinder, WindowDetokenizer, detokenizers


def byte_level() -> Tokenizer:
    """One token for each byte."""
    names = {name: at for at, name in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=names, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Words with their space, and a token for each byte, as in SentencePiece."""
    names = ["▁a", "▁b", "c", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(BPE(vocab={name: at for at, name in enumerate(names)}, merges=[], byte_fallback=True))
    tokenizer.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    return tokenizer


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = detokenizers(tokenizer)()
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@pytest.mark.parametrize("text", ["ďábel", "🦙 llama", "漢字 kana かな", "plain", "e\u0301"])
def test_characters_of_many_tokens_come_whole(text: str):
    tokenizer = byte_level()
    found = pieces(tokenizer, tokenizer.encode(text).ids)
    assert "".join(found) == text
    assert not any(UNKNOWN in piece for piece in found)
    assert max(map(len, found)) == 1, "each character as soon as it is there"


def byte_level_with_added() -> Tokenizer:
    """Bytes, and tokens that were added as they are written, some of them special."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["ab cd", "🦙", "Ġx"])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, byte_level_with_added, byte_fallback])
def test_any_tokens_decode_as_they_do_at_once(make):
    tokenizer, draw = make(), random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(tokenizer.get_vocab_size()) for _ in range(draw.randrange(1, 14))]
        ids += tokenizer.encode("漢").ids if make is not byte_fallback else []
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids), ids


def test_bytes_and_windows_give_the_same_text():
    tokenizer, draw = byte_level_with_added(), random.Random(1)
    assert not isinstance(detokenizers(tokenizer)(), WindowDetokenizer)
    assert isinstance(detokenizers(byte_fallback())(), WindowDetokenizer)
    some = [*"ďab漢🦙 ", "<s>", "ab cd"]
    for _ in range(50):
        ids = tokenizer.encode("".join(draw.choices(some, k=9)), add_special_tokens=False).ids
        window = WindowDetokenizer(tokenizer)
        assert pieces(tokenizer, ids) == [*map(window.push, ids), window.finish()]


@pytest.mark.parametrize("make", [byte_level_with_added, byte_fallback])
def test_single_tokens_are_spelt_by_their_bytes(make):
    tokenizer = make()
    spelling = Spelling(tokenizer)
    ids = tokenizer.encode("c漢").ids
    assert b"".join(map(spelling.text, ids)) == "c漢".encode()
    assert spelling.name(9999) == spelling.text(9999) == b""
    if make is byte_level_with_added:
        end = tokenizer.token_to_id("</s>")
        assert (spelling.name(end), spelling.text(end)) == (b"</s>", b"")


def test_a_token_that_the_tokenizer_does_not_know_is_no_text():
    tokenizer = byte_level()
    assert pieces(tokenizer, [tokenizer.token_to_id("a"), 9999, tokenizer.token_to_id("b")]) == ["a", "", "b", ""]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_stop_strings(size: int):
    for text, stops, before in (
        ("one END two", ["END"], "one "),
        ("one EN two", ["END"], "one EN two"),
        ("aaab", ["aab"], "a"),
        ("abcabd", ["abd", "cab"], "ab"),
        ("xyz", ["yz", "y"], "x"),
        ("never", [], "never"),
        ("ends with EN", ["END"], "ends with EN"),
    ):
        finder = StopFinder(stops)
        given = [finder.push(text[at : at + size]) for at in range(0, len(text), size)]
        whole = "".join(given) + ("" if finder.found else finder.finish())
        assert whole == before, (text, stops)
        assert (finder.found is not None) == (before != text)


def test_nothing_of_a_stop_string_is_given_out_early():
    finder = StopFinder(["stop"])
    assert [finder.push(letter) for letter in "a sto"] == ["a", " ", "", "", ""]
    assert finder.push("rm") == "storm"
