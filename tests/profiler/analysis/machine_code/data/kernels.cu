extern "C" {
// 40 values live at once with 24 registers
__global__ void __launch_bounds__(256) spilled(const volatile float* in, float* out)
{
    float v[40];
#pragma unroll
    for (int i = 0; i < 40; i++) v[i] = in[threadIdx.x + 256 * i];
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int i = 39; i >= 0; i--) sum = sum * v[i] + v[(i * 7) % 40];
    out[threadIdx.x] = sum;
}
__global__ void __launch_bounds__(128) indexed(const int* __restrict__ where, const float* __restrict__ in, float* out)
{
    float table[16];
    for (int i = 0; i < 16; i++) table[i] = in[i * 128 + threadIdx.x];
    for (int i = 0; i < 16; i++) out[i * 128 + threadIdx.x] = table[where[i] & 15];
}
__global__ void narrow(const float* __restrict__ in, float* out)
{
    const float* own = in + 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    out[blockIdx.x * blockDim.x + threadIdx.x] = own[0] + own[1] + own[2] + own[3];
}
__global__ void wide(const float4* __restrict__ in, float* out)
{
    const float4 own = in[blockIdx.x * blockDim.x + threadIdx.x];
    out[blockIdx.x * blockDim.x + threadIdx.x] = own.x + own.y + own.z + own.w;
}
__global__ void __launch_bounds__(64) shared_rows(const float* __restrict__ in, float* out, int rows)
{
    __shared__ float tile[5000];
    float sum = 0;
    for (int row = 0; row < rows; row++) {
        tile[threadIdx.x] = in[row * 64 + threadIdx.x];
        __syncthreads();
        sum += tile[63 - threadIdx.x];
        __syncthreads();
    }
    out[threadIdx.x] = sum;
}
}
