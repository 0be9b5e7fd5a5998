"""checkpoint.py: every published name and shape of the backbone, both ways, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dsflash_jax import checkpoint
from dsflash_jax.config import Config

# Architecture section 15, written out for a layer of each kind.
EVERY_LAYER = {
    "attn_norm.weight": (5120,), "ffn_norm.weight": (5120,),
    "hc_attn_fn": (24, 20480), "hc_attn_base": (24,), "hc_attn_scale": (3,),
    "hc_ffn_fn": (24, 20480), "hc_ffn_base": (24,), "hc_ffn_scale": (3,),
    "attn.wq_a.weight": (1280, 5120), "attn.wq_b.weight": (32768, 1280), "attn.wkv.weight": (512, 5120),
    "attn.wo_a.weight": (8192, 4096), "attn.wo_b.weight": (5120, 8192),
    "attn.q_norm.weight": (1280,), "attn.kv_norm.weight": (512,), "attn.attn_sink": (64,),
    "ffn.gate.weight": (384, 5120), "ffn.gate.bias": (384,), "ffn.gate.bias_vl": (384,),
    "ffn.shared_experts.w1.weight": (2304, 5120), "ffn.shared_experts.w2.weight": (5120, 2304),
    "ffn.shared_experts.w3.weight": (2304, 5120),
}  # fmt: skip
EXPERT = {"w1.weight": (2304, 5120), "w2.weight": (5120, 2304), "w3.weight": (2304, 5120)}
COMPRESSOR = {"attn.compressor.wkv.weight": (512, 5120), "attn.compressor.norm.weight": (512,)}
GATE = {"attn.compressor.wgate.weight": (512, 5120)}
SELECTS = {"attn.indexer.wq_b.weight": (4096, 1280), "attn.indexer.weights_proj.weight": (32, 5120)}
KEYS = {"attn.indexer.wk.weight": (128, 512), "attn.indexer.k_norm.weight": (128,)}
TABLE_ROWS = {1: 384006168, 14: 384016682}
MEMORY = {"engram.wkv.weight": (25600, 6144), "engram.q_weight": (4, 5120), "engram.k_weight": (4, 5120)}
TOP = {"embed.weight": (129280, 5120), "head.weight": (129280, 5120), "norm.weight": (5120,)}


def published() -> dict[str, tuple[int, ...]]:
    """Name to shape of every backbone tensor, scales aside."""
    out = dict(TOP)
    for i in range(40):
        layer = dict(EVERY_LAYER)
        for e in range(384):
            layer |= {f"ffn.experts.{e}.{name}": shape for name, shape in EXPERT.items()}
        layer |= COMPRESSOR | KEYS if i in (2, 8, 14, 20) else {}
        layer |= GATE if i in (2, 8, 14) else {}
        layer |= SELECTS if i in (2, 8, 14, 20, 24, 28, 32, 36) else {}
        layer |= MEMORY | {"engram.embed.weight": (TABLE_ROWS[i], 256)} if i in TABLE_ROWS else {}
        out |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return out


def test_released_backbone_has_every_published_name_and_shape(golden):
    entries = checkpoint.entries(Config.from_json(golden / "config.released.json"))
    got = {e.name: e.shape for e in entries}
    assert len(got) == len(entries) == 96085 - 47589  # the rest of the release are scales
    apart = ("mtp.", "vision.", "aligner.", "image_")  # the draft head and the image tower
    backbone = {name: shape for name, shape in got.items() if not name.startswith(apart)}
    assert backbone == published()
    assert len(backbone) == 47006


@pytest.fixture(scope="module")
def tree():
    c = tiny.T_ENGRAM
    return c, jax.tree.map(np.asarray, tiny.weights(c))


@pytest.fixture
def tensors(tree):
    return checkpoint.publish(*tree)


def test_adopting_what_was_published_gives_the_tree_back(tree, tensors):
    c, w = tree
    got = checkpoint.adopt(c, tensors)
    assert jax.tree.structure(got) == jax.tree.structure(w)
    jax.tree.map(np.testing.assert_array_equal, got, w)


def test_published_matrices_are_out_by_in_with_batch_axes_in_the_rows(tree, tensors):
    c, w = tree
    rng = np.random.default_rng(0)
    layer = w["layers"]["layer2"]
    x = rng.standard_normal(c.q_lora_rank)
    queries = tensors["layers.2.attn.wq_b.weight"] @ x
    want = np.tensordot(x, layer["attn"]["wq_b"], 1)  # [heads, head_dim]
    np.testing.assert_allclose(queries, want.reshape(-1), rtol=1e-5)  # float32 products of 8 terms
    group = c.num_attention_heads // c.o_groups * c.head_dim
    x = rng.standard_normal((c.o_groups, group))
    rows = tensors["layers.2.attn.wo_a.weight"].reshape(c.o_groups, c.o_lora_rank, group)
    want = np.einsum("gi,gio->go", x, layer["attn"]["wo_a"])
    np.testing.assert_allclose(np.einsum("goi,gi->go", rows, x), want, rtol=1e-5)
    np.testing.assert_array_equal(tensors["layers.2.ffn.experts.3.w1.weight"], layer["ffn"]["experts"]["w1"][3].T)
    memory = w["layers"]["layer1"]["engram"]["wkv"]  # [in, copies + 1, D]: copy-major keys, then the value
    np.testing.assert_array_equal(tensors["layers.1.engram.wkv.weight"][-c.hidden_size :], memory[:, -1].T)


def test_layers_of_a_scan_are_published_by_their_own_numbers():
    c = tiny.T  # its two window layers are one scanned body
    w = jax.tree.map(np.asarray, tiny.weights(c))
    tensors = checkpoint.publish(c, w)
    stacked = w["layers"]["layer0"]["layer0"]["attn"]["wkv"]
    assert stacked.shape[0] == 2
    for i in range(2):
        np.testing.assert_array_equal(tensors[f"layers.{i}.attn.wkv.weight"], stacked[i].T)


def test_a_missing_tensor_is_named(tree, tensors):
    del tensors["layers.4.attn.indexer.wk.weight"]
    with pytest.raises(ValueError, match=r"lacks layers\.4\.attn\.indexer\.wk\.weight, shape \(4, 8\)"):
        checkpoint.adopt(tree[0], tensors)


def test_a_superfluous_tensor_is_named(tree, tensors):
    tensors["layers.0.attn.indexer.wk.weight"] = np.zeros((4, 8), np.float32)
    with pytest.raises(ValueError, match=r"1 tensors .*layers\.0\.attn\.indexer\.wk\.weight"):
        checkpoint.adopt(tree[0], tensors)


def test_a_misshapen_tensor_is_named(tree, tensors):
    name = "layers.2.attn.compressor.wkv.weight"
    tensors[name] = tensors[name].T  # [in, out] where [out, in] belongs
    with pytest.raises(ValueError, match=r"layers\.2\.attn\.compressor\.wkv\.weight: expected shape \(8, 16\)"):
        checkpoint.adopt(tree[0], tensors)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_weights_may_come_in_half_precision(tree, tensors, dtype):
    name = "layers.1.hc_attn_fn"
    tensors[name] = tensors[name].astype(jnp.dtype(dtype))
    got = checkpoint.adopt(tree[0], tensors)["layers"]["layer1"]["hc_attn_fn"]
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.T.reshape(tensors[name].shape), tensors[name].astype(np.float32))


@pytest.mark.parametrize("dtype", ["float64", "int32", "bool", "uint16", "complex64"])
def test_a_tensor_of_another_dtype_is_named(tree, tensors, dtype):
    name = "layers.3.attn.wq_a.weight"
    tensors[name] = tensors[name].astype(dtype)
    message = rf"layers\.3\.attn\.wq_a\.weight: expected a dtype of \['float32', .* got {dtype}: convert it"
    with pytest.raises(ValueError, match=message):
        checkpoint.adopt(tree[0], tensors)
