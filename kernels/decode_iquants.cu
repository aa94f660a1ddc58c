// The importance-weighted types: codes are indices into grids of 4 or 8 values (grids.cuh), or, for
// iq4_nl and iq4_xs, into one table of 16 values.
#include "decode.cuh"
#include "grids.cuh"

// d * g for 8 grid bytes, negated where a bit of `signs` is set.
__device__ __forceinline__ bool signed_grid(float d, Codes g, u32 signs, float (&v)[8]) {
#pragma unroll
    for (u32 k = 0; k < 8; k++) {
        float value = d * g.less(k, 0);
        v[k] = from_bits(__float_as_uint(value) ^ (signs >> k << 31));
    }
    return unreal(d);
}

// Eight signs from seven bits: the eighth makes the number of negatives even.
__device__ __forceinline__ u32 signs7(u32 bits) {
    bits &= 127;
    return bits | (__popc(bits) & 1) << 7;
}

// The eight elements of a grid entry of 2-bit levels: byte n of `levels` is level n.
__device__ __forceinline__ Codes grid8(const u16 *grid, u32 index, u32 levels) {
    u32 numbers = __ldg(grid + index);
    numbers = (numbers | numbers << 8) & 0x00ff00ffu;
    numbers = (numbers | numbers << 4) & 0x0f0f0f0fu;
    numbers = (numbers | numbers << 2) & 0x33333333u;
    return {__byte_perm(levels, 0, numbers), __byte_perm(levels, 0, numbers >> 16)};
}

// The four elements of a grid entry of 4-bit levels, of which there are eight.
__device__ __forceinline__ u32 grid4(const u16 *grid, u32 index, uint2 levels) {
    return __byte_perm(levels.x, levels.y, __ldg(grid + index));
}

// The levels of the grids, as in src/quant/grids.rs: 8 25 43; 4 12 20 28 36 44 52 62;
// 1 3 5 7 9 11 13 15; and -1 0 1, here plus 1.
constexpr u32 LEVELS_IQ2 = 0x002b1908u, LEVELS_IQ1 = 0x00020100u;
constexpr uint2 LEVELS_IQ3_XXS = {0x1c140c04u, 0x3e342c24u};
constexpr uint2 LEVELS_IQ3_S = {0x07050301u, 0x0f0d0b09u};

// d f16, then per 32 elements two u32: four grid indices; four times 7 signs and a 4-bit scale
struct Iq2_xxs {
    static constexpr u32 BLOCK = 256, BYTES = 66;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        Codes pair = b.template codes<2>(2 + i / 32 * 8);
        u32 l = i / 8 % 4;
        float scale = half(b.pair(0)) * (0.5f + (float)(pair.hi >> 28)) * 0.25f;
        Codes g = grid8(IQ2_XXS, pair.lo >> 8 * l & 255, LEVELS_IQ2);
        return signed_grid(scale, g, signs7(pair.hi >> 7 * l), v);
    }
};

// d f16, per 8 elements a u16 (9-bit index, 7 signs), per 16 elements a 4-bit scale
struct Iq2_xs {
    static constexpr u32 BLOCK = 256, BYTES = 74;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        u32 code = b.pair(2 + i / 8 * 2);
        u32 nibble = b.byte(66 + i / 32) >> i / 16 % 2 * 4 & 15;
        float scale = half(b.pair(0)) * (0.5f + (float)nibble) * 0.25f;
        return signed_grid(scale, grid8(IQ2_XS, code & 511, LEVELS_IQ2), signs7(code >> 9), v);
    }
};

// d f16, per 8 elements a byte of index and a byte of signs, 2 more index bits each, 4-bit scales
struct Iq2_s {
    static constexpr u32 BLOCK = 256, BYTES = 82;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        u32 l = i / 8;
        u32 index = b.byte(2 + l) | (b.byte(66 + l / 4) >> l % 4 * 2 & 3) << 8;
        u32 nibble = b.byte(74 + i / 32) >> i / 16 % 2 * 4 & 15;
        float scale = half(b.pair(0)) * (0.5f + (float)nibble) * 0.25f;
        return signed_grid(scale, grid8(IQ2_S, index, LEVELS_IQ2), b.byte(34 + l), v);
    }
};

// d f16, per 4 elements a byte of index, per 32 a u32: four times 7 signs and a 4-bit scale
struct Iq3_xxs {
    static constexpr u32 BLOCK = 256, BYTES = 98;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        u32 indices = b.pair(2 + i / 4), aux = b.template word<2>(66 + i / 32 * 4);
        float scale = half(b.pair(0)) * (0.5f + (float)(aux >> 28)) * 0.5f;
        Codes g = {grid4(IQ3_XXS, indices & 255, LEVELS_IQ3_XXS),
                   grid4(IQ3_XXS, indices >> 8, LEVELS_IQ3_XXS)};
        return signed_grid(scale, g, signs7(aux >> i / 8 % 4 * 7), v);
    }
};

// d f16, per 4 elements a byte of index and a ninth bit, per 8 a byte of signs, per 32 a scale
struct Iq3_s {
    static constexpr u32 BLOCK = 256, BYTES = 110;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        u32 indices = b.pair(2 + i / 4);
        u32 ninth = b.byte(66 + i / 32) >> i / 8 % 4 * 2;
        u32 nibble = b.byte(106 + i / 64) >> i / 32 % 2 * 4 & 15;
        float scale = half(b.pair(0)) * (float)(1 + 2 * nibble);
        Codes g = {grid4(IQ3_S, (indices & 255) | (ninth & 1) << 8, LEVELS_IQ3_S),
                   grid4(IQ3_S, indices >> 8 | (ninth & 2) << 7, LEVELS_IQ3_S)};
        return signed_grid(scale, g, b.byte(74 + i / 8), v);
    }
};

// d * (g + delta), where g is -1, 0 or 1 and delta 1/8 or -1/8
__device__ __forceinline__ bool moved_grid(float d, u32 index, bool minus, float (&v)[8]) {
    Codes g = grid8(IQ1, index, LEVELS_IQ1);
    float delta = minus ? -0.125f : 0.125f;
#pragma unroll
    for (u32 k = 0; k < 8; k++) v[k] = d * __fadd_rn(g.less(k, 1), delta);
    return unreal(d);
}

// d f16, per 8 elements a byte of index, per 32 a u16: four times 3 index bits, scale, sign
struct Iq1_s {
    static constexpr u32 BLOCK = 256, BYTES = 50;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        u32 high = b.pair(34 + i / 32 * 2);
        float scale = half(b.pair(0)) * (float)(2 * (high >> 12 & 7) + 1);
        u32 index = b.byte(2 + i / 8) | (high >> i / 8 % 4 * 3 & 7) << 8;
        return moved_grid(scale, index, high >> 15, v);
    }
};

// Per 8 elements a byte of index and a nibble (3 index bits, sign), per 16 a 3-bit scale; the top
// nibbles of the four u16 of scales are d f16.
struct Iq1_m {
    static constexpr u32 BLOCK = 256, BYTES = 56;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        Codes scales = b.template codes<8>(48);
        u32 d = (scales.lo >> 12 & 0x000f) | (scales.lo >> 24 & 0x00f0) |
                (scales.hi >> 4 & 0x0f00) | (scales.hi >> 16 & 0xf000);
        u32 sixteen = i / 16;
        u32 bits = (i < 128 ? scales.lo : scales.hi) >> sixteen / 4 % 2 * 16 >> sixteen % 4 * 3 & 7;
        u32 nibble = b.byte(32 + sixteen) >> i / 8 % 2 * 4;
        u32 index = b.byte(i / 8) | (nibble & 7) << 8;
        return moved_grid(half(d) * (float)(2 * bits + 1), index, (nibble & 8) != 0, v);
    }
};

// Eight table values, plus 128, of a run of 32 codes whose byte j holds elements j and j + 16:
// -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.
template <u32 A, class B> __device__ __forceinline__ Codes uneven(B b, u32 offset, u32 i) {
    uint4 table = make_uint4(0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u);
    Codes q = b.template codes<A>(offset + (i & 8));
    u32 shift = i / 16 % 2 * 4;
    return {lookup16(q.lo >> shift & 0x0f0f0f0fu, table),
            lookup16(q.hi >> shift & 0x0f0f0f0fu, table)};
}

// d f16, 16 bytes of nibbles
struct Iq4_nl {
    static constexpr u32 BLOCK = 32, BYTES = 18;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        float d = half(b.pair(0));
        Codes q = uneven<2>(b, 2, i);
#pragma unroll
        for (u32 k = 0; k < 8; k++) v[k] = d * q.less(k, 128);
        return unreal(d);
    }
};

// d f16, u16 of high scale bits, 4 bytes of low scale nibbles, 128 bytes of nibbles
struct Iq4_xs {
    static constexpr u32 BLOCK = 256, BYTES = 136;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        Codes head = b.template codes<8>(0);
        u32 s = i / 32;
        int scale = (int)((head.hi >> 4 * s & 15) | (head.lo >> 16 >> 2 * s & 3) << 4) - 32;
        float d = half(head.lo) * (float)scale;
        Codes q = uneven<8>(b, 8 + 16 * s, i);
#pragma unroll
        for (u32 k = 0; k < 8; k++) v[k] = d * q.less(k, 128);
        return unreal(d);
    }
};

DECODE_ENTRIES(iq2_xxs, Iq2_xxs)
DECODE_ENTRIES(iq2_xs, Iq2_xs)
DECODE_ENTRIES(iq2_s, Iq2_s)
DECODE_ENTRIES(iq3_xxs, Iq3_xxs)
DECODE_ENTRIES(iq3_s, Iq3_s)
DECODE_ENTRIES(iq1_s, Iq1_s)
DECODE_ENTRIES(iq1_m, Iq1_m)
DECODE_ENTRIES(iq4_nl, Iq4_nl)
DECODE_ENTRIES(iq4_xs, Iq4_xs)
