// mxfp4 and nvfp4: e2m1 codes with a scale of 8 bits.
#include "decode.cuh"

// Twice the value of each e2m1 code, plus 128: 0 1 2 3 4 6 8 12 and their negatives. Code 8,
// negative zero, is plain zero here, as in ggml.
__device__ __forceinline__ Codes e2m1(Codes q) {
    uint4 table = make_uint4(0x83828180u, 0x8c888684u, 0x7d7e7f80u, 0x74787a7cu);
    return {lookup16(q.lo, table), lookup16(q.hi, table)};
}

// e8m0 exponent, 16 bytes of nibbles: byte j holds elements j and j + 16. The scale is half the
// exponent's power of two, subnormal for 0 and 1.
struct Mxfp4 {
    static constexpr u32 BLOCK = 32, BYTES = 17;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        u32 e = b.byte(0), shift = i / 16 * 4;
        float d = from_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        Codes q = b.template codes<1>(1 + (i & 8));
        q = e2m1({q.lo >> shift & 0x0f0f0f0fu, q.hi >> shift & 0x0f0f0f0fu});
#pragma unroll
        for (u32 k = 0; k < 8; k++) v[k] = d * q.less(k, 128);
        return false;
    }
};

// Four unsigned e4m3 scales (the sign bit is ignored, 0x7f is 0), 32 bytes of nibbles: of each 16
// elements, byte j of 8 holds elements j and j + 8. The scale is halved, as for mxfp4.
struct Nvfp4 {
    static constexpr u32 BLOCK = 64, BYTES = 36;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        u32 s = i / 16, scale = b.byte(s), shift = i / 8 % 2 * 4;
        u32 exponent = scale >> 3 & 15, mantissa = scale & 7;
        float d = exponent == 0 ? (float)mantissa * 0.0009765625f  // 2^-10
                                : from_bits((exponent + 119) << 23 | mantissa << 20);
        if (scale == 0x7f) d = 0.0f;
        Codes q = b.template codes<4>(4 + 8 * s);
        q = e2m1({q.lo >> shift & 0x0f0f0f0fu, q.hi >> shift & 0x0f0f0f0fu});
#pragma unroll
        for (u32 k = 0; k < 8; k++) v[k] = d * q.less(k, 128);
        return false;
    }
};

DECODE_ENTRIES(mxfp4, Mxfp4)
DECODE_ENTRIES(nvfp4, Nvfp4)
