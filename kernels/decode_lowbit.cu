// q1_0 and q2_0: codes of one and two bits with one f16 scale.
#include "decode.cuh"

// d f16, 16 bytes: bit j set means d, clear means -d
struct Q1_0 {
    static constexpr u32 BLOCK = 128, BYTES = 18;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        u32 bits = b.byte(2 + i / 8);
        float d = half(b.pair(0));
        u32 minus = __float_as_uint(d) ^ 0x80000000u;
#pragma unroll
        for (u32 k = 0; k < 8; k++) v[k] = from_bits(minus ^ (bits >> k) << 31);
        return unreal(d);
    }
};

// d f16, 16 bytes of 2-bit codes in element order: d * (q - 1)
struct Q2_0 {
    static constexpr u32 BLOCK = 64, BYTES = 18;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        u32 codes = b.pair(2 + i / 4);
        Codes q = {spread2(codes & 255), spread2(codes >> 8)};
        float d = half(b.pair(0));
#pragma unroll
        for (u32 k = 0; k < 8; k++) v[k] = d * q.less(k, 1);
        return unreal(d);
    }
};

DECODE_ENTRIES(q1_0, Q1_0)
DECODE_ENTRIES(q2_0, Q2_0)
