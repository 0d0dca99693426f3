"""A GPU simulated on the host. g++ compiles CUDA C++, blocks run one after another, and each thread has a context.

Rules
- Sources are compiled unchanged. SHIM defines everything that CUDA C++ and PTX have and C++ lacks.
- One thread of a block runs at a time. It switches to the next thread at a barrier and when a warp exchanges values.
  Blocks run in order, so the last block is also the last to arrive.
- Every array has guard bytes before and after it, which must not change. A write beyond them damages this process.
- Threads of a block run in the order of their numbers, or in reverse order with `is_reversed`. A difference between
  the two orders is a race. Some races are not found.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from cbtop.compute.cuda.launches import CudaLaunch, CudaModule, LibraryCall
from cbtop.compute.cuda.prelude import PRELUDE
from cbtop.compute.errors import ComputeError
from cbtop.compute.gpu.arguments import planes_of
from cbtop.compute.gpu.device import BACKEND, Gpu
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.profiler.definitions import KernelDefinition
from cbtop.protocol.cache import cache_dir, replace_whole
from tests.compute.fake_gpu import DeviceArray

# Without this option, glibc would reject a longjmp to another stack.
OPTIONS = ("-std=c++17", "-w", "-O1", "-fPIC", "-U_FORTIFY_SOURCE")
GUARD_BYTES = mmap.PAGESIZE  # number of guard bytes before and after each array
# Fill guard bytes with signaling NaNs, because such numbers change if they are used in arithmetic.
GUARD = np.full(GUARD_BYTES // 4, 0x7FA5A5A5, np.uint32).view(np.uint8)
MULTIPROCESSORS = 4

# The parts of CUDA that the sources use (CUDA C++ Programming Guide, "C++ Language Extensions"; PTX ISA for
# `ptx_...`). `_of_ptx` translates `asm` to these functions. Contexts start by ucontext and switch by longjmp, which
# needs no system call.
SHIM = r"""
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>
#include <ucontext.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static __attribute__((section("shared")))
extern char __start_shared[] __attribute__((weak, visibility("hidden")));  // by the linker
extern char __stop_shared[] __attribute__((weak, visibility("hidden")));
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(2) char2 { signed char x, y; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

// --- threads of a block --------------------------------------------------------------------------------------------

struct Dimensions { unsigned x, y, z; };
static Dimensions threadIdx, blockIdx, blockDim, gridDim;

struct Barrier { int wanted, arrived, passed; };
struct Thread {
    ucontext_t first;
    jmp_buf at;
    Dimensions index;
    bool has_begun, has_ended;
};
struct Warp {
    Barrier barrier;
    uint64_t words[32][10];  // of each lane, what it shows the others
};
struct Block {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    Barrier barrier;
    int running, step, left;  // `step`: to the next one's number
    long turns;  // of threads since one last got on
    jmp_buf launch;
    char wrong[200];
};
static Block block;

[[noreturn]] static void stop(const char* what)
{
    snprintf(block.wrong, sizeof block.wrong, "%s, in thread %u, %u, %u of block %u, %u, %u", what, threadIdx.x,
        threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z);
    longjmp(block.launch, 1);
}
static void begin();
[[noreturn]] static void go_on()
{
    const int count = (int)block.threads.size();
    do {
        block.running = (block.running + block.step + count) % count;
        if (++block.turns > 2 * count) stop("threads wait for ones that never come");
    } while (block.threads[block.running].has_ended);
    Thread& one = block.threads[block.running];
    threadIdx = one.index;
    if (one.has_begun) longjmp(one.at, 1);
    one.has_begun = true;
    setcontext(&one.first);
    abort();
}
static void hand_over()
{
    if (!setjmp(block.threads[block.running].at)) go_on();
}
static void wait(Barrier& barrier)
{
    if (++barrier.arrived == barrier.wanted) {
        barrier.arrived = 0;
        barrier.passed++;
        block.turns = 0;
        return;
    }
    for (const int mine = barrier.passed; barrier.passed == mine;) hand_over();
}
static void __syncthreads() { wait(block.barrier); }
static void __threadfence() {}

// `made(warp)` of what all lanes of a warp show.
template <int WORDS, class Made> static auto of_warp(const uint64_t (&own)[WORDS], Made made)
{
    Warp& warp = block.warps[block.running / 32];
    memcpy(warp.words[block.running % 32], own, sizeof own);
    wait(warp.barrier);
    auto found = made(warp);
    wait(warp.barrier);
    return found;
}
template <class T> static T from_words(uint64_t words)
{
    T value;
    memcpy(&value, &words, sizeof value);
    return value;
}
template <class T> static uint64_t to_words(T value)
{
    uint64_t words = 0;
    memcpy(&words, &value, sizeof value);
    return words;
}
static void check_mask(unsigned mask)
{
    if (mask != ~0u) stop("of a warp some exchange values");
}
template <class T> static T of_lane(unsigned mask, T value, int lane)
{
    check_mask(mask);
    const uint64_t own[1] = {to_words(value)};
    return of_warp(own, [=](const Warp& warp) { return from_words<T>(warp.words[lane][0]); });
}
template <class T> static T __shfl_xor_sync(unsigned mask, T value, int apart)
{
    return of_lane(mask, value, block.running % 32 ^ apart);
}
template <class T> static T __shfl_up_sync(unsigned mask, T value, int apart)
{
    const int lane = block.running % 32;
    return of_lane(mask, value, lane < apart ? lane : lane - apart);
}
template <class T, class Two> static T over_lanes(unsigned mask, T value, Two two)
{
    check_mask(mask);
    const uint64_t own[1] = {to_words(value)};
    return of_warp(own, [=](const Warp& warp) {
        T found = from_words<T>(warp.words[0][0]);
        for (int lane = 1; lane < 32; lane++) found = two(found, from_words<T>(warp.words[lane][0]));
        return found;
    });
}
static int __reduce_add_sync(unsigned mask, int value)
{
    return over_lanes(mask, value, [](int a, int b) { return a + b; });
}
static int __reduce_max_sync(unsigned mask, int value)
{
    return over_lanes(mask, value, [](int a, int b) { return a > b ? a : b; });
}
static int __any_sync(unsigned mask, int holds)
{
    return over_lanes(mask, holds != 0, [](int a, int b) { return a | b; });
}
static unsigned __match_all_sync(unsigned mask, int value, int* all_alike)
{
    check_mask(mask);
    const uint64_t own[1] = {to_words(value)};
    *all_alike = of_warp(own, [=](const Warp& warp) {
        for (int lane = 0; lane < 32; lane++)
            if (warp.words[lane][0] != own[0]) return 0;
        return 1;
    });
    return *all_alike ? mask : 0;
}

// --- numbers and memory --------------------------------------------------------------------------------------------

template <class A, class B> std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <class A, class B> std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }
static float __fdiv_rn(float a, float b) { return a / b; }
static int __float2int_rn(float a) { return (int)rintf(a); }
static float __uint_as_float(uint32_t bits) { return from_words<float>(bits); }
static float __int_as_float(int bits) { return from_words<float>((uint32_t)bits); }
static uint32_t __float_as_uint(float value) { return (uint32_t)to_words(value); }
static int __float_as_int(float value) { return (int)to_words(value); }
static int __dp4a(int a, int b, int c)
{
    for (int i = 0; i < 4; i++) c += (int)(signed char)(a >> 8 * i) * (int)(signed char)(b >> 8 * i);
    return c;
}
static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t places)
{
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t found = 0;
    for (int i = 0; i < 4; i++) found |= (uint32_t)(both >> 8 * (places >> 4 * i & 7) & 255) << 8 * i;
    return found;
}
template <class T> static T read(const void* at)
{
    if ((uintptr_t)at % alignof(T)) stop("a load of several words does not begin where one of these does");
    return *(const T*)at;
}
template <class T> static T __ldg(const T* at) { return read<T>(at); }
template <class T> static T __ldcg(const T* at) { return read<T>(at); }
template <class T> using Same = typename std::remove_const<T>::type;  // whose type is not deduced from it
template <class T> static T atomicExch(T* at, Same<T> value) { return std::exchange(*at, value); }
template <class T> static T atomicAdd(T* at, Same<T> value) { return atomicExch(at, *at + value); }
template <class T> static T atomicMax(T* at, Same<T> value) { return atomicExch(at, max(*at, value)); }
template <class T> static T atomicMin(T* at, Same<T> value) { return atomicExch(at, min(*at, value)); }
static char shared_begin;  // shared memory lies beside it: an address in 32 bits counts from there
static size_t __cvta_generic_to_shared(const void* at) { return (const char*)at - &shared_begin; }
static void* of_shared(uint32_t address) { return &shared_begin + (int32_t)address; }

// --- PTX -----------------------------------------------------------------------------------------------------------

static float widened(uint16_t bits) { return (float)from_words<_Float16>(bits); }
static uint16_t rounded(float value) { return (uint16_t)to_words((_Float16)value); }
static void ptx_cvt_f32_f16(float& value, uint16_t bits) { value = widened(bits); }
static void ptx_cvt_rn_f16_f32(uint16_t& bits, float value) { bits = rounded(value); }
static void ptx_cvt_rn_f16x2_f32(uint32_t& word, float high, float low)
{
    word = rounded(low) | (uint32_t)rounded(high) << 16;
}
static void ptx_cvt_rn_bf16_f32(uint16_t& bits, float value)
{
    const uint32_t all = __float_as_uint(value);
    bits = std::isnan(value) ? 0x7fff : (uint16_t)(all + 0x7fff + (all >> 16 & 1) >> 16);
}
static void ptx_ex2_approx_ftz_f32(float& value, float exponent) { value = exp2f(exponent); }
static void ptx_prefetch_global_L2(const void*) {}
static void ptx_griddepcontrol_wait() {}
static void ptx_ld_global_nc_L1__no_allocate_L2__128B_v4_u32(
    uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, const void* from)
{
    const uint4 words = read<uint4>(from);
    a = words.x, b = words.y, c = words.z, d = words.w;
}
// 16 bytes where a predicate, whose register it begins with, says so; zeros otherwise.
static void ptx__reg(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, const void* from, int is_there)
{
    a = b = c = d = 0;
    if (is_there) ptx_ld_global_nc_L1__no_allocate_L2__128B_v4_u32(a, b, c, d, from);
}
static void ptx_cp_async_cg_shared_global(uint32_t to, const void* from, int bytes)
{
    memset(of_shared(to), 0, 16);
    if (bytes) memcpy(of_shared(to), from, bytes);
}
static void ptx_cp_async_commit_group() {}
static void ptx_cp_async_wait_group() {}
// D += A B, of 16 x 16 and 16 x 8 halves ("Matrix Fragments for mma.m16n8k16"): lane l has of A rows l / 4 and 8
// more, columns 2 (l % 4) and 8 more, of B as many of rows, column l / 4.
static void ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(
    float& p, float& q, float& r, float& s, uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t x, uint32_t y)
{
    const uint64_t own[6] = {a, b, c, d, x, y};
    const int lane = block.running % 32, row = lane / 4, column = 2 * (lane % 4);
    const float4 sums = of_warp(own, [=](const Warp& warp) {
        float found[4] = {};
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 4; n++) {
                const int shift = 16 * (k % 2), holder = k % 8 / 2;
                const uint64_t of_a = warp.words[4 * row + holder][k / 8 * 2 + n / 2];
                const uint64_t of_b = warp.words[4 * (column + n % 2) + holder][4 + k / 8];
                found[n] += widened((uint16_t)(of_a >> shift)) * widened((uint16_t)(of_b >> shift));
            }
        return make_float4(found[0], found[1], found[2], found[3]);
    });
    p += sums.x, q += sums.y, r += sums.z, s += sums.w;
}
// Four matrices of 8 x 8 halves ("ldmatrix"): lane 8 m + i has where row i of the one m begins; each gets of row
// l / 4 two numbers, or (`is_turned`) of two rows that of column l / 4.
static void load_matrices(uint32_t* const (&words)[4], uint32_t from, bool is_turned)
{
    const uint64_t own[1] = {from};
    const int lane = block.running % 32, row = lane / 4, pair = 2 * (lane % 4);
    const uint4 found = of_warp(own, [=](const Warp& warp) {
        uint32_t both[4];
        for (int m = 0; m < 4; m++) {
            auto at = [&](int i, int j) { return ((uint16_t*)of_shared(warp.words[8 * m + i][0]))[j]; };
            both[m] = is_turned ? at(pair, row) | (uint32_t)at(pair + 1, row) << 16
                                : at(row, pair) | (uint32_t)at(row, pair + 1) << 16;
        }
        return make_uint4(both[0], both[1], both[2], both[3]);
    });
    *words[0] = found.x, *words[1] = found.y, *words[2] = found.z, *words[3] = found.w;
}
static void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(
    uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t from)
{
    load_matrices({&a, &b, &c, &d}, from, false);
}
static void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(
    uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t from)
{
    load_matrices({&a, &b, &c, &d}, from, true);
}

// --- launches ------------------------------------------------------------------------------------------------------

static void (*call)(void*, void**);
static void* called;
static void** given;
static void begin()
{
    call(called, given);
    block.threads[block.running].has_ended = true;
    block.turns = 0;
    // Whoever has returned is waited for no more (CUDA C++ Programming Guide, "Synchronization Functions").
    if (--block.left == 0) longjmp(block.launch, 2);
    block.barrier.wanted--;
    if (block.barrier.wanted == block.barrier.arrived) {
        block.barrier.arrived = 0;
        block.barrier.passed++;
    }
    go_on();
}
template <class... P, size_t... I> static void call_by(void* kernel, void** arguments, std::index_sequence<I...>)
{
    ((void (*)(P...))kernel)(*(P*)arguments[I]...);
}
template <class... P> static void call_of(void* kernel, void** arguments)
{
    call_by<P...>(kernel, arguments, std::index_sequence_for<P...>());
}
// What is wrong with a launch, or null. `sizes`: bytes of each argument.
template <class... P> static const char* launch(
    void (*kernel)(P...), void** arguments, const int* sizes, int count, const unsigned* grid,
    const unsigned* threads, int is_reversed)
{
    const int wanted[] = {(int)sizeof(P)...};
    if (count != (int)sizeof...(P)) return "it has other parameters than arguments";
    for (int i = 0; i < count; i++)
        if (sizes[i] != wanted[i]) return "an argument is not of its parameter's size";
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {threads[0], threads[1], threads[2]};
    const int all = threads[0] * threads[1] * threads[2];
    const size_t stack_bytes = 1 << 16;
    static char* stacks;
    static int count_of_stacks;
    if (count_of_stacks < all) {
        free(stacks);
        stacks = (char*)malloc(all * stack_bytes);
        count_of_stacks = all;
    }
    if ((int)block.threads.size() != all) block.threads = std::vector<Thread>(all);
    block.warps.resize((all + 31) / 32);
    call = call_of<P...>, called = (void*)kernel, given = arguments;
    block.step = is_reversed ? -1 : 1;
    for (int i = 0; i < all; i++) {
        Thread& one = block.threads[i];
        one.index = {i % threads[0], i / threads[0] % threads[1], i / threads[0] / threads[1]};
        getcontext(&one.first);
        one.first.uc_stack.ss_sp = stacks + i * stack_bytes;
        one.first.uc_stack.ss_size = stack_bytes;
        one.first.uc_link = nullptr;
        makecontext(&one.first, begin, 0);
    }
    const long blocks = (long)grid[0] * grid[1] * grid[2];
    for (volatile long b = 0; b < blocks; b = b + 1) {
        const unsigned at = (unsigned)b;
        blockIdx = {at % grid[0], at / grid[0] % grid[1], at / grid[0] / grid[1]};
        memset(__start_shared, 0xa5, __stop_shared - __start_shared);
        for (Thread& one : block.threads) one.has_begun = one.has_ended = false;
        for (size_t w = 0; w < block.warps.size(); w++)
            block.warps[w].barrier = {w + 1 == block.warps.size() ? all - 32 * (int)w : 32, 0, 0};
        block.barrier = {all, 0, 0};
        block.left = all;
        block.turns = 0;
        block.running = block.step > 0 ? all - 1 : 0;
        const int how = setjmp(block.launch);
        if (how == 0) go_on();
        if (how == 1) return block.wrong;
    }
    return nullptr;
}
"""
ENTRY = r"""
extern "C" const char* launch_NAME(
    void** arguments, const int* sizes, int count, const unsigned* grid, const unsigned* threads, int is_reversed)
{
    return launch(entry_NAME, arguments, sizes, count, grid, threads, is_reversed);
}
"""
# Matches an assembler statement: its strings, then outputs, inputs and clobbers. For example, `asm("cvt.f32.f16 %0,
# %1;" : "=f"(value) : "h"(bits));`.
ASM = re.compile(r'asm\s*(?:volatile\s*)?\(((?:\s*"(?:[^"\\]|\\.)*")+)(.*?)\);', re.DOTALL)
OPERAND = re.compile(r'"[=+]?[a-z]"\s*\(')
TYPEDEF = re.compile(r"^typedef .*_t;\n", re.MULTILINE)  # <cstdint> defines them
KERNEL = re.compile(r"(KERNEL\s+(?:__launch_bounds__\([^)]*\)\s*)?)(\w+)\(")


def _of_ptx(found: re.Match[str]) -> str:
    """Return the C++ that replaces an assembler statement: a call of a SHIM function with the same operands."""
    text, operands = found.groups()
    name = re.sub(r"\\[nt]|[{}]", "", text.split('"')[1]).split()[0].rstrip(";")
    given = []
    for one in OPERAND.finditer(operands):
        depth, end = 1, one.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(operands[end], 0)
            end += 1
        given.append(operands[one.end() : end - 1])
    return f"ptx_{re.sub(r'[^A-Za-z0-9]', '_', name)}({', '.join(given)});"


def compiler() -> str:
    """Return the path of g++. Raises ComputeError if it is not installed."""
    found = shutil.which("g++")
    if found is None:
        raise ComputeError("no g++ to compile CUDA C++ with for this machine")
    return found


def loaded(source: str, exported: str = "") -> ctypes.CDLL:
    """Compile CUDA C++ for this machine and load the result.

    The project's CUDA prelude comes before the source, and `exported` C++ after it. If the same source was compiled
    before, that library is loaded again. Raises ComputeError if there is no compiler, or with the compiler's message
    if compilation fails.
    """
    # Rename the entries, because templates can have the same name as an entry.
    renamed = KERNEL.sub(r"\1entry_\2(", source)
    prelude, own = (ASM.sub(_of_ptx, text) for text in (TYPEDEF.sub("", PRELUDE), renamed))
    entries = "".join(ENTRY.replace("NAME", name) for _, name in KERNEL.findall(source))
    whole = f"namespace {{\n{prelude}{own}\n}}\n{entries}{exported}"
    return ctypes.CDLL(str(_compiled(whole, ".so", "-shared", "-include", str(_shim()))))


@cache
def _shim() -> Path:
    """Return SHIM as a precompiled header, which saves half of the compile time of a module."""
    made = _compiled(SHIM, ".h.gch", "-x", "c++-header")
    header = made.with_suffix("")
    replace_whole(header, SHIM.encode())
    return header


def _compiled(text: str, suffix: str, *options: str) -> Path:
    """Run g++ on the source `text` and return the path of the file that it creates."""
    command = [compiler(), *OPTIONS, *options]
    kept = cache_dir() / "cuda_on_cpu" / f"{hashlib.sha256(repr((command, text)).encode()).hexdigest()}{suffix}"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            source, made = Path(folder, "source.cpp"), Path(folder, "made")
            source.write_text(text)
            told = subprocess.run([*command, "-o", made, source], capture_output=True, text=True, check=False)
            if told.returncode:
                raise ComputeError(told.stderr[:4000])
            replace_whole(kept, made.read_bytes())
    return kept


def guarded(values: Any) -> Any:
    """Return a copy of an array, aligned as on a GPU.

    The copy is between guard bytes that no launch may change.
    """
    values = np.asarray(values)
    pages = mmap.mmap(-1, 2 * GUARD_BYTES + max(values.nbytes, 1))
    space = np.frombuffer(pages, np.uint8)
    space[:GUARD_BYTES] = space[-GUARD_BYTES:] = GUARD
    out = space[GUARD_BYTES : GUARD_BYTES + values.nbytes].view(values.dtype).reshape(values.shape).view(DeviceArray)
    out[...] = values
    return out


def _is_whole(array: Any) -> bool:
    """Return whether the guard bytes around `array` are unchanged. `guarded` has created the array or its base."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return bool(np.array_equal(array[:GUARD_BYTES], GUARD) and np.array_equal(array[-GUARD_BYTES:], GUARD))


class CpuAsGpu(Gpu):
    """A replacement of Gpu with NumPy arrays. Launches run on the host. Raises ComputeError without g++."""

    def __init__(self, *, is_reversed: bool = False) -> None:
        """With `is_reversed`, the threads of a block run in reverse order between two barriers."""
        compiler()
        self.name = "this machine"
        self.cupy = SimpleNamespace(ndarray=DeviceArray)
        self.multiprocessors = MULTIPROCESSORS
        self.is_reversed = is_reversed
        self._libraries: dict[CudaModule, ctypes.CDLL] = {}
        self._process = os.getpid()

    def source(self, module: CudaModule) -> str:
        """Return the CUDA C++ that is compiled for `module`: its source, unchanged."""
        return module.source

    def synchronize(self) -> None:
        """Do nothing, because each launch ends before it returns."""

    def require_room(self, size_bytes: int, what: str) -> None:
        """Do nothing, because the memory of the host is large enough."""

    def array(self, values: Any) -> Any:
        """Return a guarded copy."""
        return guarded(values)

    def host(self, array: Any) -> Any:
        """Return a copy."""
        return array.copy()

    def zeros(self, shape: Any, dtype: Any) -> Any:
        """Return a guarded array of zeros."""
        return guarded(np.zeros(shape, dtype))

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return zeros as `zeros` does. Memory of the host needs no pinning."""
        return self.zeros(shape, dtype)

    def planes(self, layout: PlaneLayout, matrix: QuantizedMatrix, experts: int | None = None) -> Any:
        """Return the planes of a quantised matrix as a GPU gets them, in a guarded array."""
        of_each = [planes_of(matrix.format, rows) for rows in np.split(matrix.data, experts or 1)]
        return guarded(of_each[0] if experts is None else np.stack(of_each))

    def definition(self, one: CudaLaunch) -> KernelDefinition:
        """Return the kernel definition of a launch."""
        return KernelDefinition(one.entry, BACKEND, grid=one.grid, block=one.block)

    def launch(self, one: CudaLaunch | LibraryCall, stamp: int | None = None, *, is_early: bool = False) -> None:
        """Run the launch to its end. Raises ComputeError if it violates a rule."""
        if isinstance(one, LibraryCall):
            bf16_product(*one.call.args)  # type: ignore[attr-defined]
            return
        if one.shared_bytes or stamp is not None:
            raise ComputeError(f"{one.entry}: dynamic shared memory and stamps are a GPU's")
        given = [_parameter(value) for value in one.arguments]
        pointers = (ctypes.c_void_p * len(given))(*(ctypes.addressof(value) for value in given))
        sizes = (ctypes.c_int * len(given))(*(ctypes.sizeof(value) for value in given))
        grid, block = ((ctypes.c_uint * 3)(*dimensions) for dimensions in (one.grid, one.block))
        if one.module not in self._libraries:
            self._libraries[one.module] = loaded(self.source(one.module))
        function: Any = self._libraries[one.module][f"launch_{one.entry}"]
        function.restype = ctypes.c_char_p
        wrong: bytes | None = function(pointers, sizes, len(given), grid, block, int(self.is_reversed))
        if wrong is None and not all(_is_whole(value) for value in one.arguments if isinstance(value, np.ndarray)):
            wrong = b"it wrote beside an array"
        if wrong is not None:
            raise ComputeError(f"{one.entry} of {one.module.name}: {wrong.decode()}")

    def prepared(
        self, one: CudaLaunch | LibraryCall, stamp: int | None = None, *, is_early: bool = False
    ) -> Callable[[], None]:
        """Return a function that runs the launch each time it is called."""
        return lambda: self.launch(one, stamp, is_early=is_early)


def bf16_product(weights: Any, x: Any, out: Any, columns: int) -> None:
    """Multiply matrices in bfloat16, as `cuda.gemm.bf16_product` does with cuBLAS."""
    tokens, rows = out.shape
    left, right = (
        (one.reshape(-1)[: count * columns].astype(np.uint32) << 16).view(np.float32).reshape(count, columns)
        for one, count in ((x, tokens), (weights, rows))
    )
    out[...] = left @ right.T


def _parameter(value: Any) -> Any:
    """Return an argument of a launch as a C value."""
    if isinstance(value, np.generic):
        kind: Any = value.dtype
        return np.ctypeslib.as_ctypes_type(kind)(value.item())
    return ctypes.c_void_p(value.ctypes.data)
