// Plain numbers, one a block: f32, f16, bf16 and f64. A dtype that stays is copied bit for bit; the
// others go through f32, each step rounded to nearest even.
#include "decode.cuh"

// The 32-bit word k of a block that starts at a multiple of 4 bytes.
template <class B> __device__ __forceinline__ u32 word(B b, u32 k) {
    return ((const u32 *)b.p)[k];
}

__device__ __forceinline__ bool any_nan(const float (&v)[8]) {
    bool any = false;
#pragma unroll
    for (u32 k = 0; k < 8; k++) any |= v[k] != v[k];
    return any;
}

struct F32 {
    static constexpr u32 BLOCK = 1, BYTES = 4;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32, float (&v)[8]) {
#pragma unroll
        for (u32 k = 0; k < 8; k++) v[k] = from_bits(word(b, k));
        return any_nan(v);
    }
};

struct F16 {
    static constexpr u32 BLOCK = 1, BYTES = 2;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32, float (&v)[8]) {
#pragma unroll
        for (u32 k = 0; k < 8; k++) v[k] = half(b.pair(2 * k));
        return any_nan(v);
    }
};

struct Bf16 {
    static constexpr u32 BLOCK = 1, BYTES = 2;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32, float (&v)[8]) {
#pragma unroll
        for (u32 k = 0; k < 8; k++) v[k] = from_bits(b.pair(2 * k) << 16);
        return any_nan(v);
    }
};

struct F64 {
    static constexpr u32 BLOCK = 1, BYTES = 8;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32, float (&v)[8]) {
#pragma unroll
        for (u32 k = 0; k < 8; k++) v[k] = __double2float_rn(((const double *)b.p)[k]);
        return any_nan(v);
    }
};

// Results of casts that keep a NaN's payload. From f32 to bf16 a NaN keeps its sign and upper
// payload and becomes quiet.
struct OutBf16Kept {
    static constexpr u32 BYTES = 2;
    static __device__ __forceinline__ u32 pack(float lo, float hi, bool) {
        u32 word = OutBf16::pack(lo, hi, false), quiet = 0x00400040u;
        u32 bits = __byte_perm(__float_as_uint(lo), __float_as_uint(hi), 0x7632) | quiet;
        if (lo != lo) word = (word & 0xffff0000u) | (bits & 0x0000ffffu);
        if (hi != hi) word = (word & 0x0000ffffu) | (bits & 0xffff0000u);
        return word;
    }
};

// Plain copies of 16 bits, held in the upper half of the f32 on the way.
struct OutCopy16 {
    static constexpr u32 BYTES = 2;
    static __device__ __forceinline__ u32 pack(float lo, float hi, bool) {
        return __byte_perm(__float_as_uint(lo), __float_as_uint(hi), 0x7632);
    }
};

// Plain copies of 32 bits.
struct OutCopy32 {
    static constexpr u32 BYTES = 4;
    static __device__ __forceinline__ u32 bits(float value, bool) { return __float_as_uint(value); }
};

DECODE_ENTRY(f32, f32, F32, OutCopy32)
DECODE_ENTRY(f32, bf16, F32, OutBf16Kept)
DECODE_ENTRY(f32, f16, F32, OutF16)
DECODE_ENTRY(bf16, f32, Bf16, OutCopy32)
DECODE_ENTRY(bf16, bf16, Bf16, OutCopy16)
DECODE_ENTRY(bf16, f16, Bf16, OutF16)
DECODE_ENTRY(f16, f32, F16, OutF32)
DECODE_ENTRY(f16, bf16, F16, OutBf16)
DECODE_ENTRY(f16, f16, Bf16, OutCopy16)
DECODE_ENTRIES(f64, F64)
