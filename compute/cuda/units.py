"""CUDA C++ that reads units of 32 weights from planes (parts of the weights' bits) (quantization/planes.py).

The struct of a format with blocks has
    NAME(const uint8_t* planes, int64_t weights)       of a matrix with this number of weights
    void codes(int64_t unit, uint32_t q[8]) const      signed bytes: weight 4 g + b is byte b of q[g]
    float4 scales(int64_t unit) const                  weight = x * code + y of the first 16, z * code + w of the last

The struct of a format of floats is an OfFloats. Its only plane contains the rows. It has
    NAME(const uint8_t* planes, int64_t weights)
    IN_16_BYTES, a constant                            weights in 16 bytes
    void load(int64_t weight, float w[IN_16_BYTES]) const    16 bytes of weights, aligned
    float one(int64_t weight) const
"""

from __future__ import annotations

UNITS = r"""
struct OfFloats {};

// The plane behind one of `bytes`.
__device__ __forceinline__ const uint8_t* behind(const uint8_t* plane, int64_t bytes)
{
    return plane + (bytes + 255) / 256 * 256;
}
__device__ __forceinline__ void codes_of_8(const uint8_t* plane, int64_t unit, uint32_t q[8])
{
    uint4 a = load_once(plane + 32 * unit), b = load_once(plane + 32 * unit + 16);
    q[0] = a.x; q[1] = a.y; q[2] = a.z; q[3] = a.w;
    q[4] = b.x; q[5] = b.y; q[6] = b.z; q[7] = b.w;
}
__device__ __forceinline__ void codes_of_4(const uint8_t* plane, int64_t unit, uint32_t q[8])
{
    uint4 a = load_once(plane + 16 * unit);
    const uint32_t low = 0x0f0f0f0fu;
    q[0] = a.x & low; q[1] = a.y & low; q[2] = a.z & low; q[3] = a.w & low;
    q[4] = a.x >> 4 & low; q[5] = a.y >> 4 & low; q[6] = a.z >> 4 & low; q[7] = a.w >> 4 & low;
}
__device__ __forceinline__ void codes_of_2(const uint8_t* plane, int64_t unit, uint32_t q[8])
{
    uint2 a = __ldg((const uint2*)plane + unit);
#pragma unroll
    for (int s = 0; s < 4; s++) {
        q[s] = a.x >> 2 * s & 0x03030303u;
        q[4 + s] = a.y >> 2 * s & 0x03030303u;
    }
}
// Codes of 4 bits that stand for the sixteen levels of quantization/uneven_levels.py: these.
__device__ __forceinline__ void levels_of_4(const uint8_t* plane, int64_t unit, uint32_t q[8])
{
    const uint32_t level[4] = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};
    uint4 a = load_once(plane + 16 * unit);
    const uint32_t words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int g = 0; g < 4; g++) {
        uint32_t two[2];  // four codes each, the first in the lowest bits: of the eight that a word has every other
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t four = words[g] >> 16 * half, place = four & 0x7777u;
            uint32_t low = __byte_perm(level[0], level[1], place), high = __byte_perm(level[2], level[3], place);
            two[half] = __byte_perm(low, high, 0x3210u | (four & 0x8888u) >> 1);
        }
        q[g] = __byte_perm(two[0], two[1], 0x6420);
        q[4 + g] = __byte_perm(two[0], two[1], 0x7531);
    }
}
// Codes of 4 bits that stand for the sixteen levels of quantization/fp4_levels.py: these, plus 12.
__device__ __forceinline__ void fp4_levels_of_4(const uint8_t* plane, int64_t unit, uint32_t q[8])
{
    uint4 a = load_once(plane + 16 * unit);
    const uint32_t words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int g = 0; g < 4; g++) {
        uint32_t place = words[g] & 0x77777777u;  // the magnitudes' codes; the highest bit of each is the sign
        uint32_t two[2] = {__byte_perm(0x03020100u, 0x0c080604u, place & 0xffff),
            __byte_perm(0x03020100u, 0x0c080604u, place >> 16)};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t size = __byte_perm(two[0], two[1], half ? 0x7531 : 0x6420);
            uint32_t negative = (words[g] >> 4 * half >> 3 & 0x01010101u) * 255;
            q[4 * half + g] = 0x0c0c0c0cu + size - ((size & negative) << 1);
        }
    }
}
// `place`: at which bit of a code the plane's bits stand.
__device__ __forceinline__ void add_codes_of_2(const uint8_t* plane, int64_t unit, int place, uint32_t q[8])
{
    uint2 a = __ldg((const uint2*)plane + unit);
#pragma unroll
    for (int s = 0; s < 4; s++) {
        q[s] |= (a.x >> 2 * s & 0x03030303u) << place;
        q[4 + s] |= (a.y >> 2 * s & 0x03030303u) << place;
    }
}
__device__ __forceinline__ void add_codes_of_1(const uint8_t* plane, int64_t unit, int place, uint32_t q[8])
{
    uint32_t a = __ldg((const uint32_t*)plane + unit);
#pragma unroll
    for (int g = 0; g < 8; g++) q[g] |= (a >> g & 0x01010101u) << place;
}
// Eight scales and eight minima of 6 bits in 12 bytes (quantization/six_bits.py): those of sub-block `s`.
__device__ __forceinline__ void six_bits(uint32_t a, uint32_t b, uint32_t c, int s, float& scale, float& minimum)
{
    int at = 8 * (s & 3);
    uint32_t low = a >> at & 255, least = b >> at & 255, both = c >> at & 255;
    scale = (float)(s < 4 ? low & 63 : (both & 15) | low >> 6 << 4);
    minimum = (float)(s < 4 ? least & 63 : both >> 4 | least >> 6 << 4);
}
// The lines of a unit of blocks that begin with two halves and these 12 bytes.
__device__ __forceinline__ float4 lines_of_six_bits(const uint8_t* heads, int64_t unit)
{
    uint4 head = __ldg((const uint4*)heads + unit / 8);
    float scale, minimum;
    six_bits(head.y, head.z, head.w, unit % 8, scale, minimum);
    scale *= of_half(head.x);
    minimum *= -of_half(head.x >> 16);
    return make_float4(scale, minimum, scale, minimum);
}
// Weights 8 `part` to 8 `part` + 7 of a unit.
template <class Format>
__device__ __forceinline__ void eight_weights(const Format& format, int64_t unit, int part, float w[8])
{
    uint32_t q[8];
    format.codes(unit, q);
    float4 s = format.scales(unit);
    uint32_t a = part & 1 ? part & 2 ? q[6] : q[2] : part & 2 ? q[4] : q[0];
    uint32_t b = part & 1 ? part & 2 ? q[7] : q[3] : part & 2 ? q[5] : q[1];
    float scale = part & 2 ? s.z : s.x, offset = part & 2 ? s.w : s.y;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        w[i] = scale * (float)(int8_t)(a >> 8 * i) + offset;
        w[4 + i] = scale * (float)(int8_t)(b >> 8 * i) + offset;
    }
}
"""
