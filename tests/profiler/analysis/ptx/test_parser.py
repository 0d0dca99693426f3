"""Tests of the parser of PTX: which texts it reads, and which texts it rejects."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.analysis.ptx.control_flow import ControlFlow
from cbtop.profiler.analysis.ptx.lints import findings
from cbtop.profiler.analysis.ptx.model import Module, PtxError, PtxFunction, Variable, shown
from cbtop.profiler.analysis.ptx.parser import MAX_DEPTH, parse
from tests.representatives import first_by_default

HEAD = ".version 8.7\n.target sm_90a, debug\n.address_size 64\n"
WHOLE = (
    HEAD
    + r"""
.file 1 "/src//kernel.cu", 0, 0 // a comment with "quotes"
.extern .func  (.param .b32 func_retval0) vprintf
(
	.param .b64 vprintf_param_0,
	.param .b64 vprintf_param_1
)
;
.extern .shared .align 16 .b8 smem[];
.global .align 1 .b8 $str[4] = {72, 105, 10, 0};
.const .align 4 .f32 tab[2][3] = {{1.0, 2.0, 3.0}, {0f3F800000, 1.0, 2.0}};
.func (.reg .b32 res) device(.reg .b32 a, .reg .f32 b) .noreturn
{ add.s32 res, a, 1; ret; }
.visible .entry kernel(
 .param .u64 .ptr .global .align 16 kernel_param_0,
 .param .align 64 .b8 kernel_param_1[128]
)
.reqntid 128, 2, 1
.minnctapersm 2
{
 .reg .pred %p<3>; .reg .b32 	%r<10>;
 .reg .b64 %rd<10>;
 .reg .v4 .f32 vec;
 .shared .align 8 .b8 bar[8];
 .loc 1 3 0
$L0:
 { .reg .pred p; .reg .b32 %r<2>;
 LAB_WAIT:
 mbarrier.try_wait.parity.shared::cta.b64 p, [bar], %r1;
 @p bra DONE;
 bra LAB_WAIT;
 DONE: }
 { .reg .pred p;
 LAB_WAIT:
 @!p bra.uni LAB_WAIT; }
 mov.b64 %rd1, {%r1, %r2};
 setp.ge.s32 %p1|%p2, %r1,
     -12;
 /* several
 lines */ ld.global.v4.f32 {%r1, %r2, %r3, %r4}, [%rd1 + 16];
 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];
 { // callseq 0
 .param .b64 param0;
 st.param.b64 [param0], %rd1;
 .param .b32 retval0;
 call.uni (retval0), vprintf, (param0, param0);
 ld.param.b32 %r1, [retval0]; }
 prototype_0 : .callprototype (.param .b32 _) _ (.param .b64 _);
 call (retval0), %rd1, (param0), prototype_0;
 ts: .branchtargets $L0, $L1;
 brx.idx %r1, ts;
$L1:
 .pragma "nounroll; x";
 wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1,%r2}, %rd1, %rd2, %p1, 1, 1, 0, 0;
 tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r1}, [%r2];
 ret;
}
	.section	.debug_abbrev
	{
.b8 1
info_string0:
.b8 3
	}
.section .debug_macinfo { }
"""
)


def function_of(body: str) -> PtxFunction:
    return parse(f"{HEAD}.entry k()\n{{\n{body}\n}}").functions[0]


@pytest.fixture(scope="module")
def module() -> Module:
    return parse(WHOLE)


def test_a_module_has_its_target_variables_and_files(module: Module) -> None:
    assert (module.version, module.target, module.address_bits) == ("8.7", "sm_90a", 64)
    assert [(one.name, one.space, one.size_bytes) for one in module.variables] == [
        ("smem", "shared", None),
        ("$str", "global", 4),
        ("tab", "const", 24),
    ]
    assert module.files == {1: "/src//kernel.cu"}
    assert [(one.name, one.is_entry, one.is_declaration) for one in module.functions] == [
        ("vprintf", False, True),
        ("device", False, False),
        ("kernel", True, False),
    ]


def test_an_entry_has_parameters_limits_and_variables(module: Module) -> None:
    (entry,) = module.entries
    assert entry.limits == {"reqntid": (128, 2, 1), "minnctapersm": (2,)}
    assert [one.size_bytes for one in entry.parameters] == [8, 128]
    assert Variable("bar", "shared", "b8", 8, 27) in entry.variables
    assert entry.branch_targets == {"ts": ("$L0", "$L1")}
    assert [entry.registers.type_of(name) for name in ("%r9", "%r10", "%p2", "%x", "vec")] == [
        "b32", None, "pred", None, "f32",
    ]  # fmt: skip


def test_registers_and_labels_of_an_inner_scope_have_names_of_their_own(module: Module) -> None:
    (entry,) = module.entries
    wait, leave, again, second = entry.instructions[:4]
    assert (leave.operands, again.operands) == (("DONE#1",), ("LAB_WAIT#1",))
    assert (second.guard, second.is_negated, second.operands) == ("p#2", True, ("LAB_WAIT#2",))
    assert wait.operands == ("p#1", "[bar]", "%r1#1")
    assert shown(wait.operands[2]) == "%r1"
    assert entry.registers.type_of("%r1#1") == "b32"


def test_operands_lines_and_sources_are_those_of_the_text(module: Module) -> None:
    (entry,) = module.entries
    by_opcode = {one.opcode: one for one in entry.instructions}
    assert by_opcode["mov.b64"].operands == ("%rd1", "{%r1, %r2}")
    assert by_opcode["setp.ge.s32"].operands == ("%p1|%p2", "%r1", "-12")
    load = by_opcode["ld.global.v4.f32"]
    assert (load.line, load.operands, load.source) == (43, ("{%r1, %r2, %r3, %r4}", "[%rd1 + 16]"), (1, 3))
    assert by_opcode["call.uni"].operands == ("(retval0#3)", "vprintf", "(param0#3, param0#3)")
    assert WHOLE.split("\n")[load.line - 1].strip().startswith("lines */ ld.global.v4")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("hello", 1),
        ("\n\n\x00\x01", 3),
        (HEAD + ".entry k()\n{\n add.s32 %r1, %r2", 6),
        (HEAD + ".entry k()\n{\n ret;\n", 7),
        (HEAD + ".entry k()\n{\n bra nowhere;\n}", 6),
        (HEAD + ".entry k()\n{\nA:\nA:\n ret;\n}", 7),
        (HEAD + ".entry k()\n{\n mov.b32 {a, b;\n}", 6),
        (HEAD + ".entry ()\n{\n}", 4),
        (HEAD + ".entry k()\n{\n .reg .b32 a b;\n}", 6),
        (HEAD + ".global .b8 a[99999999999999];", 4),
        (HEAD + ".entry k()\n" + "{" * (MAX_DEPTH + 1), 5),
        (HEAD + ".entry k()\n{" + "{ .reg .b32 %r<9999>; }\n" * 10 + "}", 11),
    ],
)
def test_what_is_not_ptx_is_an_error_in_one_line_with_its_line(text: str, line: int) -> None:
    with pytest.raises(PtxError) as error:
        parse(text)
    assert error.value.line == line
    assert len(str(error.value)) < 200
    assert len(str(error.value).splitlines()) == 1


@given(st.integers(0, len(WHOLE)), st.integers(0, 40), st.text(alphabet=' \n;{}[](),.:@!%$"/*ra1<>=\0é', max_size=8))
def test_a_damaged_module_is_parsed_or_rejected(start: int, length: int, inserted: str) -> None:
    with suppress(PtxError):  # no other exception
        parsed = parse(WHOLE[:start] + inserted + WHOLE[start + length :])
        findings(parsed)


HOSTILE = {
    "comments": "/*" * 200_000,
    "a name": HEAD + "a" * 500_000,
    "braces": HEAD + "{" * 500_000,
    "quotes": HEAD + '"' * 500_000,
    "parentheses": HEAD + ".entry k(" + "(" * 200_000,
    "spaces": HEAD + ".entry k(){ x" + " " * 500_000,
    "vectors": HEAD + ".entry k(){ add " + "{" * 500_000 + ";}",
    "registers": HEAD + ".entry k(){ .reg .b32 " + "a," * 200_000 + ";}",
    "dimensions": HEAD + ".global .b8 " + "a[1]" * 100_000 + ";",
    "words": HEAD + ".section " + "x " * 200_000,
    "guards": HEAD + "@" + "!" * 500_000,
}


@first_by_default("what", HOSTILE, 4)
def test_no_text_takes_long(what: str) -> None:
    begun = time.process_time()
    with pytest.raises(PtxError) as error:
        parse(HOSTILE[what])
    assert len(str(error.value)) < 200
    assert time.process_time() - begun < 5


def test_a_megabyte_is_parsed_in_time() -> None:
    """A megabyte of compiled PTX took 0.09 s, including control flow (one core of an AMD EPYC).

    The limit here is for slow machines.
    """
    line = "\tfma.rn.f32 \t%f1, %f2, %f3, %f4;\n\tld.global.f32 \t%f2, [%rd1+16];\n"
    body = "\t.reg .f32 %f<9>; .reg .b64 %rd<9>;\n" + line * (1_000_000 // len(line)) + "\tret;\n"
    begun = time.process_time()
    function = function_of(body)
    _ = ControlFlow(function).dominators
    assert time.process_time() - begun < 5
    assert len(function.instructions) == 2 * (1_000_000 // len(line)) + 1
