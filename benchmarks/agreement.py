"""Do the kernels agree with the reference: bit for bit, or is the difference a rounding tie.

Each function takes `ops` (the `Ops` protocol), runs it on the inputs' device and compares with
quantwm.cache.reference: bits with the CPU's (a GPU divides by a constant less exactly), sums with
what the inputs' device gives in float32 and float64. Where sums are added in another order, a
differing choice is accepted only if float64 arithmetic shows a tie. `Disagreement` names what
differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantwm.cache import reference
from quantwm.cache.dispatch import Ops
from quantwm.cache.pack import unpack

# Distances in float32 against two BF16 parts of w * mu: 2^-17 of the larger terms, with margin.
DISTANCE_TIE = 1e-4
SCORE_TIE = 1e-5
# A float32 sum of 128 products is off by a few units of 2^-23 of its largest term.
CODE_TIE = 1e-3
DIFFERENT_SHARE = 0.01


class Disagreement(AssertionError):
    """The kernels and the reference differ by more than a tie."""


def require(condition: object, message: str) -> None:
    if not bool(condition):
        raise Disagreement(message)


def relative_error(mine: Tensor, wanted: Tensor) -> float:
    """Frobenius norm of the difference over that of what is wanted, head by head in float64."""
    pairs = list(zip(mine, wanted, strict=True))
    off = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return (off / sum(float(b.double().square().sum()) for _, b in pairs)) ** 0.5


@dataclass(frozen=True)
class Case:
    """Inputs of one comparison, all on one device.

    x: bfloat16 [H, N, D], centroids bfloat16 [H, K, D], weights float32 [H, D] of mean 1, basis
    bfloat16 [H, D, r], eigenvalues float32 [H, r].
    """

    x: Tensor
    centroids: Tensor
    weights: Tensor
    basis: Tensor
    eigenvalues: Tensor
    group_size: int


def make_case(
    heads: int, tokens: int, dim: int, count: int, group_size: int, rank: int,
    device: torch.device | str, seed: int = 0, extremes: bool = True,
) -> Case:  # fmt: skip
    """Clustered keys with outlier channels; extremes: an exact hit, a huge and a tiny residual."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    means = normal(heads, count, dim) * 2
    pick = torch.randint(0, count, (heads, tokens), generator=generator)
    chosen = means.gather(1, pick.unsqueeze(-1).expand(-1, -1, dim))
    outliers = 1 + 4 * (torch.rand(heads, 1, dim, generator=generator) > 0.9)
    x = (chosen + normal(heads, tokens, dim) * outliers).to(torch.bfloat16)
    centroids = means.to(torch.bfloat16)
    if extremes:
        x[:, 0] = centroids[:, 0]
    if extremes and tokens > 2:
        x[:, 1] = centroids[:, 0] * 900
        x[:, 2] = (centroids[:, 0].float() * (1 + 2.0**-7)).to(torch.bfloat16)
    weights = torch.rand(heads, dim, generator=generator) * 2 + 0.05
    weights /= weights.mean(dim=1, keepdim=True)
    basis = torch.linalg.qr(normal(heads, dim, rank))[0].to(torch.bfloat16).contiguous()
    eigenvalues = torch.rand(heads, rank, generator=generator).sort(descending=True).values
    if extremes and heads > 1:
        eigenvalues[-1] = 0  # nothing to gain there: the gate refuses every row
    # The view is as an attention layer hands it over: heads inside tokens.
    x = x.transpose(0, 1).contiguous().to(device).transpose(0, 1)
    return Case(
        x, centroids.to(device), weights.to(device), basis.to(device), eigenvalues.to(device),
        group_size,
    )  # fmt: skip


def agree_assign(ops: Ops, case: Case) -> Tensor:
    """Nearest centroids, for BF16 centroids and for float32 means. Returns the BF16 ids."""
    for centroids in (case.centroids.float() * 1.001, case.centroids):
        ids = ops.assign(case.x, centroids)
        expected = reference.assign(case.x, centroids)
        _assignment_ties(case.x, centroids, ids, expected, None, 1, 0)
    return ids


def agree_qsac(ops: Ops, case: Case, candidates: int = 4) -> None:
    given = (case.x, case.centroids, case.weights, case.group_size, candidates)
    ids, expected = ops.assign_qsac(*given), reference.assign_qsac(*given)
    _assignment_ties(
        case.x, case.centroids, ids, expected, case.weights, candidates, case.group_size
    )


def agree_on_equal_centroids(ops: Ops, case: Case) -> None:
    """Of two equal centroids the one with the smaller index is taken.

    On small whole numbers, whose sums are exact in any order, so that the distances are equal.
    """
    count = min(case.centroids.shape[1], 128)
    x, means = (t.float().round().clamp(-8, 8).to(t.dtype) for t in (case.x, case.centroids))
    twice = torch.cat((means[:, :count],) * 2, dim=1)
    weights = torch.where(case.weights > 1, 2.0, 0.5)
    plain = ops.assign(x, twice)
    ranged = ops.assign_qsac(x, twice, weights, case.group_size, 4)
    require((plain < count).all(), "assign took the later of two equal centroids")
    require((ranged < count).all(), "assign_qsac took the later of two equal centroids")


def _assignment_ties(
    x: Tensor, centroids: Tensor, ids: Tensor, expected: Tensor, weights: Tensor | None,
    candidates: int, group_size: int,
) -> None:  # fmt: skip
    """Every id that differs must be one that exact arithmetic cannot tell from the expected."""
    require(int(ids.max()) < centroids.shape[1], "an id names no centroid")
    heads, tokens = (ids != expected).nonzero(as_tuple=True)
    require(
        len(heads) <= max(2, DIFFERENT_SHARE * ids.numel()),
        f"{len(heads)} of {ids.numel()} ids differ",
    )
    for head, token in zip(heads[:2000].split(50), tokens[:2000].split(50), strict=True):
        mu, key = centroids[head].double(), x[head, token].double().unsqueeze(1)
        w = torch.ones_like(key) if weights is None else weights[head].double().unsqueeze(1)
        r = key - mu
        distance = (r.square() * w).sum(-1)
        norm = (mu.square() * w).sum(-1).amax(1)
        slack = DISTANCE_TIE * (norm + (key.square() * w).sum((1, 2)))
        mine = ids[head, token].long().unsqueeze(1)
        last = distance.sort(1).values[:, min(candidates, distance.shape[1]) - 1]
        far = distance.gather(1, mine).squeeze(1) > last + slack
        require(not far.any(), f"{int(far.sum())} ids are too far, head {head[far][:1].tolist()}")
        if candidates > 1:
            groups = r.unflatten(-1, (-1, group_size))
            spread = (groups.amax(-1) - groups.amin(-1)).square()
            score = (spread * w.unflatten(-1, (-1, group_size)).sum(-1)).sum(-1)
            sure = distance < (last - slack).unsqueeze(1)
            bound = score.masked_fill(~sure, torch.inf).amin(1)
            worse = score.gather(1, mine).squeeze(1) > bound * (1 + SCORE_TIE)
            require(not worse.any(), f"{int(worse.sum())} ids do not score best")


def agree_update(ops: Ops, case: Case, ids: Tensor) -> None:
    """Means against float64, an empty cluster untouched, two runs bit for bit the same."""
    first = ops.update(case.x, ids, case.centroids.float())
    require(torch.equal(first, ops.update(case.x, ids, case.centroids.float())), "two updates")
    x, centroids = case.x.double(), case.centroids.double()
    index = ids.long().unsqueeze(-1)
    sums = torch.zeros_like(centroids).scatter_add_(1, index.expand_as(x), x)
    counts = torch.zeros(*centroids.shape[:2], 1, dtype=torch.double, device=x.device)
    counts.scatter_add_(1, index, torch.ones_like(index, dtype=torch.double))
    means = torch.where(counts > 0, sums / counts.clamp(min=1), centroids)
    error = (first.double() - means).abs() / (x.abs().amax() + 1)
    require(error.max() < 1e-5, f"centroid means are off by {float(error.max())} of the range")
    empty = (counts == 0).expand_as(means)
    require(bool((error[empty] == 0).all()), "an empty cluster changed its centroid")


def agree_encode_qvg(ops: Ops, case: Case, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Bit for bit. Returns what `ops` gave."""
    codes, scales = ops.encode_qvg(case.x, ids, case.centroids, case.group_size)
    wanted = reference.encode_qvg(case.x.cpu(), ids.cpu(), case.centroids.cpu(), case.group_size)
    same_bytes("qvg codes", codes, wanted[0])
    same_bytes("qvg scales", scales.view(torch.uint8), wanted[1].view(torch.uint8))
    return codes, scales


def agree_encode_quantwm(
    ops: Ops, case: Case, ids: Tensor, clip: float = 1.0
) -> tuple[Tensor, ...]:
    """Codes, scales and zeros bit for bit; PSAC rows as exact arithmetic allows."""
    plain = ops.encode_quantwm(case.x, ids, case.centroids, case.group_size, clip, None, None)
    full = ops.encode_quantwm(
        case.x, ids, case.centroids, case.group_size, clip, case.basis, case.eigenvalues
    )
    wanted = reference.encode_quantwm(
        case.x.cpu(), ids.cpu(), case.centroids.cpu(), case.group_size, clip, None, None
    )
    for name, mine, other, expected in zip(
        ("codes", "scales", "secondary", "zeros"), full, plain, wanted, strict=False
    ):
        same_bytes(f"quantwm {name}", mine, expected)
        same_bytes(f"quantwm {name} without PSAC", other, expected)
    require(plain[4] is None and plain[5] is None, "PSAC rows without a basis")
    _psac_rows(case, ids, full)
    return full


def _psac_rows(case: Case, ids: Tensor, packed: tuple[Tensor, ...]) -> None:
    """INT8 rows against float64: the FP16 scale, the rounding and the gate, up to ties."""
    codes, scale_codes, secondary, zeros, rows, row_scales = packed
    heads, tokens, dim = case.x.shape
    groups = dim // case.group_size
    centroids, basis = case.centroids.float(), case.basis.double()
    residual = case.x.float() - centroids.gather(
        1, ids.long().unsqueeze(-1).expand(heads, tokens, dim)
    )
    levels = unpack(codes, dim).float().unflatten(-1, (groups, case.group_size))
    zero = unpack(zeros, tokens * groups).float().view(heads, tokens, groups, 1)
    # Through float64, because a GPU's float32 division by a constant is not correctly rounded.
    unit = (secondary.double() / 255).float()[:, None, None]
    scale = (scale_codes.float() * unit).unsqueeze(-1)
    error = residual - ((levels - zero) * scale).flatten(-2)
    exact = torch.bmm(error.double(), basis)
    largest = exact.abs().amax(-1) / 127
    stored = row_scales.double()
    kept = stored > 0
    off = ((stored - largest).abs() > largest * 2.0**-11 * (1 + CODE_TIE) + 2.0**-24) & kept
    require(not off.any(), f"{int(off.sum())} PSAC row scales are not FP16(max / 127)")
    step = torch.where(kept, stored, largest.to(torch.float16).double()).unsqueeze(-1)
    ratio = torch.where(step > 0, exact / step, 0.0)
    distance = (ratio.clamp(-127, 127) - rows.double()).abs()
    off = (distance > 0.5 + CODE_TIE) & kept.unsqueeze(-1)
    require(not off.any(), f"{int(off.sum())} PSAC coefficients are not the nearest integer")
    require(not rows[~kept].any(), "a refused PSAC row is not zero")
    rounded = torch.floor(ratio + 0.5).clamp(-127, 127)
    terms = case.eigenvalues.double().unsqueeze(1)
    gain = ((exact.square() - (exact - rounded * step).square()) * terms).sum(-1)
    energy = (exact.square() * terms).sum(-1)
    off = ((gain > 0) != kept) & (gain.abs() >= CODE_TIE * energy)
    require(not off.any(), f"the PSAC gate is wrong in {int(off.sum())} rows")


def agree_decode(
    ops: Ops, case: Case, ids: Tensor, qvg: tuple[Tensor, Tensor], quantwm: tuple[Tensor, ...],
    truncates: bool,
) -> None:  # fmt: skip
    """Ranges of both formats into a longer buffer; nothing beside the range is touched.

    truncates: the interpreter cuts float32 to BF16 where a GPU rounds to nearest.
    """
    launches = launches_of(truncates)
    tokens = case.x.shape[1]
    start, stop, offset = tokens // 5, tokens - tokens // 7, 3
    chunks = _two_chunks(quantwm, tokens)
    first = tokens // 3
    correction = (
        quantwm[4][:, first:].contiguous(), quantwm[5][:, first:].contiguous(), case.basis,
    )  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        for corrected in (None, False, True):
            outs = []
            for target, device in ((ops, case.x.device), (reference, torch.device("cpu"))):
                out = torch.full(
                    (case.x.shape[0], tokens + 5, case.x.shape[2]), torch.nan, dtype=dtype
                ).to(device)
                tail: tuple[object, ...]
                if corrected is None:
                    head, tail = (qvg[0], ids, case.centroids, qvg[1]), ()
                    prepare = target.prepare_qvg
                else:
                    head = (quantwm[0], ids, case.centroids, quantwm[1], *chunks, quantwm[3])
                    tail = (*correction, first) if corrected else (None, None, None, 0)
                    prepare = target.prepare_quantwm
                span = (*head, case.group_size, *tail)
                moved = (a.to(device) if isinstance(a, Tensor) else a for a in span)
                decode = prepare(*moved)
                for _ in range(launches):
                    decode(out, offset, start, stop)
                outs.append(out.cpu())
            label = f"decode {'qvg' if corrected is None else 'quantwm'}, PSAC {corrected}"
            mine, wanted = in_range(f"{label}, {dtype}", *outs, offset, stop - start)
            exact = not corrected and (dtype == torch.float32 or not truncates)
            same_values(f"{label}, {dtype}", mine, wanted, exact, dtype == torch.bfloat16)


def launches_of(interpreted: bool) -> int:
    """A kernel's first launch goes another way than the later ones, but not in the interpreter."""
    return 1 if interpreted else 2


def agree_copy(ops: Ops, case: Case, truncates: bool) -> None:
    """Ranges copied from strided and from plain keys, alone and in pairs, to both types."""
    heads, tokens, dim = case.x.shape
    for dtype in (torch.float32, torch.bfloat16):
        for x in (case.x, case.x.contiguous(), case.x.float() + (0.0 if truncates else 1e-3)):
            mine, wanted = (
                [torch.full((heads, tokens + 5, dim), torch.nan, dtype=dtype, device=x.device)
                 for _ in range(3)] for _ in range(2)
            )  # fmt: skip
            for target, outs in ((ops, mine), (reference, wanted)):
                target.copy_pair(outs[0], outs[1], 3, x, case.x * 2)
                copy = target.prepare_copy(x)
                for _ in range(launches_of(truncates)):
                    copy(outs[2], 2, tokens // 5, tokens - tokens // 7)
            for one, other in zip(mine, wanted, strict=True):
                same = (one == other) | (one.isnan() & other.isnan())
                require(same.all(), f"copy to {dtype}: {int((~same).sum())} values differ")


def _two_chunks(quantwm: tuple[Tensor, ...], tokens: int) -> tuple[Tensor, Tensor]:
    """A span of two chunks from one: the second chunk's secondary scale is half the first's."""
    secondary = torch.stack((quantwm[2], quantwm[2] / 2), dim=1).contiguous()
    stops = torch.tensor([tokens // 2, tokens], dtype=torch.int32, device=secondary.device)
    return secondary, stops


def in_range(
    label: str, mine: Tensor, wanted: Tensor, offset: int, length: int
) -> tuple[Tensor, Tensor]:
    """The written range of both, in float32; all of it written and nothing beside it."""
    outside = torch.cat((mine[:, :offset], mine[:, offset + length :]), dim=1)
    require(outside.isnan().all(), f"{label}: tokens outside the range were written")
    mine, wanted = (t[:, offset : offset + length].float() for t in (mine, wanted))
    require(not mine.isnan().any(), f"{label}: tokens of the range were left unwritten")
    return mine, wanted


def same_values(label: str, mine: Tensor, wanted: Tensor, exact: bool, bf16: bool) -> None:
    if exact:
        differing = int((mine != wanted).sum())
        require(differing == 0, f"{label}: {differing} of {wanted.numel()} values differ")
        return
    # PSAC sums in another order: some units of 2^-23 of the largest value, and one BF16 step
    # where that straddles a rounding.
    step = 2.0**-7 if bf16 else 2.0**-20
    allowed = step * torch.maximum(wanted.abs(), mine.abs()) + 1e-6 * float(wanted.abs().max())
    difference = (mine - wanted).abs()
    require((difference <= allowed).all(), f"{label}: off by {float(difference.max())}")


def same_bytes(name: str, mine: Tensor, wanted: Tensor) -> None:
    require(mine.shape == wanted.shape, f"{name}: shape {tuple(mine.shape)}")
    differing = int((mine.cpu() != wanted).sum())
    require(differing == 0, f"{name}: {differing} of {wanted.numel()} differ")


def agree(ops: Ops, case: Case, clip: float = 1.0, truncates: bool = False) -> None:
    """Every primitive on one case."""
    ids = agree_assign(ops, case)
    agree_qsac(ops, case)
    agree_on_equal_centroids(ops, case)
    agree_update(ops, case, ids)
    qvg = agree_encode_qvg(ops, case, ids)
    quantwm = agree_encode_quantwm(ops, case, ids, clip)
    agree_decode(ops, case, ids, qvg, quantwm, truncates)
    agree_copy(ops, case, truncates)
