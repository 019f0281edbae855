"""Uniform registers that a compiled kernel reads though nothing has written them.

ptxas 12.8.93, which Triton 3.6 and 3.7 bring, loses one: in some kernels that take a tile of 64
bytes a row from shared memory into wgmma (its descriptor's upper half is 0x80000020), the
instructions that step the descriptor read a register of nobody's. What lies there is a program's
before: two runs differ, or shared memory is read where there is none, which CUDA calls an illegal
address. Nothing of it shows in PTX. 12.9.86 compiles the same PTX rightly.
"""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import triton

WRITERS = re.compile(r"(U(?!TMA|BLK|ISETP)|R2UR|S2UR|REDUX|CREDUX|VOTEU)")
USED = re.compile(r"(gdesc|desc)?\[?\bUR(\d+)\b")
TARGET = re.compile(r"`\((\.L\w+)\)")


class Instruction(NamedTuple):
    """One line: its text without the predicate, whether it has one, what it writes and reads."""

    text: str
    predicated: bool
    written: frozenset[int]
    read: frozenset[int]


@functools.cache
def listing(cubin: Path) -> str:
    """The SASS of a cubin, by the nvdisasm in Triton's wheel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    run = subprocess.run(
        [str(tool), "-c", "-ndf", str(cubin)], check=True, capture_output=True, text=True
    )
    return run.stdout


def instruction(text: str) -> Instruction:
    """Registers of 64 and 128 bits are two and four; of a descriptor pair wgmma reads the second
    half alone when its first operand is in registers."""
    bare = re.sub(r"^@!?U?P\w+\s+", "", text)
    operation, _, rest = bare.partition(" ")
    operands = [operand.strip() for operand in rest.split(",")]
    wide = 4 if ".128" in operation else 2 if re.search(r"\.64|WIDE", operation) else 1
    written: set[int] = set()
    if WRITERS.match(operation) and re.fullmatch(r"UR\d+", operands[0]):
        first = int(operands.pop(0)[2:])
        written.update(range(first, first + wide))
    read: set[int] = set()
    in_registers = operation.startswith("HGMMA") and re.match(r"R\d", (operands + [""] * 2)[1])
    for found in USED.finditer(",".join(operands)):
        kind, number = found.groups()
        first = int(number)
        if kind == "gdesc":
            read.update(range(first + 2 if in_registers else first, first + 4))
        else:
            read.update(range(first, first + (2 if kind or operation == "UIADD3.64" else 1)))
    return Instruction(bare, bare != text, frozenset(written), frozenset(read))


def unwritten_reads(sass: str) -> list[str]:
    """Every instruction with a uniform register that is written on no way to it."""
    code, labels = [], {}
    for line in sass.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(instruction(found[1]))
    known: list[frozenset[int] | None] = [None] * (len(code) + 1)
    known[0], waiting = frozenset(), [0]
    while waiting:
        place = waiting.pop()
        if place == len(code):
            continue
        behind = known[place] | code[place].written
        for after in _after(code[place], place, labels):
            before = known[after]
            if before is None or not behind <= before:
                known[after] = behind | (before or frozenset())
                waiting.append(after)
    pairs = zip(code, known[:-1], strict=True)
    return [line.text for line, held in pairs if held is not None and not line.read <= held]


def _after(line: Instruction, place: int, labels: dict[str, int]) -> list[int]:
    """Where it goes on."""
    target = TARGET.search(line.text)
    if line.text.startswith("BRA") and target:
        conditional = line.predicated or "P" in line.text[3 : target.start()]
        return [labels[target[1]]] + ([place + 1] if conditional else [])
    return [] if line.text.startswith("EXIT") and not line.predicated else [place + 1]
