// What the kernel stands on: types, the GPU's own operations, sizes, the arguments of a launch, shared memory.
//
// Tests compile the kernel for the CPU: HOST_SHIM is then defined, and theirs replaces the first half of this file.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

#if OUT_BYTES == 1
typedef u8 Out;
#elif OUT_BYTES == 2
typedef u16 Out;  // bits of a bfloat16 or float16; values are only looked up, never computed
#else
typedef u32 Out;
#endif

#ifndef HOST_SHIM
#define LANES 32
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE int block_index() { return blockIdx.x; }
DEVICE int block_count() { return gridDim.x; }
DEVICE void block_sync() { __syncthreads(); }
DEVICE void warp_sync() { __syncwarp(); }
template <typename T>
DEVICE T load(const T* p) {  // of what this kernel never writes
    return __ldg(p);
}
template <typename T>
DEVICE T* opaque(T* p) {  // the compiler must keep this pointer instead of recomputing it at every use
    asm("" : "+l"(p));
    return p;
}
DEVICE void store(uint4* p, uint4 v) {  // to global memory
#ifdef STREAMING
    __stcs(p, v);
#else
    __stwb(p, v);
#endif
}
DEVICE u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
DEVICE u32 shift_pair(u32 low, u32 high, int bits) { return __funnelshift_r(low, high, bits); }
DEVICE u32 dot_low(u32 pair, u32 bytes, u32 sum) {  // 16-bit x 8-bit products of bytes 0 and 1
    u32 d;
    asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(pair), "r"(bytes), "r"(sum));
    return d;
}
DEVICE u32 dot_high(u32 pair, u32 bytes, u32 sum) {  // of bytes 2 and 3
    u32 d;
    asm("dp2a.hi.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(pair), "r"(bytes), "r"(sum));
    return d;
}
DEVICE float as_float(int bits) { return __int_as_float(bits); }
DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float multiply_down(float a, float b) { return __fmul_rz(a, b); }
DEVICE float reciprocal(float a) { return __fdividef(1.0f, a); }
DEVICE void add_from_warp(u32* to, u32 v) {
    v = __reduce_add_sync(0xffffffffu, v);
    if (threadIdx.x % LANES == 0) atomicAdd(to, v);
}
DEVICE void min_from_warp(int* to, int v) {
    v = __reduce_min_sync(0xffffffffu, v);
    if (threadIdx.x % LANES == 0) atomicMin(to, v);
}
DEVICE void max_from_warp(int* to, int v) {
    v = __reduce_max_sync(0xffffffffu, v);
    if (threadIdx.x % LANES == 0) atomicMax(to, v);
}
#endif

#define WARPS (THREADS / LANES)
#define PIXELS (SIZE * SIZE)
#define PLANE ((PIXELS + 1) / 2 * 2)     // words of a scratch image
#define BATCH 4                          // pixels that a thread carries through a sweep at a time
#define PARTS (4 / OUT_BYTES)            // batches a warp gathers before it writes them out
#define TILE (LANES * BATCH * PARTS)     // pixels a warp writes out together
#define TILES ((PIXELS + TILE - 1) / TILE)
#define STAGING (TILE * 3 * OUT_BYTES)   // bytes
#define RUN 4                            // pixels of a column that a thread filters together
#define RUNS ((SIZE + RUN - 1) / RUN)
#define TAPS 12                          // of a blur, the centre and one side
#define STRETCH (LANES * 8)              // pixels of a row that a warp blurs together
#define STRETCHES ((SIZE + STRETCH - 1) / STRETCH)
#define VALUES 768                       // 3 channels x 256
#define MAX_WARPS 8                      // postponed at once; a longer chain is swept into scratch
#define MAX_STAGES 4
#define HISTOGRAMS (WARPS < 2 ? 1 : WARPS > 16 ? 8 : WARPS / 2)  // copies, against contention
#define SEGMENT 16                       // bins summed at a time by the prefix sum of Equalize
#define CHUNK 16                         // ops of a program in shared memory

#if ALIGNED
static_assert(PIXELS * 3 * OUT_BYTES % 16 == 0 && TILE * 3 * OUT_BYTES % 16 == 0, "16-byte stores need aligned views");
#endif

// The arguments of a launch; loaders/kernels/cuda.py mirrors this struct.
struct Job {
    const u8* crops;           // (B, C, S, S, 3)
    const u8* flips;           // (B, C)
    const u8* codes;           // (B, T, P)
    const int* params;         // (B, T, P, 8)
    const int* schedule;       // (T, 2): view and its crop, in the order of work
    const Out* normalisation;  // (3, 256)
    Out* out;                  // (T, B, S, S, 3)
    u32* scratch;              // (blocks, 3, PLANE): images of a block, 0x00BBGGRR a pixel
    u32* queue;                // zero at launch
    int batch, views, crops_a_sample, length;
};

struct Shared {
    Out normalisation[VALUES];
    Out final_table[VALUES];
    Out final_fills[MAX_WARPS * 3];
    u8 tables[MAX_STAGES + 1][VALUES];  // table i comes before stage i, the last one after all stages
    u8 equalized[VALUES];
    u8 fills[MAX_WARPS * 3];  // colour of the pixels that warp i made black, as it is now
    int codes[CHUNK];
    int params[CHUNK][8];
    int warp[MAX_WARPS][6];
    int stage_code[MAX_STAGES];
    int stage_param[MAX_STAGES];
    u32 blur[TAPS + 1];       // and a zero
    u32 segments[VALUES / SEGMENT];
    int low[3], high[3];
    u32 sum;
    int next;
    union {
        u32 histograms[HISTOGRAMS][VALUES];
        uint4 staging[WARPS][(STAGING + 15) / 16];
        u32 row[WARPS][STRETCH + 2 * (TAPS - 1)];
    };
};
