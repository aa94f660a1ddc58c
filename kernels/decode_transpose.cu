// Transposes a batch of decoded matrices: the last step of kv_b reassembly, where llama.cpp stores
// k_b of each head transposed.
#include "decode.cuh"

// `src` is [batch][rows][cols], contiguous. Matrix h of the result, cols x rows, starts at element
// h * dst_batch of `dst`, its rows dst_stride elements apart. One block of 32 x 8 threads (256 in
// one dimension) moves one tile of 32 x 32.
template <class T>
__device__ __forceinline__ void transpose(const T *src, T *dst, u32 rows, u32 cols, u64 dst_batch,
                                          u64 dst_stride) {
    __shared__ T tile[32][33];
    u32 x = threadIdx.x % 32, y = threadIdx.x / 32;
    u32 across = (cols + 31) / 32, down = (rows + 31) / 32;
    u32 matrix = blockIdx.x / (across * down), place = blockIdx.x % (across * down);
    u32 col = place % across * 32, row = place / across * 32;
    const T *from = src + (u64)matrix * rows * cols;
    T *to = dst + matrix * dst_batch;
#pragma unroll
    for (u32 k = 0; k < 32; k += 8) {
        if (row + y + k < rows && col + x < cols) {
            tile[y + k][x] = from[(u64)(row + y + k) * cols + col + x];
        }
    }
    __syncthreads();
#pragma unroll
    for (u32 k = 0; k < 32; k += 8) {
        if (col + y + k < cols && row + x < rows) {
            to[(u64)(col + y + k) * dst_stride + row + x] = tile[x][y + k];
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    transpose_16(const u16 *src, u16 *dst, u32 rows, u32 cols, u64 dst_batch, u64 dst_stride) {
    transpose(src, dst, rows, cols, dst_batch, dst_stride);
}

extern "C" __global__ void __launch_bounds__(256)
    transpose_32(const u32 *src, u32 *dst, u32 rows, u32 cols, u64 dst_batch, u64 dst_stride) {
    transpose(src, dst, rows, cols, dst_batch, dst_stride);
}
