"""Repeated launches: what is passed on, and what counts as another kind. Nothing is executed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels import decode_pair
from kernels import launch as launching

SPECIALISED = {"x_ptr", "stride_h", "stride_n"}
NAMES = ["x_ptr", "stride_h", "stride_n", "start", "ids_ptr", "count", "D", "RANK"]


class FakeKernel:
    """Stands where a JITFunction stands: notes what is compiled and what is launched again."""

    def __init__(self) -> None:
        self.arg_names = NAMES
        self.params = [
            SimpleNamespace(do_not_specialize=n not in SPECIALISED, is_constexpr=n.isupper())
            for n in NAMES
        ]
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.warmed: list[tuple[int, int]] = []

    def warmup(self, x: Any, *args: Any, grid: tuple[int, int], **constants: Any) -> None:
        self.warmed.append((x.data_ptr() % 16, constants["BLOCK_N"]))

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def first(*args: Any, **constants: Any) -> Any:
            self.compiled.append((grid, args, constants))
            run = lambda *given: self.launched.append(given)  # noqa: E731
            return SimpleNamespace(run=run, function="function", packed_metadata="metadata")

        return first


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    active = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: f"stream {device}"
    )
    monkeypatch.setattr(launching, "JITFunction", FakeKernel)
    monkeypatch.setattr(launching, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launching, "_COMPILED", {})
    monkeypatch.setattr(launching, "_LOOKED_AT", {})
    return FakeKernel()


CONSTANTS = {"RANK": 8, "D": 128, "num_warps": 4}
HEAD = ("stream 0", "function", "metadata", None, None, None)


def test_a_second_launch_passes_addresses_and_constants_in_the_order_of_the_signature(
    kernel: FakeKernel,
) -> None:
    x, ids = torch.zeros(64), torch.zeros(64, dtype=torch.uint8)
    launching.launch(kernel, (3, 2), (x, 640, 128, 7, ids, 100), CONSTANTS)
    launching.launch(kernel, (5, 2), (x, 1280, 128, 8, ids, 116), CONSTANTS)
    assert len(kernel.compiled) == 1
    addresses = (x.data_ptr(), 1280, 128, 8, ids.data_ptr(), 116)
    assert kernel.launched == [(5, 2, 1, *HEAD, *addresses, 128, 8)]


@pytest.mark.parametrize(
    ("change", "compilations"),
    [
        ({"x": torch.zeros(65)[1:]}, 2),  # an address that is no multiple of 16
        ({"x": torch.zeros(64, dtype=torch.bfloat16)}, 2),
        ({"stride": 641}, 2),
        ({"stride": 1}, 2),
        ({"stride": 2**31}, 2),  # 64 bits
        ({"stride": 1600}, 1),
        ({"start": 16}, 1),  # not specialised on
        ({"start": 1}, 1),
        ({"start": 2**31}, 2),
        ({"constants": CONSTANTS | {"num_warps": 8}}, 2),
        ({"ids": None}, 2),
    ],
)
def test_another_kind_goes_through_triton(
    kernel: FakeKernel, change: dict[str, Any], compilations: int
) -> None:
    ids = torch.zeros(64, dtype=torch.uint8)
    usual = {"x": torch.zeros(64), "stride": 640, "start": 7, "ids": ids, "constants": CONSTANTS}
    for given in (usual, usual | change, usual | change):
        args = (given["x"], given["stride"], 128, given["start"], given["ids"], 100)
        launching.launch(kernel, (1, 1), args, given["constants"])
    assert len(kernel.compiled) == compilations
    assert len(kernel.launched) == 3 - compilations


def test_the_row_of_other_lengths_is_compiled_for_every_kind(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a history of tensors that lie elsewhere compiles nothing by growing either."""
    rows = {True: {"BLOCK_N": 64}, False: {"BLOCK_N": 32}}
    monkeypatch.setattr(decode_pair, "launch_constants", lambda decode, out, long: rows[long])
    monkeypatch.setattr(kernel, "arg_names", [*NAMES[:6], "BLOCK_N"])
    ids = torch.zeros(64, dtype=torch.uint8)
    for x in (torch.zeros(64), torch.zeros(65)[1:]) * 2:
        args = (x, 640, 128, 7, ids, 100)
        decode_pair.launch_many(kernel, None, torch.zeros(1, 64), [5], 1, args)
    assert kernel.warmed == [(0, 64), (4, 64)]


def test_a_prepared_launch_shares_what_others_of_its_kind_compiled(kernel: FakeKernel) -> None:
    ids = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    outs = [torch.zeros(64), torch.zeros(64)]
    spans = [launching.PreparedLaunch(kernel, (i, 100 + n), CONSTANTS)
             for n, i in enumerate(ids)]  # fmt: skip
    for span, out in zip(spans * 2, outs * 2, strict=True):
        span((4, 2), out, (640, 128), (7,))
    spans[0]((4, 2), torch.zeros(64, dtype=torch.bfloat16), (640, 128), (7,))
    assert kernel.compiled[0][1] == (outs[0], 640, 128, 7, ids[0], 100)
    assert len(kernel.compiled) == 2
    values = [(o.data_ptr(), 640, 128, 7, i.data_ptr(), 100 + n)
              for n, (o, i) in enumerate(zip(outs, ids, strict=True))]  # fmt: skip
    wanted = [(4, 2, 1, *HEAD, *values[n], 128, 8) for n in (1, 0, 1)]
    assert kernel.launched == wanted


def test_what_is_not_compiled_is_launched_as_it_stands() -> None:
    seen: list[Any] = []

    class Interpreted:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            return lambda *args, **constants: seen.append((grid, args, constants))

    launching.launch(Interpreted(), (1, 2), (3, 4), {"D": 5})
    launching.PreparedLaunch(Interpreted(), (9,), {"D": 5})((7, 2), torch.zeros(1), (1, 2), (3,))
    assert seen[0] == ((1, 2), (3, 4), {"D": 5})
    assert seen[1][0] == (7, 2) and seen[1][1][1:] == (1, 2, 3, 9)


def test_a_prepared_launch_takes_other_tensors_of_the_same_kind(kernel: FakeKernel) -> None:
    ids = [torch.zeros(64, dtype=torch.uint8) for _ in range(3)]
    out = torch.zeros(64)
    first = launching.PreparedLaunch(kernel, (ids[0], 100), CONSTANTS)
    first((4, 2), out, (640, 128), (7,))
    empty = first.rebound({0: None})
    assert empty._fixed == (None, 100)
    for other in ids[1:]:
        empty.rebound({0: other})((4, 2), out, (640, 128), (7,))
    first((4, 2), out, (640, 128), (7,))
    seen = [launched[len((0, 0, 1)) + len(HEAD) + 4] for launched in kernel.launched]
    assert seen == [ids[1].data_ptr(), ids[2].data_ptr(), ids[0].data_ptr()]
    assert len(kernel.compiled) == 1
    for unlike in (torch.zeros(64, dtype=torch.uint8)[1:], out):
        with pytest.raises(ValueError, match="argument 0"):
            empty.rebound({0: unlike})


def test_noted_launches_are_made_again_on_the_stream_of_then(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, ids = torch.zeros(64), torch.zeros(64, dtype=torch.uint8)
    prepared = launching.PreparedLaunch(kernel, (ids, 100), CONSTANTS)
    with launching.noted() as launches:  # the first ones go through Triton, the last does not
        launching.launch(kernel, (3, 2), (x, 640, 128, 7, ids, 100), CONSTANTS)
        prepared((4, 2), x, (640, 128), (8,))
        prepared((4, 2), x, (640, 128), (9,))
    prepared((5, 2), x, (640, 128), (10,))
    assert len(launches) == 3 and len(kernel.compiled) == 2
    kernel.launched.clear()
    active = launching.driver.active
    monkeypatch.setattr(active, "get_current_stream", lambda device: f"another {device}")
    launches.again()
    head = ("another 0", *HEAD[1:])
    values = [(x.data_ptr(), 640, 128, start, ids.data_ptr(), 100) for start in (7, 8, 9)]
    grids = [(3, 2, 1), (4, 2, 1), (4, 2, 1)]
    wanted = [(*grid, *head, *given, 128, 8) for grid, given in zip(grids, values, strict=True)]
    assert kernel.launched == wanted
