"""The beginning of every CUDA source. It includes no header, so NVRTC can compile it without a toolkit."""

from __future__ import annotations

# A stamp is the time of "%globaltimer" (CUDA Guide, PTX ISA) when a kernel begins or ends. The first block of a
# kernel writes the begin. Every block writes the end with `atomicMax`, so the time of the last block remains. Stamps
# need no reset, because time only grows.
PRELUDE = r"""
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;

#define KERNEL extern "C" __global__ void

// In a captured graph a launch may be scheduled while the one before it ends (CUDA Guide, "Programmatic Dependent
// Launch"): it waits, before it reads or writes anything, until that has ended. Launched otherwise it waits for none.
#if __CUDA_ARCH__ >= 900
#define WAIT_FOR_LAUNCH_BEFORE asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#else
#define WAIT_FOR_LAUNCH_BEFORE
#endif

// A kernel's last parameter is STAMP, its first statement ENTER and its last LEAVE, which every thread reaches.
#ifdef STAMPED
__device__ __forceinline__ uint64_t now()
{
    uint64_t time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}
__device__ __forceinline__ bool is_first_thread() { return (threadIdx.x | threadIdx.y | threadIdx.z) == 0; }
#define STAMP , uint64_t* stamp
#define ENTER \
    WAIT_FOR_LAUNCH_BEFORE \
    if (is_first_thread() && (blockIdx.x | blockIdx.y | blockIdx.z) == 0) stamp[0] = now();
#define LEAVE __syncthreads(); if (is_first_thread()) atomicMax(stamp + 1, now());
#else
#define STAMP
#define ENTER WAIT_FOR_LAUNCH_BEFORE
#define LEAVE
#endif

__device__ __forceinline__ float of_half(uint16_t bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ __forceinline__ uint16_t to_half(float value)
{
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
__device__ __forceinline__ float of_bf16(uint16_t bits) { return __uint_as_float((uint32_t)bits << 16); }
__device__ __forceinline__ uint16_t to_bf16(float value)
{
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
__device__ __forceinline__ uint32_t two_bf16(float low, float high)
{
    return to_bf16(low) | (uint32_t)to_bf16(high) << 16;
}

// 16 bytes that are read once: they leave the first-level cache to what is read again.
__device__ __forceinline__ uint4 load_once(const void* from)
{
    uint4 a;
    asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(a.x), "=r"(a.y), "=r"(a.z), "=r"(a.w) : "l"(from));
    return a;
}

// Of a warp: every thread has the result.
__device__ __forceinline__ float warp_sum(float value)
{
    for (int apart = 16; apart; apart /= 2) value += __shfl_xor_sync(~0u, value, apart);
    return value;
}
__device__ __forceinline__ float warp_max(float value)
{
    for (int apart = 16; apart; apart /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, apart));
    return value;
}

// Of a block of whole warps along x, 1024 threads at most: every thread has the result. `space`: 32 shared floats.
__device__ __forceinline__ float block_sum(float value, float* space)
{
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) space[threadIdx.x / 32] = value;
    __syncthreads();
    return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? space[threadIdx.x % 32] : 0.0f);
}
"""
