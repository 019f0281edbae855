"""The study's numbers against a plain re-computation, and checks of recorded files."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import quantwm.study as study_module
from quantwm.cache.formats import make_format
from quantwm.cache.kv_cache import KVCache
from quantwm.cache.spec import CachePolicy, CacheSpec, RopeLayout
from quantwm.errors import UserError
from quantwm.study import compare_reads, study, study_spec
from quantwm.tensor_files import TensorRecorder, default_layers, load_tensors

HEADS, CHUNK, DIM = 2, 8, 64
SETTINGS = {"qvg": {"centroids": 4}, "quantwm": {"centroids": 4}}


def make_tensors(chunks=4, layers=(0, 3)) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (HEADS, chunks * CHUNK, DIM)
    return {
        f"layer{layer}.{part}": torch.randn(shape, generator=generator).bfloat16()
        for layer in layers
        for part in "qkv"
    }


def write(path, tensors=None, **metadata):
    save_file(
        make_tensors() if tensors is None else tensors, path, {"chunk_tokens": "8"} | metadata
    )
    return path


def run(path, methods=("bf16", "qvg", "quantwm"), span=16):
    loaded = load_tensors(path)
    return study(loaded, methods, chunk=CHUNK, span=span, settings=SETTINGS)


def test_bf16_changes_nothing(tmp_path):
    (result,) = run(write(tmp_path / "a.safetensors"), ["bf16"])
    assert (result.bits_per_element, result.ratio) == (16.0, 1.0)
    assert result.k_rel_mse == result.v_rel_mse == result.logit_mse == 0
    assert result.token_shift == result.attention_output_rel_mse == 0


@pytest.mark.parametrize("method", ["qvg", "quantwm"])
def test_against_a_plain_computation(tmp_path, method):
    tensors = make_tensors(chunks=3, layers=(2,))
    (result,) = run(write(tmp_path / "a.safetensors", tensors), [method])
    q, k, v = (tensors[f"layer2.{part}"] for part in "qkv")
    spec = CacheSpec(1, HEADS, DIM, CHUNK, 1)
    fmt = make_format(method, **SETTINGS[method])
    cache = KVCache(spec, fmt, CachePolicy(span_tokens=16))
    logit, shift, output = [], [], []
    for number in range(3):
        now = slice(number * CHUNK, (number + 1) * CHUNK)
        if number:
            past_k, past_v = (x.double().numpy() for x in cache.history(0))
            found = plain(
                *(x.double().numpy() for x in (q[:, now], k[:, : now.stop], v[:, : now.stop])),
                past_k,
                past_v,
            )
            for values, value in zip((logit, shift, output), found, strict=True):
                values.append(value)
        cache.begin_chunk(number, 1)
        cache.attend(0, q[:, now], k[:, now], v[:, now], clean=True)
        cache.finalize_chunk()
    kept_k, kept_v = cache.history(0)
    assert result.logit_mse == pytest.approx(np.mean(logit), rel=1e-4)
    assert result.token_shift == pytest.approx(np.mean(shift))
    assert result.attention_output_rel_mse == pytest.approx(np.mean(output), rel=1e-4)
    assert result.k_rel_mse == pytest.approx(relative(k, kept_k), rel=1e-5)
    assert result.v_rel_mse == pytest.approx(relative(v, kept_v), rel=1e-5)
    assert 0 < result.token_shift < 1
    assert result.ratio == cache.ledger().nominal_ratio


def plain(q, k, v, past_k, past_v):
    """One chunk's three numbers, one query at a time, in float64."""
    squares, shifts, power, error = [], 0, 0.0, 0.0
    heads, queries, dim = q.shape
    past = past_k.shape[1]
    for h in range(heads):
        for i in range(queries):
            scores = k[h] @ q[h, i] / dim**0.5
            changed = scores.copy()
            changed[:past] = past_k[h] @ q[h, i] / dim**0.5
            change = changed[:past] - scores[:past]
            squares.append(np.mean((change - change.mean()) ** 2))
            shifts += np.argmax(scores[:past]) != np.argmax(changed[:past])
            weights = [np.exp(s - s.max()) / np.exp(s - s.max()).sum() for s in (scores, changed)]
            values = np.concatenate((past_v[h], v[h, past:]))
            exact, approximate = weights[0] @ v[h], weights[1] @ values
            power += (exact**2).sum()
            error += ((exact - approximate) ** 2).sum()
    return np.mean(squares), shifts / (heads * queries), error / power


def relative(exact, approximate):
    exact, approximate = exact.double(), approximate.double()
    return float((exact - approximate).square().sum() / exact.square().sum())


def test_bits_count_everything_stored(tmp_path):
    _, qvg, quantwm = run(write(tmp_path / "a.safetensors"))
    # per token and head: 2-bit codes, an E4M3 scale for the group of 64, a uint8 id; a span of 16
    # tokens pays for 4 BF16 centroids
    want = 2 + 8 / 64 + 8 / 64 + 4 * 16 / 16
    assert qvg.bits_per_element == qvg.resident_bits_per_element == pytest.approx(want)
    assert qvg.ratio == pytest.approx(16 / want)
    assert quantwm.resident_bits_per_element > quantwm.bits_per_element  # the query statistics


def test_strictly_causal(tmp_path):
    # the last chunk's keys and values are nobody's history: they change no score error
    tensors = make_tensors()
    first = run(write(tmp_path / "a.safetensors", tensors), ["quantwm"])[0]
    for name, tensor in tensors.items():
        if not name.endswith("q"):
            tensor[:, -CHUNK:] *= 3
    second = run(write(tmp_path / "b.safetensors", tensors), ["quantwm"])[0]
    assert (first.logit_mse, first.token_shift) == (second.logit_mse, second.token_shift)
    assert first.k_rel_mse != second.k_rel_mse


def test_geometry_comes_from_the_file(tmp_path):
    loaded = load_tensors(write(tmp_path / "a.safetensors", tokens_per_frame="4"))
    spec = study_spec(loaded, 8)
    assert (spec.layers, spec.heads, spec.head_dim) == (2, HEADS, DIM)
    assert (spec.tokens_per_frame, spec.frames_per_chunk) == (4, 2)
    for wrong in (0, 32, 40):
        with pytest.raises(UserError, match=rf"chunk {wrong} .* 2 or more .* recorded with 8"):
            study_spec(loaded, wrong)


def test_the_last_chunk_may_be_shorter(tmp_path):
    tensors = make_tensors(chunks=3, layers=(0,))
    file = write(tmp_path / "a.safetensors", tensors, tokens_per_frame="4")
    whole = study_spec(load_tensors(file), 16)  # 16 and 8 tokens, 4 and 2 frames
    assert (whole.tokens_per_frame, whole.frames_per_chunk) == (4, 4)
    cut = study_spec(load_tensors(file), 10)  # 10, 10 and 4 tokens: frames are cut
    assert (cut.tokens_per_frame, cut.frames_per_chunk) == (2, 5)
    for chunk in (16, 10, 7):
        (bf16, quantwm) = study(
            load_tensors(file), ["bf16", "quantwm"], chunk=chunk, span=16, settings=SETTINGS
        )
        assert bf16.logit_mse == 0.0 and bf16.bits_per_element == 16.0
        assert 0 < quantwm.k_rel_mse < 0.5


def test_scores_in_blocks_are_the_scores_of_all(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 9, 16, generator=generator) for _ in range(3))
    past, decoded = ([torch.randn(2, 20, 16, generator=generator)] * 2 for _ in range(2))
    whole = compare_reads(q, (k, v), past, decoded)
    monkeypatch.setattr(study_module, "SCORE_ELEMENTS", 2 * 29)
    assert compare_reads(q, (k, v), past, decoded) == pytest.approx(whole, rel=1e-6)


def test_rope_comes_from_the_metadata(tmp_path):
    rope = {"rope_split_thw": "24,20,20", "grid_hw": "2,2", "tokens_per_frame": "4"}
    loaded = load_tensors(write(tmp_path / "a.safetensors", **rope))
    assert study_spec(loaded, 8).rope == RopeLayout((24, 20, 20), (2, 2), 10000.0)
    assert study_spec(load_tensors(write(tmp_path / "b.safetensors")), 8).rope is None
    for bad in ({"rope_split_thw": "24,20"}, {"grid_hw": "x,2"}, {"grid_hw": "2,3"}):
        with pytest.raises(UserError):
            study_spec(load_tensors(write(tmp_path / "c.safetensors", **(rope | bad))), 8)


def test_unknown_method(tmp_path):
    with pytest.raises(UserError, match=r"unknown method 'x'; there are bf16"):
        run(write(tmp_path / "a.safetensors"), ["x"])


def broken(change):
    tensors = make_tensors()
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.clear(), "holds no tensor"),
        (lambda t: t.pop("layer3.v"), "layer3.v is missing"),
        (lambda t: t.update({"layerx.q": t["layer0.q"].clone()}), "unknown tensor 'layerx.q'"),
        (lambda t: t.update({"layer0.v": t["layer0.v"][:, :8].clone()}), "all have one shape"),
        (lambda t: t.update({"layer0.k": t["layer0.k"][0].clone()}), "[heads, tokens, head_dim]"),
        (lambda t: t["layer3.q"].fill_(float("nan")), "layer3.q holds NaN"),
        (lambda t: t["layer3.k"][0, 0].fill_(float("inf")), "layer3.k holds NaN or infinite"),
        (
            lambda t: t.update({"layer0.q": t["layer0.q"].to(torch.int16)}),
            "layer0.q is torch.int16",
        ),
    ],
)
def test_broken_tensors(tmp_path, change, words):
    path = write(tmp_path / "a.safetensors", broken(change))
    with pytest.raises(UserError) as caught:
        load_tensors(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_keys_before_rope_are_refused(tmp_path):
    with pytest.raises(UserError, match="before RoPE"):
        load_tensors(write(tmp_path / "a.safetensors", rope="pre"))


def header(document) -> bytes:
    text = json.dumps(document).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 2**62) + b"{}",
        header([]),
        header({"layer0.q": {"dtype": "BF16", "shape": [1, 2, 3], "data_offsets": [0, 12]}}),
        header({"layer0.q": {"dtype": "X", "shape": [1], "data_offsets": [0, 2]}}) + b"\0\0",
        header({"layer0.q": {"dtype": "BF16", "shape": [2**62, 4], "data_offsets": [0, 8]}}),
    ],
)
def test_broken_files(tmp_path, data):
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        load_tensors(path)
    assert "\n" not in str(caught.value)


def test_truncated_file(tmp_path):
    path = write(tmp_path / "a.safetensors")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load_tensors(path)


def test_recorder_keeps_clean_passes_only(tmp_path):
    tensors = make_tensors(chunks=2, layers=(0,))
    rope = RopeLayout((24, 20, 20), (2, 4), 500.0)
    spec = CacheSpec(1, HEADS, DIM, CHUNK, 1, rope=rope)
    cache = KVCache(spec, make_format("bf16"), CachePolicy())
    recorder = TensorRecorder((0,))
    with pytest.raises(UserError, match="nothing was recorded"):
        recorder.save(tmp_path / "b.safetensors")
    recording = recorder.attach(cache, spec)
    for number in range(2):
        now = slice(number * CHUNK, (number + 1) * CHUNK)
        parts = [tensors[f"layer0.{part}"][:, now] for part in "qkv"]
        recording.begin_chunk(7 + number, 1)
        recording.attend(0, *(x + 1 for x in parts))
        recording.attend(0, *parts, clean=True)
        recording.finalize_chunk()
    assert recorder.tokens == recording.tokens == 2 * CHUNK
    recorder.save(tmp_path / "b.safetensors")
    loaded = load_tensors(tmp_path / "b.safetensors")
    for part in "qkv":
        assert torch.equal(loaded.layers[0][part], tensors[f"layer0.{part}"])
    assert loaded.metadata_int("chunk_tokens") == CHUNK
    assert loaded.metadata_int("first_frame") == 7
    assert loaded.rope() == rope


def test_default_layers():
    assert default_layers(10) == (0, 5, 9)
    assert default_layers(2) == (0, 1)
    assert default_layers(1) == (0,)


def test_recorded_episode(shared_dir):
    loaded = load_tensors(shared_dir / "tensors" / "doom_rooms_a.safetensors")
    assert list(loaded.layers) == [0, 5, 9]
    assert loaded.shape == (3, 3840, 128)
    assert loaded.metadata_int("chunk_tokens") == 192
