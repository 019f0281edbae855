"""Methods as text, and every part of quantwm switched by it: each of the paper's ablations."""

from __future__ import annotations

import json

import pytest
import torch

from quantwm.cache import CachePolicy, kmeans, make_format
from quantwm.cache.formats import split_method, split_methods, takes
from quantwm.cache.plan import Workload, plan
from quantwm.cli import main
from quantwm.errors import UserError
from quantwm.lanes import lanes_for
from quantwm.worlds.registry import world_spec
from tests.cache_helpers import SPEC, make_cache, run_chunk, same_bytes
from tests.test_study import make_tensors, write

SWITCHES = (
    "quantwm:qsac=false,psac=false",
    "quantwm:psac=false",
    "quantwm:qsac=false",
    "quantwm:rank=2",
    "quantwm:rank=16",
    "quantwm:rank=32",
    "quantwm:candidates=1",
    "quantwm:candidates=32",
    "quantwm:clip=0.65",
    "quantwm:full_moment=true",
)


@pytest.mark.parametrize(
    ("text", "name", "settings"),
    [
        ("qvg", "qvg", {}),
        ("qtc:small", "qtc", {"preset": "small"}),
        (
            "quantwm:rank=4,clip=0.7,psac=false",
            "quantwm",
            {"rank": 4, "clip": 0.7, "psac": False},
        ),
        ("quantwm:embedded, rank=2", "quantwm", {"preset": "embedded", "rank": 2}),
    ],
)
def test_a_method_is_a_name_and_settings(text, name, settings):
    assert split_method(text) == (name, settings)


def test_settings_belong_to_the_method_before_them():
    text = "bf16, quantwm:rank=4,clip=0.7, qtc:small,quantwm:embedded,rank=2,"
    assert split_methods(text) == (
        "bf16",
        "quantwm:rank=4,clip=0.7",
        "qtc:small",
        "quantwm:embedded,rank=2",
    )
    assert split_methods(" ,") == ()


@pytest.mark.parametrize("text", ["quantwm:", "quantwm:rank=", "qvg:a,b", "qvg:=2", "qvg:a=1,a=2"])
def test_a_method_that_is_not_one_is_refused(text):
    with pytest.raises(UserError, match="name, name:preset or name:setting=value"):
        split_method(text)


def test_values_are_checked_against_the_setting():
    with pytest.raises(UserError, match="rank must be int, got 'four'"):
        make_format(*split_method("quantwm:rank=four")[:1], **split_method("quantwm:rank=four")[1])
    assert takes("quantwm", "centroids") and not takes("bf16", "centroids")
    assert not takes("nothing", "centroids")


def test_lanes_take_methods_and_the_world_s_settings():
    spec = world_spec("embedded")
    lanes = lanes_for(spec, ["quantwm", "quantwm:rank=4,psac=False", "qvg:published"])
    assert [lane.name for lane in lanes] == [
        "quantwm",
        "quantwm-rank4-psacfalse",
        "qvg-published",
    ]
    assert lanes[1].settings == {"centroids": 64, "rank": 4, "psac": False}
    assert lanes[2].settings == {"preset": "published"}
    with pytest.raises(UserError, match="no setting 'ranks'"):
        lanes_for(spec, ["quantwm:ranks=4"])
    with pytest.raises(UserError, match="twice"):
        lanes_for(spec, ["quantwm:rank=4", "quantwm: rank = 4"])


def test_every_ablation_is_one_command(tmp_path, capsys):
    file = write(tmp_path / "a.safetensors", make_tensors(chunks=8, layers=(0,)))
    methods = ",".join(("qvg", "quantwm", *SWITCHES))
    command = ["study", str(file), "--methods", methods, "--chunk", "16", "--span", "64"]
    assert main([*command, "--centroids", "12"]) == 0
    found = _last_json(capsys)["methods"]
    assert [m["method"] for m in found] == ["qvg", "quantwm", *SWITCHES]
    by_name = {m["method"]: m for m in found}
    plain = by_name["quantwm"]
    for name in SWITCHES:
        if name != "quantwm:full_moment=true":
            assert by_name[name] != {**plain, "method": name}, name
    bits = [by_name[f"quantwm:rank={r}"]["bits_per_element"] for r in (2, 16, 32)]
    assert bits == sorted(bits) and bits[0] < plain["bits_per_element"] < bits[1]


def _last_json(capsys):
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_plan_takes_methods(capsys):
    numbers = ["--layers", "2", "--heads", "2", "--head-dim", "128", "--tokens", "9360"]
    methods = ["--span", "4680", "--methods", "quantwm,quantwm:rank=4,centroids=64,qvg"]
    assert main(["plan", *numbers, *methods]) == 0
    eight, four, _ = _last_json(capsys)["methods"]
    assert four["method"] == "quantwm:rank=4,centroids=64"
    assert four["bytes"]["coefficients"] * 10 == eight["bytes"]["coefficients"] * 6
    assert four["bytes"]["codebooks"] * 4 == eight["bytes"]["codebooks"]


def test_the_whole_moment_chooses_by_the_whole_moment():
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, 30, 8, generator=generator)
    centroids = torch.randn(2, 12, 8, generator=generator)
    mixed = torch.randn(2, 8, 8, generator=generator)
    moment = mixed @ mixed.transpose(1, 2)
    moment *= 8 / moment.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]
    found = kmeans.assign_qsac(x, centroids, moment, 4, 1)
    apart = x.unsqueeze(2) - centroids.unsqueeze(1)
    wanted = torch.einsum("hnkc,hcd,hnkd->hnk", apart, moment, apart).argmin(-1)
    assert torch.equal(found.long(), wanted)
    weights = moment.diagonal(dim1=1, dim2=2)
    assert not torch.equal(found, kmeans.assign_qsac(x, centroids, weights, 4, 1))
    whole = kmeans.assign_qsac(x, centroids, torch.diag_embed(weights), 4, 3)
    assert torch.equal(whole, kmeans.assign_qsac(x, centroids, weights, 4, 3))


def test_the_whole_moment_is_counted_and_planned():
    settings = {"centroids": 1, "group_size": 8, "rank": 1, "full_moment": True}
    policy = CachePolicy(span_tokens=12, recent_chunks=1)
    cache, plain = (
        make_cache("quantwm", policy, settings={**settings, "full_moment": full})
        for full in (True, False)
    )
    for _ in range(9):
        run_chunk(cache)
        run_chunk(plain)
    cache.evict(2)
    found = plan({"quantwm": settings}, Workload.of_policy(SPEC, policy, cache.tokens, 4))
    assert found.methods[0].bytes["statistics"] == cache.ledger().parts["statistics"]
    assert cache.fmt.full_moment and not plain.fmt.full_moment


def test_clip_narrows_the_levels():
    whole, clipped = (
        make_cache("quantwm", settings={"centroids": 4, "group_size": 8, "clip": c})
        for c in (1.0, 0.6)
    )
    for cache in (whole, clipped):
        run_chunk(cache)
    assert not same_bytes(whole, clipped)
