// q2_K to q6_K: super-blocks of 256 whose sub-blocks of 16 or 32 have small integer scales.
#include "decode.cuh"

// d * q - m. The product is exact, so fusing it with the subtraction changes nothing.
__device__ __forceinline__ bool less_minimum(float d, float m, Codes q, float (&v)[8]) {
#pragma unroll
    for (u32 k = 0; k < 8; k++) v[k] = __fmaf_rn(d, q.less(k, 0), -m);
    return unreal(d, m);
}

// d * (q - BIAS)
template <u32 BIAS> __device__ __forceinline__ bool centred(float d, Codes q, float (&v)[8]) {
#pragma unroll
    for (u32 k = 0; k < 8; k++) v[k] = d * q.less(k, BIAS);
    return unreal(d);
}

// Eight 2-bit codes: of each 128 elements, byte j of 32 holds elements j, j + 32, j + 64, j + 96.
template <u32 A, class B> __device__ __forceinline__ Codes twos(B b, u32 offset, u32 i) {
    Codes q = b.template codes<A>(offset + i / 128 * 32 + i % 32);
    u32 shift = i / 32 % 4 * 2;
    return {q.lo >> shift & 0x03030303u, q.hi >> shift & 0x03030303u};
}

// Bit n of each of 8 bytes, for element i + 32 n of byte i.
template <u32 A, class B> __device__ __forceinline__ Codes bits(B b, u32 offset, u32 i) {
    Codes q = b.template codes<A>(offset + i % 32);
    u32 shift = i / 32;
    return {q.lo >> shift & 0x01010101u, q.hi >> shift & 0x01010101u};
}

// 16 bytes of scale (low nibble) and minimum (high), 64 bytes of 2-bit codes, d f16, dmin f16
struct Q2_K {
    static constexpr u32 BLOCK = 256, BYTES = 84;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        u32 scale = b.byte(i / 16), dm = b.template word<4>(80);
        return less_minimum(half(dm) * (float)(scale & 15), half(dm >> 16) * (float)(scale >> 4),
                            twos<8>(b, 16, i), v);
    }
};

// 32 bytes of third bits, 64 bytes of 2-bit codes, 12 bytes of sixteen 6-bit scales, d f16
struct Q3_K {
    static constexpr u32 BLOCK = 256, BYTES = 110;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        u32 s = i / 16, d = b.pair(108);
        u32 low = b.byte(96 + s % 8) >> s / 8 * 4 & 15;
        u32 high = b.byte(104 + s % 4) >> s / 4 * 2 & 3;
        Codes q = twos<8>(b, 32, i), h = bits<8>(b, 0, i);
        return centred<4>(half(d) * (float)((int)(low | high << 4) - 32),
                          {q.lo | h.lo << 2, q.hi | h.hi << 2}, v);
    }
};

// Scale and minimum of sub-block i / 32 from d, dmin and the 12 bytes of eight 6-bit pairs.
struct Affine {
    float d, m;
    template <class B> __device__ __forceinline__ Affine(B b, u32 i) {
        uint4 head = *(const uint4 *)b.p;  // blocks of 144 and 176 bytes: 16-byte aligned
        u32 shift = i / 32 % 4 * 8;
        u32 first = head.y >> shift, second = head.z >> shift, third = head.w >> shift;
        u32 scale = first & 63, minimum = second & 63;
        if (i >= 128) {
            scale = (third & 15) | (first >> 2 & 48);
            minimum = (third >> 4 & 15) | (second >> 2 & 48);
        }
        d = half(head.x) * (float)scale;
        m = half(head.x >> 16) * (float)minimum;
    }
};

// Eight 4-bit codes: of each 64 elements, byte j of 32 holds elements j and j + 32.
template <class B> __device__ __forceinline__ Codes fours(B b, u32 offset, u32 i) {
    Codes q = b.template codes<8>(offset + i / 64 * 32 + i % 32);
    u32 shift = i / 32 % 2 * 4;
    return {q.lo >> shift & 0x0f0f0f0fu, q.hi >> shift & 0x0f0f0f0fu};
}

// d f16, dmin f16, 12 bytes of scales and minima, 128 bytes of nibbles
struct Q4_K {
    static constexpr u32 BLOCK = 256, BYTES = 144;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        Affine a(b, i);
        return less_minimum(a.d, a.m, fours(b, 16, i), v);
    }
};

// d f16, dmin f16, 12 bytes of scales and minima, 32 bytes of fifth bits, 128 bytes of nibbles
struct Q5_K {
    static constexpr u32 BLOCK = 256, BYTES = 176;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        Affine a(b, i);
        Codes q = fours(b, 48, i), h = bits<8>(b, 16, i);
        return less_minimum(a.d, a.m, {q.lo | h.lo << 4, q.hi | h.hi << 4}, v);
    }
};

// 128 bytes of nibbles, 64 bytes of 2-bit high parts, 16 signed scales, d f16. Of each 128
// elements, byte j of 64 holds the low nibbles of elements j and j + 64.
struct Q6_K {
    static constexpr u32 BLOCK = 256, BYTES = 210;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        float scale = half(b.pair(208)) * (float)(int)(signed char)b.byte(192 + i / 16);
        Codes q = b.template codes<8>(i / 128 * 64 + i % 64), h = twos<8>(b, 128, i);
        u32 shift = i / 64 % 2 * 4;
        return centred<32>(scale,
                           {(q.lo >> shift & 0x0f0f0f0fu) | h.lo << 4,
                            (q.hi >> shift & 0x0f0f0f0fu) | h.hi << 4},
                           v);
    }
};

DECODE_ENTRIES(q2_K, Q2_K)
DECODE_ENTRIES(q3_K, Q3_K)
DECODE_ENTRIES(q4_K, Q4_K)
DECODE_ENTRIES(q5_K, Q5_K)
DECODE_ENTRIES(q6_K, Q6_K)
