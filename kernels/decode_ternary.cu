// tq1_0 and tq2_0: blocks of 256 values of -1, 0 and 1 with one f16 scale.
#include "decode.cuh"

// 48 bytes of five base-3 digits, 4 bytes of four, d f16. A byte is its digits over 3^5, rounded
// up: digit n is the leading digit of the byte times 3^n modulo 256. Element order: digits
// 0 to 4 of 32 bytes, digits 0 to 4 of 16 bytes, digits 0 to 3 of 4 bytes.
struct Tq1_0 {
    static constexpr u32 BLOCK = 256, BYTES = 54;
    static __device__ __forceinline__ u32 power(u32 n) {
        return n == 0 ? 1 : n == 1 ? 3 : n == 2 ? 9 : n == 3 ? 27 : 81;
    }
    // The leading digit of each byte times `power`; bytes 0 and 2, then 1 and 3, at once.
    static __device__ __forceinline__ u32 digits(u32 bytes, u32 power) {
        u32 even = (bytes & 0x00ff00ffu) * power & 0x00ff00ffu;
        u32 odd = (bytes >> 8 & 0x00ff00ffu) * power & 0x00ff00ffu;
        return (even * 3 >> 8 & 0x00030003u) | (odd * 3 & 0x03000300u);
    }
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        Codes q;
        u32 low, high;  // the powers for the first and the last four
        if (i < 160) {
            q = b.template codes<8>(i % 32);
            low = high = power(i / 32);
        } else if (i < 240) {
            q = b.template codes<8>(32 + i % 16);
            low = high = power((i - 160) / 16);
        } else {
            q.lo = q.hi = b.template word<4>(48);
            low = power((i - 240) / 4);
            high = low * 3;
        }
        q = {digits(q.lo, low), digits(q.hi, high)};
        float d = half(b.pair(52));
#pragma unroll
        for (u32 k = 0; k < 8; k++) v[k] = d * q.less(k, 1);
        return unreal(d);
    }
};

// 64 bytes of 2-bit codes, d f16; the codes lie as in q2_K
struct Tq2_0 {
    static constexpr u32 BLOCK = 256, BYTES = 66;
    template <class B> static __device__ __forceinline__ bool eight(B b, u32 i, float (&v)[8]) {
        Codes q = b.template codes<8>(i / 128 * 32 + i % 32);
        u32 shift = i / 32 % 4 * 2;
        q = {q.lo >> shift & 0x03030303u, q.hi >> shift & 0x03030303u};
        float d = half(b.pair(64));
#pragma unroll
        for (u32 k = 0; k < 8; k++) v[k] = d * q.less(k, 1);
        return unreal(d);
    }
};

DECODE_ENTRIES(tq1_0, Tq1_0)
DECODE_ENTRIES(tq2_0, Tq2_0)
