"""Second moments in 16 bits an entry: close, definite after many chunks, the size that is said."""

from __future__ import annotations

import torch
from qtc_helpers import CPU, randn

from quantwm.cache.formats.qtc_correlations import Correlations, correlation_bytes
from quantwm.cache.formats.qtc_metric import metric


def test_a_moment_is_what_was_put_in() -> None:
    """Whatever the scales of channels: half a step of each pair's deviations at most."""
    x = randn(2, 300, 24) * torch.logspace(-9, 6, 24)
    wanted = x.mT @ x / 300
    found = Correlations.of(wanted).matrix()
    apart = wanted.diagonal(dim1=1, dim2=2).sqrt()
    apart = (found - wanted).abs() / apart[:, :, None] / apart[:, None, :]
    assert float(apart.max()) < 0.51 / 32767 + 1e-6
    assert float(apart.diagonal(dim1=1, dim2=2).max()) < 1e-6


def test_still_channels_and_nothing_at_all() -> None:
    x = randn(1, 50, 8)
    x[..., 3] = 0.0
    for wanted in (x.mT @ x, torch.zeros(1, 8, 8)):
        found = Correlations.of(wanted).matrix()
        torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-4)


def test_it_grows_to_the_mean_of_all() -> None:
    chunks = [randn(2, n, 16, seed=n) * (1 + n / 10) for n in (5, 40, 7)]
    found, known = Correlations.empty(CPU), 0
    for x in chunks:
        found, known = found.grown(x.mT @ x, known, x.shape[1]), known + x.shape[1]
    every = torch.cat(chunks, 1)
    torch.testing.assert_close(found.matrix(), every.mT @ every / known, atol=2e-3, rtol=1e-3)


def test_queries_along_one_line_of_large_channels_keep_the_metric_definite() -> None:
    """Four channels have all the energy and go together; rounded 400 times over. The ridge is 0.05;
    half-precision numbers leave 0.044 of it."""
    line = torch.zeros(1, 1, 128)
    line[..., 5:9] = torch.tensor([3.0, -2.0, 2.5, 1.7])
    found, known = Correlations.empty(CPU), 0
    for chunk in range(400):
        q = line * randn(1, 30, 1, seed=chunk) + 1e-3 * randn(1, 30, 128, seed=1000 + chunk)
        found, known = found.grown(q.mT @ q, known, 30), known + 30
    values = torch.linalg.eigvalsh(metric(found.matrix(), None, 0))
    assert float(values.min()) > 0.0495


def test_a_late_chunk_still_teaches() -> None:
    first, second = randn(1, 500, 16), randn(1, 500, 16, seed=1)
    second[..., 1] = second[..., 0]
    found = Correlations.of(first.mT @ first / 500)
    for chunk in range(500, 1000):
        found = found.grown(second.mT @ second, 500 * chunk, 500)
    assert abs(float(found.matrix()[0, 0, 1]) - 0.5) < 0.06


def test_bytes_are_the_bytes() -> None:
    found = Correlations.of(randn(3, 20, 20))
    held = sum(t.numel() * t.element_size() for t in found.tensors())
    assert held == correlation_bytes(3, 20)
    joined = Correlations.joined([found, found])
    assert torch.equal(joined.matrix()[3:], found.matrix())
