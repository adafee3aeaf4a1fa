"""Weights in and out: the same logits as `transformers`, in both directions; damage is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.core.errors import CheckpointError, InputError, MeshwrightWarning, UnsupportedError
from meshwright.core.hf_config import to_hf_config
from meshwright.core.placement import Box, param_box
from meshwright.core.sources import load_model
from meshwright.core.strategy import Strategy
from meshwright.models.build import build
from meshwright.models.hf import HFCheckpoint, export, load
from tests.models.tiny import SPECS, random_model, random_tokens

ALL = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
THEIRS = {name: spec for name, spec in SPECS.items() if spec.family not in ("deepseek", "mixture")}
"""What transformers has a class for."""
THEIR_CLASSES = pytest.mark.parametrize("spec", THEIRS.values(), ids=THEIRS.keys())
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
ROUTER_TOLERANCE = 1e-5
"""Their routers compute in fp32 whatever they are given."""


def tolerance_of(spec, dtype):
    return max(TOLERANCE[dtype], ROUTER_TOLERANCE if spec.num_experts else 0.0)


@pytest.fixture(scope="module")
def transformers():
    module = pytest.importorskip("transformers")
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module


def widen(model):
    """Their RMSNorm computes in fp32 whatever it is given; under float64 it must not be what we measure."""

    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()

    model.set_experts_implementation("eager")  # the other one multiplies in fp32 at most
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = forward.__get__(module)
    return model


def reference(transformers, spec, dtype):
    """Their model with random weights, norms and biases included."""
    data = to_hf_config(spec)
    config = getattr(transformers, data["architectures"][0]).config_class(
        **{key: value for key, value in data.items() if key not in ("architectures", "model_type")}
    )
    torch.manual_seed(3)
    model = getattr(transformers, data["architectures"][0])(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.1 * torch.randn_like(buffer)
    return model


def named(model):
    return list(model.stored())


def exported(folder, spec, dtype=torch.float32, **options):
    model = random_model(spec, dtype)
    export(folder, spec, named(model), **options)
    return model


@THEIR_CLASSES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_their_checkpoint_gives_their_logits(transformers, tmp_path, spec, dtype):
    theirs = reference(transformers, spec, dtype)
    theirs.save_pretrained(tmp_path)
    ours = build(spec, "cpu", dtype)
    load(ours, tmp_path)
    tokens = random_tokens(spec, 2, 40)
    tolerance = tolerance_of(spec, dtype)
    torch.testing.assert_close(ours(tokens), widen(theirs)(tokens).logits, rtol=tolerance, atol=tolerance)


@THEIR_CLASSES
def test_their_configuration_file_gives_the_model(transformers, tmp_path, spec):
    """As they write it today, whatever they call a field."""
    reference(transformers, spec, torch.float32).config.save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).model_copy(update={"name": spec.name}) == spec


@THEIR_CLASSES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_our_checkpoint_gives_our_logits(transformers, tmp_path, spec, dtype):
    ours = exported(tmp_path / "out", spec, dtype)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert theirs.dtype == dtype
    tokens = random_tokens(spec, 2, 40)
    tolerance = tolerance_of(spec, dtype)
    torch.testing.assert_close(widen(theirs)(tokens).logits, ours(tokens), rtol=tolerance, atol=tolerance)


@ALL
def test_export_then_load_is_exact(tmp_path, spec):
    model = exported(tmp_path / "out", spec, max_shard_bytes=10_000)
    again = build(spec, "cpu")
    load(again, tmp_path / "out")
    for (name, a), (_, b) in zip(named(model), named(again), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", ["gpt2", "qwen3-wide-heads", "dots"])
def test_boxes_are_parts_of_the_whole(tmp_path, name):
    spec = SPECS[name]
    weights = dict(named(exported(tmp_path / "out", spec)))
    with HFCheckpoint(tmp_path / "out", spec) as checkpoint:
        for param in spec.parameters():
            for index in range(2):
                box = param_box(spec, param, Strategy(tp=2).grid, index)
                assert torch.equal(checkpoint.read(param, box), weights[param.name][box.slices]), param.name
            inner = Box(tuple(n // 4 for n in param.shape), tuple(n // 2 for n in param.shape))
            assert torch.equal(checkpoint.read(param, inner), weights[param.name][inner.slices]), param.name


def test_several_files_with_an_index(tmp_path):
    spec = SPECS["llama"]
    exported(tmp_path / "out", spec, max_shard_bytes=20_000, extra_files={"tokenizer.json": b"{}"})
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == 4 * spec.num_parameters
    assert all((tmp_path / "out" / file).stat().st_size < 25_000 for file in files)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == b"{}"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2"])
def test_names_without_prefix_and_constant_tables(tmp_path, name):
    spec = SPECS[name]
    model = exported(tmp_path / "out", spec)
    file = tmp_path / "out/model.safetensors"
    tensors = {key.removeprefix("transformer.").removeprefix("model."): t for key, t in load_file(file).items()}
    tensors["h.0.attn.bias" if name == "gpt2" else "layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, file)
    again = build(spec, "cpu")
    load(again, tmp_path / "out")
    tokens = random_tokens(spec, 1, 8)
    assert torch.equal(model(tokens), again(tokens))


def test_layers_that_predict_further_tokens_are_left_out_and_it_is_said(tmp_path):
    spec = SPECS["deepseek-v3"]
    model = exported(tmp_path / "out", spec)
    edit(tmp_path / "out/model.safetensors", lambda t: t.update({"model.layers.2.eh_proj.weight": torch.ones(2, 2)}))
    again = build(spec, "cpu")
    with pytest.warns(MeshwrightWarning, match="1 tensors of layers from 2 on are left out") as said:
        load(again, tmp_path / "out")
    assert len(said) == 1
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(named(model), named(again), strict=True))
    edit(tmp_path / "out/model.safetensors", lambda t: t.update({"model.layers.1.eh_proj.weight": torch.ones(2, 2)}))
    with pytest.warns(MeshwrightWarning), pytest.raises(CheckpointError, match=r"no place .* `model.layers.1.eh_proj"):
        load(again, tmp_path / "out")


def test_a_tied_embedding_may_stand_under_the_heads_name(tmp_path):
    spec = SPECS["qwen2"]
    model = exported(tmp_path / "out", spec)
    file = tmp_path / "out/model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file)
    again = build(spec, "cpu")
    load(again, tmp_path / "out")
    assert torch.equal(again.embedding.weight, model.embedding.weight)


def edit(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "neither `model.safetensors` nor"),
        (lambda file: file.write_bytes(file.read_bytes()[:-100]), "model.safetensors: damaged or truncated"),
        (lambda file: file.write_bytes(b""), "model.safetensors: damaged or truncated"),
        (lambda file: edit(file, lambda t: t.pop("model.norm.weight")), "no tensor `model.norm.weight`"),
        (
            lambda file: edit(file, lambda t: t.update({"model.norm.weight": torch.ones(5)})),
            r"`model.norm.weight` is \[5\], but `llama` needs \[32\]",
        ),
        (
            lambda file: edit(file, lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(5)})),
            "1 tensors have no place in `llama`, for instance `model.layers.2.mlp.up_proj.weight`",
        ),
        (lambda file: file.rename(file.with_name("pytorch_model.bin")), "convert it to safetensors"),
    ],
)
def test_damage_is_named(tmp_path, damage, message):
    spec = SPECS["llama"]
    exported(tmp_path / "out", spec)
    damage(tmp_path / "out/model.safetensors")
    with pytest.raises(CheckpointError, match=message) as caught:
        load(build(spec, "cpu"), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_file_or_a_bad_index_is_named(tmp_path):
    spec = SPECS["llama"]
    exported(tmp_path / "out", spec, max_shard_bytes=20_000)
    last = sorted((tmp_path / "out").glob("*.safetensors"))[-1]
    last.unlink()
    with pytest.raises(CheckpointError, match=f"{last.name}: the index names this file, but it is missing"):
        load(build(spec, "cpu"), tmp_path / "out")
    for text in ("[]", "{", '{"weight_map": 3}'):
        (tmp_path / "out/model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match="not an index"):
            HFCheckpoint(tmp_path / "out", spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:-1], "1 parameters of `gpt2` are missing, first `final_norm.bias`"),
        (lambda t: [*t, t[0]], "`embedding.weight` is not a parameter of `gpt2`, or was given twice"),
        (lambda t: [("embedding.weight", t[0][1][:-1])], r"`embedding.weight` is \[60, 32\]"),
    ],
)
def test_a_failed_export_leaves_nothing(tmp_path, change, message):
    spec = SPECS["gpt2"]
    with pytest.raises(CheckpointError, match=message):
        export(tmp_path / "out", spec, change(named(random_model(spec))))
    assert not list(tmp_path.iterdir())


def test_an_export_never_overwrites(tmp_path):
    spec = SPECS["llama"]
    (tmp_path / "out").mkdir()
    exported(tmp_path / "out", spec)  # an empty folder is fine
    before = (tmp_path / "out/model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="not an empty folder"):
        exported(tmp_path / "out", spec)
    assert (tmp_path / "out/model.safetensors").read_bytes() == before
    with pytest.raises(InputError, match=r"config\.json/deeper: cannot be written"):
        exported(tmp_path / "out/config.json/deeper", spec)


def test_families_without_a_map_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="bloom family"):
        HFCheckpoint(tmp_path, SPECS["llama"].model_copy(update={"family": "bloom"}))
