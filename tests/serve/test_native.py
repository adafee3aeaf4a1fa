"""Compiled kernels give what plain PyTorch gives, and where there are none, everything still runs."""

from __future__ import annotations

import _ctypes
import platform
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from meshwright.core.errors import InputError
from meshwright.models.functions import rms_norm, swiglu
from meshwright.run.serving import _plainly
from meshwright.serve import layers, linear, native
from meshwright.serve.native import Kernels, NativeStep
from tests.models.tiny import SPECS, random_model
from tests.serve.test_engine import GREEDY, alone, make, prompts_of, tokens

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    found = native.kernels()
    if found is None:
        pytest.skip("no compiler here")
    return found


def attended(kernels: Kernels, dtype: torch.dtype, heads: int, kv_heads: int, size: int, block: int, threads: int = 1):
    """Attention of rows with several contexts by the kernel, and by PyTorch in float64."""
    generator = torch.Generator().manual_seed(0)
    contexts = [1, 2, 15, 16, 17, 40]
    per_sequence = -(-max(contexts) // block)
    blocks = torch.randperm(len(contexts) * per_sequence, generator=generator)
    cache = torch.randn(2, len(blocks) * block, kv_heads, size, generator=generator).to(dtype)
    wide = torch.randn(len(contexts), (heads + 2 * kv_heads) * size, generator=generator).to(dtype)
    q, k, v = wide.clone().split([heads * size, kv_heads * size, kv_heads * size], -1)
    firsts = torch.arange(len(contexts)) * per_sequence
    slots = torch.stack([blocks[f + (c - 1) // block] * block + (c - 1) % block for f, c in zip(firsts, contexts)])
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    rows = torch.arange(len(contexts))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        shape = (heads, kv_heads, size, block)
        none = torch.empty(0, dtype=torch.int64)
        step = NativeStep(None, slots, rows, torch.tensor(contexts), firsts, none, rows, blocks, shape)
        kernels.attention(step, q, k, v, cache[0], cache[1], out)
    finally:
        torch.set_num_threads(before)
    expected = []
    for row, (first, context) in enumerate(zip(firsts.tolist(), contexts)):
        positions = torch.arange(context)
        at = blocks[first + positions // block] * block + positions % block
        assert torch.equal(cache[0][at[-1]].flatten(), k[row]), "the row's own key is in the cache"
        keys, values = (side[at].double().transpose(0, 1)[None] for side in cache)
        query = q[row].double().view(1, heads, 1, size)
        expected.append(F.scaled_dot_product_attention(query, keys, values, enable_gqa=True).flatten())
    return out.double(), torch.stack(expected)


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "size", "block"), [(4, 4, 64, 16), (6, 2, 8, 4), (4, 1, 128, 40)])
def test_attention_reads_the_cache_by_its_blocks(kernels, dtype, heads, kv_heads, size, block):
    for threads in (1, 2):
        found, expected = attended(kernels, dtype, heads, kv_heads, size, block, threads)
        torch.testing.assert_close(found, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert (found[1] - expected[2]).abs().max() > 0.1, "a control: rows differ"


def chunks_attended(kernels: Kernels, dtype: torch.dtype, heads: int, kv_heads: int, size: int, cuts: list[int]):
    """Attention of one prompt in chunks that end at `cuts`, and by PyTorch in float64."""
    generator, block = torch.Generator().manual_seed(0), 16
    length = cuts[-1]
    blocks = torch.randperm(-(-length // block) + 2, generator=generator)
    cache = torch.full((2, len(blocks) * block, kv_heads, size), torch.nan, dtype=dtype)
    wide = torch.randn(length, (heads + 2 * kv_heads) * size, generator=generator).to(dtype)
    found, none = [], torch.empty(0, dtype=torch.int64)
    for start, end in zip([0, *cuts], cuts):
        positions = torch.arange(start, end)
        slots = blocks[1 + positions // block] * block + positions % block
        q, k, v = wide[start:end].clone().split([heads * size, kv_heads * size, kv_heads * size], -1)
        chunks = torch.tensor([[0, end - start, end, 1]])
        step = NativeStep(None, slots, none, none, none, chunks, none, blocks, (heads, kv_heads, size, block))
        found.append(torch.full_like(q, torch.nan, memory_format=torch.contiguous_format))
        kernels.attention(step, q, k, v, cache[0], cache[1], found[-1])
    q, k, v = wide.double().split([heads * size, kv_heads * size, kv_heads * size], -1)
    q, k, v = (side.unflatten(-1, (-1, size)).transpose(0, 1)[None] for side in (q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return torch.cat(found), expected[0].transpose(0, 1).flatten(1)


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (6, 2, 8), (5, 1, 20)])
def test_chunks_of_prompts_attend_by_their_blocks(kernels, dtype, heads, kv_heads, size):
    found, expected = chunks_attended(kernels, dtype, heads, kv_heads, size, [7, 55, 130])
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    at_once, _ = chunks_attended(kernels, dtype, heads, kv_heads, size, [130])
    assert torch.equal(found, at_once), "however a prompt is cut"
    assert (found[1:] - found[:-1]).abs().amax(1).min() > 1e-3, "a control: rows differ"


@DTYPES
@pytest.mark.parametrize(("outputs", "inputs"), [(61, 33), (16, 96), (96, 64)])
def test_products_by_lanes(kernels, dtype, outputs, inputs):
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    product, without = linear.LaneProduct(kernels, weight, bias), linear.LaneProduct(kernels, weight, None)
    close = {"atol": 20 * TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    for rows in (1, 5, 12, 13, 32, 70):
        x = torch.randn(1, rows, inputs).to(dtype)
        expected = x.double() @ weight.double().t()
        torch.testing.assert_close(product(x).double(), expected + bias.double(), **close)
        torch.testing.assert_close(without(x).double(), expected, **close)
    assert (product(x) - without(x)).abs().max() > 0.1, "a control: the bias counts"
    assert torch.equal(product(x[:, -1:]), product(x)[:, -1:]), "a row does not depend on its neighbours"


@DTYPES
def test_norms_and_gates(kernels, dtype):
    x, up = torch.randn(2, 7, 96).to(dtype).unbind()
    weight = torch.randn(96).to(dtype)
    close = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    torch.testing.assert_close(kernels.norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5), **close)
    gate = 20 * x
    torch.testing.assert_close(kernels.gated(gate[None], up[None])[0], swiglu(gate, up), **close)
    both = torch.cat((gate, up), -1)[None]
    halves = kernels.gated(*both.split(96, -1))
    assert torch.equal(halves, kernels.gated(gate[None], up[None])), "halves of one product"


def test_the_largest_of_each_row(kernels):
    rows = torch.randn(9, 1301)
    rows[1, 1300], rows[2, [7, 900]], rows[3, 5], rows[4] = 99, 50, torch.nan, -torch.inf
    rows[5, 600], rows[6] = torch.inf, 1.0
    values, places = kernels.largest(rows)
    expected = rows.max(dim=-1)
    torch.testing.assert_close(values, expected.values, equal_nan=True, rtol=0, atol=0)
    sound = [0, 1, 2, 4, 5, 6, 7, 8]
    assert places[sound].tolist() == expected.indices[sound].tolist()
    assert torch.equal(kernels.largest(rows.t().contiguous().t())[1], places), "whatever the strides"


@DTYPES
def test_what_is_not_finite_stays_so(kernels, dtype):
    bad = torch.tensor([[[float("nan"), float("inf"), 1.0, -1.0]]]).to(dtype)
    assert kernels.gated(bad, torch.ones_like(bad)).isfinite().tolist() == [[[False, False, True, True]]]
    assert kernels.norm(bad[..., :1], torch.ones(1, dtype=dtype), 1e-5).isnan().all()


@pytest.mark.parametrize(("outputs", "inputs"), [(61, 32), (16, 96), (96, 64)])
def test_products_by_tiles(kernels, outputs, inputs):
    if not kernels.has_tiles:
        pytest.skip("bf16 is not multiplied in pairs here")
    weight, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs).bfloat16()
    product, without = linear.TileProduct(kernels, weight, bias), linear.TileProduct(kernels, weight, None)
    for rows in (1, 12, 13, 16, 17, 32, 33, 70):
        x = torch.randn(1, rows, inputs).bfloat16()
        expected = x.double() @ weight.double().t()
        torch.testing.assert_close(product(x).double(), expected + bias.double(), atol=0.02, rtol=0.02)
        torch.testing.assert_close(without(x).double(), expected, atol=0.02, rtol=0.02)
    assert (product(x) - without(x)).abs().max() > 0.1, "a control: the bias counts"
    alone = product(x[:, -1:])
    assert torch.equal(alone, product(x)[:, -1:]), "a row does not depend on its neighbours"


def logits_of(model, rows: int, stacked: bool, threads: int) -> tuple[list[torch.Tensor], int]:
    """Of every step while prompts come in chunks and are answered, and how many of them were one call."""
    engine = make(model, num_blocks=40 + 4 * rows, step_tokens=rows + 8)
    runner, found, calls = engine.runner, [], []
    stack, run = runner._stack, runner.run
    assert stack is not None
    runner._stack = (lambda tokens, step: calls.append(1) or stack(tokens, step)) if stacked else None
    runner.run = lambda batch: found.append(run(batch)) or found[-1]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        engine.generate(prompts_of(model, *[2 + at % 3 for at in range(rows)], 41), GREEDY)
    finally:
        torch.set_num_threads(before)
    assert not stacked or len(calls) == len(found)
    return [logits for logits in found if logits is not None], len(calls)


@DTYPES
@pytest.mark.parametrize("has_tiles", [True, False], ids=["tiles", "lanes"])
@pytest.mark.parametrize(
    ("name", "loads"), [("llama-tied-scaled", (1, 33)), ("llama-biases", (5,)), ("qwen3-wide-heads", (5,))]
)
def test_a_step_in_one_call_is_that_of_the_layers(kernels, monkeypatch, name, loads, has_tiles, dtype):
    if has_tiles and (dtype != torch.bfloat16 or not kernels.has_tiles):
        pytest.skip("bf16 is not multiplied in pairs here")
    monkeypatch.setattr(kernels, "has_tiles", has_tiles)
    model = random_model(SPECS[name].model_copy(update={"ffn_size": 64 if has_tiles else 40}), dtype)
    for rows in loads:
        found, num_calls = logits_of(model, rows, True, threads=1 + rows % 2)
        expected, none = logits_of(model, rows, False, threads=1)
        assert num_calls >= 8, "every step is one call"
        assert not none
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected))
    assert not torch.equal(found[-1][:1], found[-1][1:2]), "a control: rows differ"


def test_what_a_step_in_one_call_does_not_know_runs_by_layers(kernels):
    for name in ("gpt2", "mixtral", "deepseek-v3"):
        assert make(random_model(SPECS[name], torch.bfloat16)).runner._stack is None
    assert make(random_model(SPECS["llama"], torch.float64)).runner._stack is None


def test_models_of_every_kind_run_plainly_too(monkeypatch):
    monkeypatch.setenv(native.SWITCH, "plain")
    for name in ("llama", "qwen3-wide-heads", "gpt2"):
        model = random_model(SPECS[name])
        prompts = prompts_of(model, 1, 7, 20)
        engine = make(model, step_tokens=8)
        assert not any(isinstance(module, layers.NativeAttention) for module in engine.runner._model.modules())
        assert tokens(engine.generate(prompts, GREEDY)) == [alone(model, prompt) for prompt in prompts]


def test_kernels_are_used_where_they_are(kernels):
    names = {type(m).__name__ for m in make(random_model(SPECS["llama"])).runner._model.modules()}
    assert {"NativeAttention", "NativeMLP", "NativeNorm", "JoinedProjections", "PackedLinear"} <= names
    plain = {type(m).__name__ for m in make(random_model(SPECS["llama"], torch.float64)).runner._model.modules()}
    assert "PagedCore" in plain
    assert "NativeAttention" not in plain


def test_a_compiler_that_fails_is_done_without(monkeypatch, tmp_path):
    monkeypatch.setattr(native.shutil, "which", lambda name: "/bin/false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native._load.__wrapped__() is None
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert native._load.__wrapped__() is None


class Compiler:
    """In the place of `subprocess`: writes the library in two pieces, slowly."""

    SubprocessError = native.subprocess.SubprocessError

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def run(self, command: list[str], **options: object) -> None:
        self.commands.append(command)
        with open(command[-1], "w") as out:
            out.write("half ")
            out.flush()
            threading.Event().wait(0.05)
            out.write("whole")


@pytest.fixture
def compiler(monkeypatch, tmp_path) -> Compiler:
    found = Compiler()
    monkeypatch.setattr(native, "subprocess", found)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return found


def test_what_is_compiled_is_kept_for_this_processor_and_compiler(monkeypatch, compiler):
    first = native._compiled("c++")
    assert native._compiled("c++") == first
    assert len(compiler.commands) == 1, "the second finds it"
    assert native._compiled("other") != first
    monkeypatch.setattr(native, "_processor", lambda: "flags: one less")
    assert native._compiled("c++") != first, "a home that several machines share"
    assert len(compiler.commands) == 3


def test_processes_that_compile_at_once_find_whole_libraries(compiler, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        found = {path.read_text() for path in pool.map(native._compiled, ["c++"] * 4)}
    assert found == {"half whole"}
    assert len(list((tmp_path / "meshwright").iterdir())) == 1, "nothing else is left"


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, compiler, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(native.shutil, "which", lambda name: "/bin/true")
    assert native._load.__wrapped__() is None
    monkeypatch.setattr(native, "_load", lambda: None)
    assert "or the user's cache ($XDG_CACHE_HOME, ~/.cache) cannot keep them" in (native.why_plain() or "")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of one kind")
def test_processors_of_narrow_vectors(kernels, monkeypatch, tmp_path):
    """Compiles once more, which takes most of its time: nothing else runs what such processors run."""
    flags = [flag.replace("=native", "=haswell").replace("-O3", "-O1") for flag in native.FLAGS]
    monkeypatch.setattr(native, "FLAGS", flags)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    narrow = native._load.__wrapped__()
    assert narrow is not None
    assert not narrow.has_tiles
    assert narrow.lanes_panel < 32
    monkeypatch.setattr(native, "_load", lambda: narrow)
    for dtype in TOLERANCES:
        test_products_by_lanes(narrow, dtype, 61, 33)
        test_chunks_of_prompts_attend_by_their_blocks(narrow, dtype, 6, 2, 8)
        test_attention_reads_the_cache_by_its_blocks(narrow, dtype, 4, 4, 64, 16)
        model = random_model(SPECS["llama-biases"], dtype)
        found, expected = (logits_of(model, 5, stacked, threads=2)[0] for stacked in (True, False))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_more_threads_than_cores_give_the_same(kernels):
    model = random_model(SPECS["llama"])
    many, few = (logits_of(model, 5, True, threads)[0] for threads in (7, 1))
    assert all(torch.equal(one, other) for one, other in zip(many, few, strict=True))


def test_a_library_without_the_functions_is_done_without(monkeypatch, tmp_path):
    other = _ctypes.__file__  # a library, but not ours
    monkeypatch.setattr(native.shutil, "which", lambda name: "/bin/true")
    monkeypatch.setattr(native, "_compiled", lambda compiler: Path(other))
    assert native._load.__wrapped__() is None


def test_a_user_without_a_home_is_served_plainly(monkeypatch):
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(native.shutil, "which", lambda name: "/bin/false")
    monkeypatch.setattr(native.Path, "home", nowhere)
    assert native._load.__wrapped__() is None


def test_a_server_says_why_it_has_no_kernels(monkeypatch):
    monkeypatch.setattr(native, "_load", lambda: None)
    monkeypatch.setattr(native.shutil, "which", lambda name: "/bin/false")
    assert "/bin/false did not compile them" in (native.why_plain() or "")
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert "no compiler" in (native.why_plain() or "")
    engine = make(random_model(SPECS["llama"]))
    assert "\nnote: serving without compiled kernels, which is slower: no compiler" in _plainly(engine)
    assert _plainly(make(random_model(SPECS["llama"], torch.float64))) == ""
    monkeypatch.setenv(native.SWITCH, "plain")
    assert native.why_plain() is None
    assert _plainly(engine) == ""


def test_a_switch_that_is_none_is_one_line(monkeypatch):
    monkeypatch.setenv(native.SWITCH, "bogus")
    with pytest.raises(InputError, match="MESHWRIGHT_KERNELS=bogus: set it to `plain`"):
        native.kernels()
