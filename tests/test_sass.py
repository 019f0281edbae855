"""Reads of uniform registers that nothing wrote, found in listings of a few lines."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from sass import instruction, unwritten_reads

STEPS = """
        /*0010*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0020*/                   R2UR UR{lower}, R84 ;
        /*0030*/                   UIADD3 UR6, UP0, UR8, 0x2, URZ ;
        /*0040*/                   UIADD3.X UR7, URZ, -0x7fffffe0, URZ, UP0, !UPT ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR4], R88, gsb0 ;
        /*0060*/                   LDG.E.U8 R1, desc[UR4][R2.64] ;
        /*0070*/                   EXIT ;
"""


def test_a_lost_register_is_found() -> None:
    assert unwritten_reads(STEPS.format(lower=8)) == []
    assert unwritten_reads(STEPS.format(lower=9)) == ["UIADD3 UR6, UP0, UR8, 0x2, URZ"]


def test_a_register_that_only_a_loop_s_end_writes_counts_as_written() -> None:
    sass = """
.L_x_1:
        /*0010*/                   UIADD3 UR5, UR4, 0x1, URZ ;
        /*0020*/              @!P0 UMOV UR4, UR5 ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
        /*0040*/                   BRA `(.L_x_2) ;
        /*0050*/                   UMOV UR7, UR6 ;
.L_x_2:
        /*0060*/                   UMOV UR8, UR9 ;
        /*0070*/                   EXIT ;
"""
    assert unwritten_reads(sass) == ["UMOV UR8, UR9"]


def test_operands() -> None:
    assert instruction("UIADD3.64 UR14, UR6, 0x3e, URZ").read == {6, 7}
    assert instruction("UIADD3.64 UR14, UR6, 0x3e, URZ").written == {14, 15}
    both = instruction("HGMMA.64x32x16.F32.BF16 R24, gdesc[UR12].tnspB, R24")
    assert both.read == {12, 13, 14, 15} and not both.written
    assert instruction("@!P6 LDG.E.128 R44, desc[UR52][R214.64]").read == {52, 53}
    assert instruction("UISETP.GE.AND UP0, UPT, UR4, UR5, UPT").read == {4, 5}
