// The frame of every decoding kernel: packed ggml blocks in, f32, bf16 or f16 out.
//
// A warp takes one tile: consecutive elements of one row, at most some steps of 256. It stages the
// tile's packed bytes in shared memory with 16-byte copies, then each lane decodes 8 consecutive
// elements a step and stores them as one 16-byte word (two for f32). A type gives only its block
// shape and how 8 elements come out of a block; src/quant has the same functions for the CPU. Both
// produce the same bits: every product is exact in f32, so that at most the addition at the end
// rounds, and the compiler neither flushes subnormals nor contracts what is not written so.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Warps of one thread block; src/gpu/decode.rs launches the same number.
constexpr u32 WARPS = 8;
// Elements of one step of a warp: 32 lanes of 8.
constexpr u32 STEP = 256;

// What to decode: rows of `blocks` blocks each, of which `count` elements after the first `skip`
// are wanted. The same fields in the same order as src/gpu/decode.rs passes to a kernel.
struct Geometry {
    const u8 *src;   // the first block of the first row
    u8 *dst;         // where the first wanted element of the first row goes
    u64 row_bytes;   // from one row of blocks to the next, in bytes
    u64 blocks;      // blocks of a row that hold wanted elements
    u64 skip;        // elements of the first block before the first wanted one
    u64 count;       // wanted elements of a row
    u64 dst_stride;  // from one row of the result to the next, in elements
    u32 tiles;       // tiles of a row
    u32 total;       // tiles of all rows
    u32 vector;      // 1: groups of 8 elements lie at multiples of 16 bytes in the result
};

// ---- numbers ---------------------------------------------------------------------------------

__device__ __forceinline__ float from_bits(u32 bits) { return __uint_as_float(bits); }

// An f16 as f32: exact, subnormals included.
__device__ __forceinline__ float half(u32 bits) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"((u16)bits));
    return out;
}

// Whether a scale is infinite or NaN: only then can a decoded element be NaN.
__device__ __forceinline__ bool unreal(float scale) { return !(fabsf(scale) <= 3.402823466e38f); }

// Whether one of two is; scales are far too small for their sum to overflow.
__device__ __forceinline__ bool unreal(float scale, float minimum) {
    return unreal(fabsf(scale) + fabsf(minimum));
}

// Byte `k` of `word` as f32, less `bias`. The byte becomes the low mantissa of 2^23, and the
// subtraction is exact: one permute and one addition, where a conversion runs at a quarter rate.
__device__ __forceinline__ float byte_less(u32 word, u32 k, u32 bias) {
    return __fadd_rn(from_bits(__byte_perm(word, 0x4b000000u, 0x7440u | k)),
                     -(8388608.0f + (float)bias));
}

// Bit k of the low 4 bits of `bits` into bit 0 of byte k.
__device__ __forceinline__ u32 spread1(u32 bits) {
    return ((bits & 0xfu) * 0x00204081u) & 0x01010101u;
}

// Two-bit code k of the low byte of `codes` into byte k.
__device__ __forceinline__ u32 spread2(u32 codes) {
    u32 pairs = (codes | codes << 12) & 0x000f000fu;
    return (pairs | pairs << 6) & 0x03030303u;
}

// 0xff in the bytes whose top bit is set, 0 in the others. (`__byte_perm` ignores the bit of the
// selector that asks for this.)
__device__ __forceinline__ u32 top_bits(u32 word) {
    u32 out;
    asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(out) : "r"(word));
    return out;
}

// Looks up the low nibble of each byte of `nibbles` (high nibbles zero) in a table of 16 bytes.
__device__ __forceinline__ u32 lookup16(u32 nibbles, uint4 table) {
    u32 select = __byte_perm(nibbles | nibbles >> 4, 0, 0x4420) & 0x7777u;
    u32 low = __byte_perm(table.x, table.y, select);
    u32 high = __byte_perm(table.z, table.w, select);
    u32 upper = top_bits(nibbles << 4);
    return (high & upper) | (low & ~upper);
}

// The two 4-byte words of 8 codes.
struct Codes {
    u32 lo, hi;
    __device__ __forceinline__ float less(u32 k, u32 bias) const {
        return byte_less(k < 4 ? lo : hi, k & 3, bias);
    }
};

// ---- packed bytes ----------------------------------------------------------------------------

// A block in shared memory whose address is a multiple of ALIGN (a power of two). `A` of a read
// is the alignment of its offset. Wide reads at lesser alignment take the aligned words around
// them, so up to 3 bytes past the read are touched; the staging buffer has room for them.
template <u32 ALIGN> struct Block {
    const u8 *p;

    __device__ __forceinline__ u32 byte(u32 offset) const { return p[offset]; }

    __device__ __forceinline__ u32 pair(u32 offset) const {
        if constexpr (ALIGN >= 2) {
            return *(const u16 *)(p + offset);
        } else {
            return p[offset] | (u32)p[offset + 1] << 8;
        }
    }

    template <u32 A> __device__ __forceinline__ u32 word(u32 offset) const {
        if constexpr (ALIGN >= 4 && A >= 4) {
            return *(const u32 *)(p + offset);
        } else {
            const u8 *at = p + offset;
            u32 shift = (u32)(u64)at & 3;
            const u32 *words = (const u32 *)(at - shift);
            return __funnelshift_r(words[0], words[1], shift * 8);
        }
    }

    template <u32 A> __device__ __forceinline__ Codes codes(u32 offset) const {
        if constexpr (ALIGN >= 8 && A >= 8) {
            uint2 words = *(const uint2 *)(p + offset);
            return {words.x, words.y};
        } else if constexpr (ALIGN >= 4 && A >= 4) {
            const u32 *words = (const u32 *)(p + offset);
            return {words[0], words[1]};
        } else {
            const u8 *at = p + offset;
            u32 shift = (u32)(u64)at & 3;
            const u32 *words = (const u32 *)(at - shift);
            u32 middle = words[1];
            return {__funnelshift_r(words[0], middle, shift * 8),
                    __funnelshift_r(middle, words[2], shift * 8)};
        }
    }
};

// The largest power of two, at most 16, that divides the bytes of a block: where blocks follow
// each other from a 16-byte boundary, each starts at a multiple of it.
constexpr u32 block_align(u32 bytes) {
    u32 align = 16;
    while (bytes % align != 0) align /= 2;
    return align;
}

// ---- results ---------------------------------------------------------------------------------

// Canonical NaNs: 0x7fc00000, 0x7fc0 and 0x7e00. `unreal` says that NaNs are possible.
template <u32 NAN16>
__device__ __forceinline__ u32 mend(u32 word, float lo, float hi, bool unreal) {
    if (unreal) {
        if (lo != lo) word = (word & 0xffff0000u) | NAN16;
        if (hi != hi) word = (word & 0x0000ffffu) | NAN16 << 16;
    }
    return word;
}

struct OutBf16 {
    static constexpr u32 BYTES = 2;
    static __device__ __forceinline__ u32 pack(float lo, float hi, bool unreal) {
        u32 word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(hi), "f"(lo));
        return mend<0x7fc0>(word, lo, hi, unreal);
    }
};

struct OutF16 {
    static constexpr u32 BYTES = 2;
    static __device__ __forceinline__ u32 pack(float lo, float hi, bool unreal) {
        u32 word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(hi), "f"(lo));
        return mend<0x7e00>(word, lo, hi, unreal);
    }
};

struct OutF32 {
    static constexpr u32 BYTES = 4;
    static __device__ __forceinline__ u32 bits(float value, bool unreal) {
        return unreal && value != value ? 0x7fc00000u : __float_as_uint(value);
    }
};

// The words of 8 values.
template <class Out>
__device__ __forceinline__ void pack(const float (&v)[8], bool unreal, u32 (&words)[2 * Out::BYTES]) {
    if constexpr (Out::BYTES == 4) {
#pragma unroll
        for (u32 k = 0; k < 8; k++) words[k] = Out::bits(v[k], unreal);
    } else {
#pragma unroll
        for (u32 k = 0; k < 4; k++) words[k] = Out::pack(v[2 * k], v[2 * k + 1], unreal);
    }
}

// Stores a step of a warp: 8 values of each lane from 16-byte boundary `to` (the lane's own) on.
template <class Out>
__device__ __forceinline__ void store_step(u8 *to, const float (&v)[8], u32 lane) {
    u32 w[2 * Out::BYTES];
    pack<Out>(v, false, w);
    if constexpr (Out::BYTES == 2) {
        *(uint4 *)to = make_uint4(w[0], w[1], w[2], w[3]);
    } else {
        // Lanes 16 apart trade halves, so that each store of the warp fills 512 consecutive bytes:
        // one that leaves gaps costs the L2 cache as much as one that does not. The lower lanes then
        // hold the even 16-byte words of both half steps, the upper lanes the odd ones.
        bool upper = lane >= 16;
        u32 first[4], second[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            u32 traded = __shfl_xor_sync(0xffffffffu, upper ? w[k] : w[k + 4], 16);
            first[k] = upper ? traded : w[k];
            second[k] = upper ? w[k + 4] : traded;
        }
        u8 *place = to - (upper ? 512 - 16 : 0);
        *(uint4 *)place = make_uint4(first[0], first[1], first[2], first[3]);
        *(uint4 *)(place + 512) = make_uint4(second[0], second[1], second[2], second[3]);
    }
}

// Stores 8 values as element `at` and on of a row of `count` elements; `at` may lie before the
// row or reach past it when the wanted range starts or ends inside the 8.
template <class Out>
__device__ __forceinline__ void store_some(u8 *row, i64 at, i64 count, bool vector,
                                           const float (&v)[8], bool unreal) {
    u32 words[2 * Out::BYTES];
    pack<Out>(v, unreal, words);
    u8 *to = row + at * Out::BYTES;
    if (vector && at >= 0 && at + 8 <= count) {
#pragma unroll
        for (u32 k = 0; k < 2 * Out::BYTES; k += 4) {
            *(uint4 *)(to + 4 * k) =
                make_uint4(words[k], words[k + 1], words[k + 2], words[k + 3]);
        }
    } else {
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            if (at + k < 0 || at + k >= count) continue;
            if constexpr (Out::BYTES == 4) {
                *(u32 *)(to + 4 * k) = words[k];
            } else {
                *(u16 *)(to + 2 * k) = (u16)(words[k / 2] >> 16 * (k & 1));
            }
        }
    }
}

// ---- the kernel ------------------------------------------------------------------------------

// Copies `bytes` bytes, at most MOST, to shared memory and returns where they start there: at the
// same offset from a 16-byte boundary as in global memory, so that both sides move whole 16-byte
// words. The first word may begin before `src`, never before the 16 bytes that hold it; nothing past
// the end is read.
template <u32 MOST>
__device__ __forceinline__ const u8 *stage(u8 *buffer, const u8 *src, u32 bytes, u32 lane) {
    u32 shift = (u32)(u64)src & 15;
    u32 total = shift + bytes, whole = total & ~15u;
    u32 to = (u32)__cvta_generic_to_shared(buffer) + lane * 16;
    const u8 *from = src - shift + lane * 16;
#pragma unroll
    for (u32 k = 0; k < MOST + 15; k += 512) {
        if (lane * 16 + k < whole) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                         :
                         : "r"(to + k), "l"(from + k)
                         : "memory");
        }
    }
    if (whole + lane < total) buffer[whole + lane] = (src - shift)[whole + lane];
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    return buffer + shift;
}

// Decodes with type `Type`, which has BLOCK (elements) and BYTES of a block and
// `bool eight(Block, i, v)`: elements i..i+8 of a block, i a multiple of 8 (0 when BLOCK is 1: then
// the 8 follow each other in memory). It returns whether an element may be NaN.
template <class Type, class Out> __device__ __forceinline__ void decode(const Geometry &g) {
    constexpr u32 STEP_BYTES = STEP * Type::BYTES / Type::BLOCK;
    // About 2 KiB a warp: enough to spread the cost of a tile's start, and room for every warp that
    // a multiprocessor holds. `steps` in src/gpu/decode.rs computes the same.
    constexpr u32 STEPS = STEP_BYTES <= 288 ? 8 : STEP_BYTES <= 1024 ? 4 : 2;
    constexpr u32 TILE_BLOCKS = STEPS * STEP / Type::BLOCK;
    constexpr u32 TILE_BYTES = TILE_BLOCKS * Type::BYTES;
    // Room for the shift of `stage` and for the words that unaligned reads touch past the end.
    constexpr u32 BUFFER = (TILE_BYTES + 15 + 32) / 16 * 16;
    __shared__ __align__(16) u8 buffers[WARPS][BUFFER];

    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 tile = blockIdx.x * WARPS + warp, row = 0;
    if (tile >= g.total) return;
    if (g.total != g.tiles) {
        row = tile / g.tiles;
        tile -= row * g.tiles;
    }
    u64 first = (u64)tile * TILE_BLOCKS, left = g.blocks - first;
    u32 blocks = left < TILE_BLOCKS ? (u32)left : TILE_BLOCKS;
    u32 elements = blocks * Type::BLOCK;

    const u8 *packed = stage<TILE_BYTES>(
        buffers[warp], g.src + row * g.row_bytes + first * Type::BYTES, blocks * Type::BYTES, lane);

    u8 *to = g.dst + row * g.dst_stride * Out::BYTES;
    i64 at = (i64)(first * Type::BLOCK) - (i64)g.skip;
    // Elements from the tile's start that go out in whole aligned steps.
    u32 plain = 0;
    if (g.vector && at >= 0) {
        u64 wanted = g.count - (u64)at;
        plain = (wanted < elements ? (u32)wanted : elements) / STEP * STEP;
    }
    u8 *lane_to = to + (at + lane * 8) * Out::BYTES;
    // Computed here, once, not in the loop.
    asm volatile("" : "+r"(plain), "+l"(lane_to));
#pragma unroll 1
    for (u32 step = 0; step < elements; step += STEP) {
        u32 i = step + lane * 8;
        // Lanes past the end decode what lies in the rest of the buffer and drop it.
        float v[8];
        Block<block_align(Type::BYTES)> block = {packed + i / Type::BLOCK * Type::BYTES};
        bool unreal = Type::eight(block, i % Type::BLOCK, v);
        if (step < plain && !__any_sync(0xffffffffu, unreal)) {
            store_step<Out>(lane_to, v, lane);
        } else if (i < elements) {
            store_some<Out>(to, at + i, (i64)g.count, g.vector != 0, v, unreal);
        }
        lane_to += STEP * Out::BYTES;
    }
}

// The three entry points of a type: decode_NAME_f32, decode_NAME_bf16, decode_NAME_f16.
#define DECODE_ENTRY(name, dtype, Type, Out)                                                      \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) decode_##name##_##dtype(             \
        const u8 *src, u8 *dst, u64 row_bytes, u64 blocks, u64 skip, u64 count, u64 dst_stride,   \
        u32 tiles, u32 total, u32 vector) {                                                       \
        decode<Type, Out>(                                                                        \
            {src, dst, row_bytes, blocks, skip, count, dst_stride, tiles, total, vector});        \
    }
#define DECODE_ENTRIES(name, Type)                                                                \
    DECODE_ENTRY(name, f32, Type, OutF32)                                                         \
    DECODE_ENTRY(name, bf16, Type, OutBf16)                                                       \
    DECODE_ENTRY(name, f16, Type, OutF16)
