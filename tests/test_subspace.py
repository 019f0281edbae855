"""Leading directions by subspace iteration: against eigh, on made and on recorded moments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantwm.cache import reference
from quantwm.cache.statistics import QueryStatistics, moment
from quantwm.cache.subspace import leading, orthonormal, small_eigh
from quantwm.tensor_files import RecordedTensors, load_tensors
from tests.host_syncs import HostSyncs

CHUNK = 192


def _symmetric(size: int, seed: int = 0, count: int = 5) -> Tensor:
    x = torch.randn(count, size, size, generator=torch.Generator().manual_seed(seed))
    return x @ x.transpose(1, 2) / size


@pytest.mark.parametrize("size", [1, 2, 3, 7, 12, 16])
def test_jacobi_rotations_solve_small_matrices(size: int) -> None:
    matrices = _symmetric(size)
    vectors, values = small_eigh(matrices, sweeps=10)
    wanted = torch.linalg.eigvalsh(matrices).flip(-1)
    torch.testing.assert_close(values, wanted, atol=1e-4, rtol=1e-4)
    again = vectors @ torch.diag_embed(values) @ vectors.transpose(1, 2)
    torch.testing.assert_close(again, matrices, atol=1e-4, rtol=1e-4)


def test_equal_diagonals_are_turned() -> None:
    _, values = small_eigh(torch.tensor([[[1.0, 0.5], [0.5, 1.0]]]))
    torch.testing.assert_close(values, torch.tensor([[1.5, 0.5]]))


def test_columns_become_orthonormal_and_explained_ones_zero() -> None:
    y = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(1))
    q = orthonormal(y)
    torch.testing.assert_close(q.transpose(1, 2) @ q, torch.eye(3).expand(2, 3, 3))
    assert not orthonormal(torch.zeros(1, 8, 3)).any()


def test_a_zero_matrix_gives_zero_columns_and_a_warm_start_leaves_them() -> None:
    basis, values = leading(torch.zeros(2, 8, 8), 3)
    assert not basis.any() and not values.any()
    moments = torch.diag_embed(torch.tensor([[9.0, 4, 1, 0, 0, 0, 0, 0]])).expand(2, 8, 8)
    warm, values = leading(moments, 3, basis)
    torch.testing.assert_close(values, torch.tensor([[9.0, 4, 1]]).expand(2, 3), rtol=1e-4, atol=0)
    torch.testing.assert_close(warm.square().sum(1), torch.ones(2, 3), rtol=1e-4, atol=0)


def test_nothing_is_read_back() -> None:
    statistics = QueryStatistics(2, 2, 32, torch.device("cpu"))
    q = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(3))
    statistics.fold({0: moment(q), 1: moment(q + 1)}, 40)
    with HostSyncs() as seen:
        basis, _ = statistics.bases(4)
        statistics.bases(4, basis)
        torch.linalg.eigh(statistics.moments)  # what it replaces: this one is seen
    assert seen.names == ["_linalg_eigh"]


@pytest.fixture(scope="module")
def recorded(shared_dir: Path) -> RecordedTensors:
    return load_tensors(shared_dir / "tensors" / "doom_rooms_a.safetensors")


def _moments(recorded: RecordedTensors, chunks: int) -> Tensor:
    """Mean moment of the first chunks, [layers * heads, D, D]."""
    queries = torch.cat([layer["q"][:, : chunks * CHUNK] for layer in recorded.layers.values()])
    return moment(queries) / (chunks * CHUNK)


@pytest.mark.parametrize("rank", [4, 8, 32])
def test_recorded_moments_have_the_subspace_of_eigh(recorded: RecordedTensors, rank: int) -> None:
    """Cold after the first chunk, then warm every 4 chunks, as spans open."""
    basis = None
    for chunks in (1, 5, 9, 13, 17):
        moments = _moments(recorded, chunks)
        basis, values = leading(moments, rank, basis)
        wanted, vectors = torch.linalg.eigh(moments.double())
        energy = (basis.double() * (moments.double() @ basis.double())).sum((1, 2))
        most = wanted[:, -rank:].sum(-1)
        assert float((1 - energy / most).max()) < 2e-3
        torch.testing.assert_close(values.double().sum(-1), most, rtol=2e-3, atol=0)
        outside = (
            1 - (vectors[..., -rank:].transpose(1, 2) @ basis.double()).square().sum((1, 2)) / rank
        )
        # Where eigenvalues lie close together, directions may be exchanged at no cost in energy.
        assert float(outside.mean()) < 0.02
        basis = basis.to(torch.bfloat16)


def test_corrected_keys_are_as_good_as_with_eigh(recorded: RecordedTensors) -> None:
    """The query-weighted error after PSAC is within 1 % of what eigh's basis leaves."""
    moments = _moments(recorded, 16)
    keys = torch.cat([layer["k"][:, 16 * CHUNK : 17 * CHUNK] for layer in recorded.layers.values()])
    centroids = keys.float().mean(1, keepdim=True).to(torch.bfloat16)
    ids = torch.zeros(keys.shape[:2], dtype=torch.uint8)
    values, vectors = torch.linalg.eigh(moments)
    exact = vectors[..., -8:].flip(-1), values[..., -8:].flip(-1)
    start = leading(_moments(recorded, 4), 8)[0]

    def error(basis: Tensor, eigenvalues: Tensor) -> float:
        basis = basis.to(torch.bfloat16).contiguous()
        span = reference.encode_quantwm(keys, ids, centroids, 64, 1.0, basis, eigenvalues)
        codes, scales, secondary, zeros, rows, row_scales = span
        out = torch.empty(keys.shape)
        stops = torch.tensor([CHUNK], dtype=torch.int32)
        reference.decode_quantwm_into(
            out, 0, codes, ids, centroids, scales, secondary[:, None], stops, zeros, 64,
            rows, row_scales, basis, 0, 0, CHUNK,
        )  # fmt: skip
        off = keys.float() - out
        return float((off @ moments * off).sum())

    assert error(*leading(moments, 8)) < 1.01 * error(*exact)
    assert error(*leading(moments, 8, start)) < 1.01 * error(*exact)
