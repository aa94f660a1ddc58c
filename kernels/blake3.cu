// BLAKE3 of a file that lies in device memory: the chaining value of each 16 MiB leaf.
//
// After the BLAKE3 paper (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2021), sections 2.1 to 2.4.
// A leaf is 16384 chunks of 1024 bytes, the last leaf of a file perhaps fewer. `blake3_groups`
// hashes 128 chunks per block, a chunk per thread, and folds them to one value; `blake3_leaves`
// folds a leaf's (at most 128) groups. In a file of one leaf the topmost node is the root, and the
// value is the file's hash.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 CHUNK = 1024;
constexpr u32 GROUP = 128;          // chunks per block of threads
constexpr u32 GROUPS_PER_LEAF = 128;
constexpr u32 WARPS = GROUP / 32;
constexpr u32 STAGE = 128;          // bytes of each chunk staged at a time: two blocks
constexpr u32 ROW = STAGE / 4 + 4;  // words per staged row; 4 more keep 16-byte reads off each other's banks

constexpr u32 CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8;

__constant__ u32 IV[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

__device__ __forceinline__ u32 rotr(u32 x, u32 n) { return __funnelshift_r(x, x, n); }

__device__ __forceinline__ void mix(u32 &a, u32 &b, u32 &c, u32 &d, u32 x, u32 y) {
    a = a + b + x;
    d = rotr(d ^ a, 16);
    c = c + d;
    b = rotr(b ^ c, 12);
    a = a + b + y;
    d = rotr(d ^ a, 8);
    c = c + d;
    b = rotr(b ^ c, 7);
}

// The compression function, cut to the eight words of the chaining value; `cv` is in and out.
__device__ __forceinline__ void compress(u32 cv[8], const u32 block[16], u64 counter, u32 len, u32 flags) {
    // Message word order of each round: the permutation of the paper's table 2, applied 0 to 6 times.
    constexpr u8 ORDER[7][16] = {
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
        {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
        {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1},
        {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
        {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4},
        {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
        {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13},
    };
    u32 v[16] = {cv[0], cv[1], cv[2], cv[3], cv[4], cv[5], cv[6], cv[7],
                 IV[0], IV[1], IV[2], IV[3], (u32)counter, (u32)(counter >> 32), len, flags};
#pragma unroll
    for (int r = 0; r < 7; r++) {
        mix(v[0], v[4], v[8], v[12], block[ORDER[r][0]], block[ORDER[r][1]]);
        mix(v[1], v[5], v[9], v[13], block[ORDER[r][2]], block[ORDER[r][3]]);
        mix(v[2], v[6], v[10], v[14], block[ORDER[r][4]], block[ORDER[r][5]]);
        mix(v[3], v[7], v[11], v[15], block[ORDER[r][6]], block[ORDER[r][7]]);
        mix(v[0], v[5], v[10], v[15], block[ORDER[r][8]], block[ORDER[r][9]]);
        mix(v[1], v[6], v[11], v[12], block[ORDER[r][10]], block[ORDER[r][11]]);
        mix(v[2], v[7], v[8], v[13], block[ORDER[r][12]], block[ORDER[r][13]]);
        mix(v[3], v[4], v[9], v[14], block[ORDER[r][14]], block[ORDER[r][15]]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        cv[i] = v[i] ^ v[i + 8];
}

// Folds `n` chaining values in shared memory to nodes[0], level by level; an odd last one moves up
// unchanged, which builds the tree of the paper's section 2.1. All threads of the block call it.
__device__ void fold(u32 (*nodes)[8], u32 n, bool root) {
    while (n > 1) {
        u32 pairs = n / 2;
        bool odd = n & 1;
        u32 cv[8];
        u32 t = threadIdx.x;
        if (t < pairs) {
            u32 block[16];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                block[i] = nodes[2 * t][i];
                block[8 + i] = nodes[2 * t + 1][i];
                cv[i] = IV[i];
            }
            compress(cv, block, 0, 64, PARENT | (root && n == 2 ? ROOT : 0));
        } else if (odd && t == pairs) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                cv[i] = nodes[n - 1][i];
        }
        __syncthreads();
        if (t < pairs + odd) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                nodes[t][i] = cv[i];
        }
        __syncthreads();
        n = pairs + odd;
    }
}

// 16 bytes at `at`; zeros stand for what lies past the file's end.
__device__ __forceinline__ uint4 load16(const u8 *file, u64 bytes, u64 at) {
    if (at + 16 <= bytes)
        return *reinterpret_cast<const uint4 *>(file + at);
    u32 w[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 16; i++)
        if (at + i < bytes)
            w[i / 4] |= (u32)file[at + i] << (8 * (i % 4));
    return make_uint4(w[0], w[1], w[2], w[3]);
}

// One block per group of 128 chunks; 128 blocks per leaf, the file's first leaf here `first_leaf`.
// `file` is 16-byte aligned. Writes 8 words per group to `groups`; a group past the end, nothing.
extern "C" __global__ void __launch_bounds__(GROUP)
blake3_groups(const u8 *__restrict__ file, u64 bytes, u64 first_leaf, u32 *__restrict__ groups) {
    __shared__ __align__(16) u32 stage[WARPS][32][ROW];
    __shared__ u32 nodes[GROUP][8];
    const u64 chunks = (bytes + CHUNK - 1) / CHUNK;
    const u64 group = first_leaf * GROUPS_PER_LEAF + blockIdx.x;
    if (group * GROUP >= chunks)
        return;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u64 chunk = group * GROUP + threadIdx.x;
    const u64 start = chunk * CHUNK;
    const u32 len = start >= bytes ? 0 : (u32)(bytes - start < CHUNK ? bytes - start : CHUNK);
    const u32 blocks = len == 0 ? 0 : (len + 63) / 64;
    const bool root_here = chunks == 1;

    u32 cv[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        cv[i] = IV[i];

    // A warp loads 128 bytes of each of its 32 chunks: 8 lanes to a chunk, 4 chunks at once.
    const u64 warp_start = (group * GROUP + warp * 32) * CHUNK;
    const u64 mine = warp_start + (u64)(lane / 8) * CHUNK + (lane % 8) * 16;
    uint4 next[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        next[i] = load16(file, bytes, mine + (u64)i * 4 * CHUNK);
    for (u32 s = 0; s < CHUNK / STAGE; s++) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8; i++)
            *reinterpret_cast<uint4 *>(&stage[warp][i * 4 + lane / 8][(lane % 8) * 4]) = next[i];
        __syncwarp();
        if (s + 1 < CHUNK / STAGE) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                next[i] = load16(file, bytes, mine + (u64)i * 4 * CHUNK + (s + 1) * STAGE);
        }
#pragma unroll 1
        for (u32 half = 0; half < 2; half++) {
            const u32 b = s * 2 + half;
            if (b >= blocks)
                break;
            u32 block[16];
#pragma unroll
            for (int q = 0; q < 4; q++) {
                uint4 x = *reinterpret_cast<const uint4 *>(&stage[warp][lane][half * 16 + q * 4]);
                block[q * 4] = x.x;
                block[q * 4 + 1] = x.y;
                block[q * 4 + 2] = x.z;
                block[q * 4 + 3] = x.w;
            }
            const bool last = b + 1 == blocks;
            compress(cv, block, chunk, last ? len - b * 64 : 64,
                     (b == 0 ? CHUNK_START : 0) | (last ? CHUNK_END | (root_here ? ROOT : 0) : 0));
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        nodes[threadIdx.x][i] = cv[i];
    __syncthreads();
    const u64 left = chunks - group * GROUP;
    fold(nodes, left < GROUP ? (u32)left : GROUP, chunks <= GROUP);
    if (threadIdx.x < 8)
        groups[(u64)blockIdx.x * 8 + threadIdx.x] = nodes[0][threadIdx.x];
}

// One block of 64 threads per leaf; `groups` as blake3_groups wrote it. 8 words per leaf to `leaves`.
extern "C" __global__ void __launch_bounds__(GROUPS_PER_LEAF / 2)
blake3_leaves(const u32 *__restrict__ groups, u64 bytes, u64 first_leaf, u32 *__restrict__ leaves) {
    __shared__ u32 nodes[GROUPS_PER_LEAF][8];
    const u64 all = (bytes + (u64)CHUNK * GROUP - 1) / ((u64)CHUNK * GROUP);
    const u64 before = (first_leaf + blockIdx.x) * GROUPS_PER_LEAF;
    if (before >= all)
        return;
    const u32 n = all - before < GROUPS_PER_LEAF ? (u32)(all - before) : GROUPS_PER_LEAF;
    for (u32 i = threadIdx.x; i < n * 8; i += blockDim.x)
        nodes[i / 8][i % 8] = groups[(u64)blockIdx.x * GROUPS_PER_LEAF * 8 + i];
    __syncthreads();
    // 64 threads: 128 nodes are 64 pairs, and an odd count is at most 63 pairs and one.
    fold(nodes, n, all <= GROUPS_PER_LEAF);
    if (threadIdx.x < 8)
        leaves[(u64)blockIdx.x * 8 + threadIdx.x] = nodes[0][threadIdx.x];
}
