// Reads lines of limits and of a kernel, and writes the blocks an SM that NVIDIA's own header computes.
#include <cuda_occupancy.h>

#include <climits>
#include <cstdio>

int main() {
    int major, minor, warps, threads, registers, barriers;
    long sharedOfSm, reserved, shared;
    while (scanf("%d %d %d %ld %ld %d %d %ld %d", &major, &minor, &warps, &sharedOfSm, &reserved, &threads, &registers,
                 &shared, &barriers) == 9) {
        cudaOccDeviceProp properties;
        properties.computeMajor = major;
        properties.computeMinor = minor;
        properties.maxThreadsPerBlock = 1024;
        properties.maxThreadsPerMultiprocessor = warps * 32;
        properties.regsPerBlock = properties.regsPerMultiprocessor = 65536;
        properties.warpSize = 32;
        properties.sharedMemPerBlock = 48 * 1024;
        properties.sharedMemPerMultiprocessor = sharedOfSm;
        properties.sharedMemPerBlockOptin = sharedOfSm - reserved;
        properties.reservedSharedMemPerBlock = reserved;
        properties.numSms = 1;
        cudaOccFuncAttributes kernel;
        kernel.maxThreadsPerBlock = INT_MAX;
        kernel.numRegs = registers;
        kernel.sharedSizeBytes = 0;
        kernel.maxDynamicSharedSizeBytes = shared;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        kernel.numBlockBarriers = barriers;
        cudaOccDeviceState state;
        cudaOccResult result;
        cudaOccError status =
            cudaOccMaxActiveBlocksPerMultiprocessor(&result, &properties, &kernel, &state, threads, shared);
        printf("%d\n", status == CUDA_OCC_SUCCESS ? result.activeBlocksPerMultiprocessor : -1);
    }
}
