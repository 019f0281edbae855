"""`study`: recorded q/k/v tensors through each cache, causally, chunk by chunk."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, astuple
from pathlib import Path

from quantwm.cache.formats import split_methods
from quantwm.cli.common import (
    add_device,
    clustered,
    emit,
    integer,
    number,
    pick_device,
    progress,
    progress_done,
    say,
    table,
)
from quantwm.errors import UserError
from quantwm.study import COLD_TOKENS, MethodResult, study
from quantwm.tensor_files import load_tensors

DEFAULT_SPAN = 3072
DEFAULT_CENTROIDS = 64
"""Of the embedded world: 16 chunks of 192 tokens share 64 centroids."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `study`."""
    parser.add_argument("file", type=Path, metavar="FILE.safetensors")
    parser.add_argument(
        "--methods",
        type=split_methods,
        default=("bf16", "qvg", "quantwm"),
        help="formats, with a preset or settings behind a colon: qtc:small,quantwm:rank=4,clip=0.7",
    )
    parser.add_argument(
        "--chunk", type=integer(1, 2**31), help="tokens of a chunk; as recorded by default"
    )
    parser.add_argument(
        "--span",
        type=integer(1, 2**31),
        default=DEFAULT_SPAN,
        help=f"tokens that share a codebook ({DEFAULT_SPAN})",
    )
    parser.add_argument(
        "--centroids", type=integer(1, 256), help="of a codebook (64, or the preset's)"
    )
    parser.add_argument("--seed", type=integer(0, 2**63 - 1), default=0, help="of k-means")
    add_device(parser)


def run(arguments: argparse.Namespace) -> int:
    """Study the file and print a table and its JSON."""
    if not arguments.methods:
        raise UserError("name at least one method, for example --methods bf16,qvg,quantwm")
    device = pick_device(arguments.device)
    tensors = load_tensors(arguments.file)
    chunk = arguments.chunk or tensors.metadata_int("chunk_tokens")
    if not chunk:
        raise UserError(f"{arguments.file.name} does not say its chunk; give --chunk TOKENS")
    results = study(
        tensors,
        arguments.methods,
        chunk=chunk,
        span=arguments.span,
        settings={
            method: clustered(method, arguments.centroids, DEFAULT_CENTROIDS)
            for method in arguments.methods
        },
        device=device,
        seed=arguments.seed,
        report=progress,
    )
    progress_done()
    say(table(_whole(results)))
    say(table(_parts(results)))
    heads, tokens, head_dim = tensors.shape
    emit(
        {
            "methods": [asdict(result) for result in results],
            "file": str(arguments.file),
            "layers": sorted(tensors.layers),
            "heads": heads,
            "tokens": tokens,
            "head_dim": head_dim,
            "chunk": chunk,
            "span": arguments.span,
            "centroids": arguments.centroids or DEFAULT_CENTROIDS,
            "seed": arguments.seed,
            "device": str(device),
        }
    )
    return 0


def _whole(results: Sequence[MethodResult]) -> list[list[str]]:
    """Over the whole recording."""
    head = ["method", "bits/el", "resident", "ratio", "K rel", "V rel", "logit MSE", "shift"]
    rows = [[*head, "out rel", "corrected"]]
    for result in results:
        rows.append(
            [
                result.method,
                number(result.bits_per_element),
                number(result.resident_bits_per_element),
                number(result.ratio, 2, "x"),
                number(result.k_rel_mse, 4),
                number(result.v_rel_mse, 4),
                number(result.logit_mse, 4),
                number(result.token_shift, 4),
                number(result.attention_output_rel_mse, 5),
                number(result.corrected_output_rel_mse, 5),
            ]
        )
    return rows


def _parts(results: Sequence[MethodResult]) -> list[list[str]]:
    """The cold start and the long run apart."""
    names = ["logit MSE", "shift", "out rel", "corrected"]
    cold = [f"to {COLD_TOKENS:,}: {names[0]}", *names[1:]]
    rows = [["method", *cold, f"longer: {names[0]}", *names[1:]]]
    for result in results:
        row = [result.method]
        for part in (result.cold, result.long):
            values = (None,) * 4 if part is None else astuple(part)
            digits = (4, 4, 5, 5)
            row += [number(v, d) for v, d in zip(values, digits, strict=True)]
        rows.append(row)
    return rows
