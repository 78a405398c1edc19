// Compiles loaders/kernels/views.cu for the CPU: what CUDA provides, from the C++ library. A block runs as THREADS
// threads (real ones, with barriers, if there are several) in warps of LANES; the blocks of a grid run one by one.

#include <barrier>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define HOST_SHIM
#define DEVICE static inline
#define DEVICE_MEMBER inline
#define __global__
#define __shared__ static
#define __launch_bounds__(threads, blocks)

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

static thread_local int current_thread;
static int current_block, grid;
static std::unique_ptr<std::barrier<>> block_barrier;
static std::vector<std::unique_ptr<std::barrier<>>> warp_barriers;

DEVICE unsigned thread_index() { return current_thread; }
DEVICE int block_index() { return current_block; }
DEVICE int block_count() { return grid; }
DEVICE void block_sync() { if (THREADS > 1) block_barrier->arrive_and_wait(); }
DEVICE void warp_sync() { if (LANES > 1) warp_barriers[current_thread / LANES]->arrive_and_wait(); }

template <typename T> DEVICE T load(const T* p) { return *p; }
DEVICE void store(uint4* p, uint4 v) { *p = v; }
template <typename T> DEVICE T* opaque(T* p) { return p; }

DEVICE unsigned permute(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
DEVICE unsigned shift_pair(unsigned low, unsigned high, int bits) { return ((uint64_t)high << 32 | low) >> bits; }
DEVICE unsigned dot_low(unsigned pair, unsigned bytes, unsigned sum) {
    return sum + (pair & 0xffff) * (bytes & 255) + (pair >> 16) * (bytes >> 8 & 255);
}
DEVICE unsigned dot_high(unsigned pair, unsigned bytes, unsigned sum) { return dot_low(pair, bytes >> 16, sum); }

DEVICE float as_float(int bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
DEVICE float fused(float a, float b, float c) { return std::fma(a, b, c); }
DEVICE float multiply_down(float a, float b) {  // towards zero
    const double product = (double)a * b;       // exact
    const float rounded = (float)product;
    return std::fabs((double)rounded) > std::fabs(product) ? std::nextafter(rounded, 0.0f) : rounded;
}
DEVICE float reciprocal(float a) {  // a GPU's may be off by RECIPROCAL_ULPS
    float r = 1.0f / a;
    for (int i = 0; i < std::abs(RECIPROCAL_ULPS); i++) r = std::nextafter(r, RECIPROCAL_ULPS < 0 ? 0.0f : 2.0f);
    return r;
}

DEVICE unsigned atomicAdd(unsigned* p, unsigned v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
DEVICE void atomicMin(int* p, int v) {
    int old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (v < old && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}
DEVICE void atomicMax(int* p, int v) {
    int old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (v > old && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}
DEVICE void add_from_warp(unsigned* to, unsigned v) { atomicAdd(to, v); }
DEVICE void min_from_warp(int* to, int v) { atomicMin(to, v); }
DEVICE void max_from_warp(int* to, int v) { atomicMax(to, v); }
DEVICE int min(int a, int b) { return a < b ? a : b; }
DEVICE int max(int a, int b) { return a > b ? a : b; }

#include VIEWS_CU

extern "C" size_t job_bytes() { return sizeof(Job); }
extern "C" size_t scratch_words() { return 3 * PLANE; }

extern "C" void run(const Job* job, int blocks) {
    grid = blocks;
    block_barrier = std::make_unique<std::barrier<>>(THREADS);
    warp_barriers.clear();
    for (int w = 0; w < WARPS; w++) warp_barriers.push_back(std::make_unique<std::barrier<>>(LANES));
    for (current_block = 0; current_block < blocks; current_block++) {
        std::vector<std::thread> others;
        for (int t = 1; t < THREADS; t++)
            others.emplace_back([=] {
                current_thread = t;
                make_views(*job);
            });
        current_thread = 0;
        make_views(*job);
        for (auto& thread : others) thread.join();
    }
}
