// q4_0, q4_1, q5_0, q5_1 and q8_0: blocks of 32 with one f16 scale, some with an f16 minimum.
#include "decode.cuh"

// Eight 4-bit codes of a block of 32 whose byte j holds elements j (low nibble) and j + 16.
// A is the alignment of `offset`.
template <u32 A, class B> __device__ __forceinline__ Codes nibbles(B b, u32 offset, u32 i) {
    Codes q = b.template codes<A>(offset + (i & 8));
    u32 shift = i / 16 * 4;
    return {q.lo >> shift & 0x0f0f0f0fu, q.hi >> shift & 0x0f0f0f0fu};
}

// The same with a fifth bit for element j in bit j of `high`.
template <u32 A, class B>
__device__ __forceinline__ Codes fives(B b, u32 offset, u32 high, u32 i) {
    Codes q = nibbles<A>(b, offset, i);
    return {q.lo | spread1(high >> i) << 4, q.hi | spread1(high >> i >> 4) << 4};
}

// d * (q - bias)
template <u32 BIAS>
__device__ __forceinline__ bool scaled(u32 d_bits, Codes q, float (&v)[8]) {
    float d = half(d_bits);
#pragma unroll
    for (u32 k = 0; k < 8; k++) v[k] = d * q.less(k, BIAS);
    return unreal(d);
}

// d * q + m, with d in the low and m in the high half of `dm`. The product is exact, so fusing it
// with the addition changes nothing.
__device__ __forceinline__ bool shifted(u32 dm, Codes q, float (&v)[8]) {
    float d = half(dm), m = half(dm >> 16);
#pragma unroll
    for (u32 k = 0; k < 8; k++) v[k] = __fmaf_rn(d, q.less(k, 0), m);
    return unreal(d, m);
}

// d f16, 16 bytes of nibbles
struct Q4_0 {
    static constexpr u32 BLOCK = 32, BYTES = 18;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        return scaled<8>(b.pair(0), nibbles<2>(b, 2, i), v);
    }
};

// d f16, m f16, 16 bytes of nibbles
struct Q4_1 {
    static constexpr u32 BLOCK = 32, BYTES = 20;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        return shifted(b.template word<4>(0), nibbles<4>(b, 4, i), v);
    }
};

// d f16, fifth bits u32, 16 bytes of nibbles
struct Q5_0 {
    static constexpr u32 BLOCK = 32, BYTES = 22;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        return scaled<16>(b.pair(0), fives<2>(b, 6, b.template word<2>(2), i), v);
    }
};

// d f16, m f16, fifth bits u32, 16 bytes of nibbles
struct Q5_1 {
    static constexpr u32 BLOCK = 32, BYTES = 24;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        return shifted(b.template word<4>(0), fives<8>(b, 8, b.template word<4>(4), i), v);
    }
};

// d f16, 32 signed bytes
struct Q8_0 {
    static constexpr u32 BLOCK = 32, BYTES = 34;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        Codes q = b.template codes<2>(2 + i);
        return scaled<128>(b.pair(0), {q.lo ^ 0x80808080u, q.hi ^ 0x80808080u}, v);
    }
};

DECODE_ENTRIES(q4_0, Q4_0)
DECODE_ENTRIES(q4_1, Q4_1)
DECODE_ENTRIES(q5_0, Q5_0)
DECODE_ENTRIES(q5_1, Q5_1)
DECODE_ENTRIES(q8_0, Q8_0)
