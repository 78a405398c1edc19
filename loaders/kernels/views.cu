// View programs on the GPU: uint8 crops + flips + programs -> normalised views, in one launch.
//
// A block makes one view at a time and takes the next from a queue. It walks the program and *postpones* what it can:
// a warp is a map of indices, an op on single channels folds into a table of 256 entries a channel, an op across
// channels is a stage between two tables. A sweep over the pixels happens only where an image is needed: for a
// statistic (Contrast, AutoContrast, Equalize), before a neighbourhood (Sharpness, GaussianBlur), and at the end.
// A sweep follows the warps backwards from the output pixel to the source pixel, loads it, and runs tables and stages
// forwards. A pixel that leaves the image at a warp is black there and sees the later ops only: since that colour is
// the same for the whole view, it is kept beside the tables (``fills``) and goes through the ops with them.
//
// Every operation gives Pillow's bits (compile with -fmad=false). The host compiles one module a configuration:
// SIZE pixels a side, OUT_BYTES a value, ALIGNED (16-byte stores), THREADS a block, BLOCKS an SM, OP_* and END codes.
// Tests compile this same file for the CPU: HOST_SHIM then stands in for the platform section below.

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
DEVICE void store(uint4* p, uint4 v) {
#ifdef STREAMING
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#else
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
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

enum Sink { NOTHING, SCRATCH, LUMA, RANGE, HISTOGRAM, OUTPUT };

// What is postponed; the same in every thread.
struct View {
    const u8* crop;
    bool flip;
    u32* image;  // the source, or null: the crop
    int warps, stages;
    u32 tabled;  // bit i: table i is not the identity
};

// Without warps a thread takes four neighbours in memory, with warps every LANES-th pixel: the gathers of a warp then
// fall into few lines.
struct Pixels {
    int r[BATCH], g[BATCH], b[BATCH];
    int fill[BATCH];  // the warp that made the pixel black, or -1
    bool neighbours;
    int first;  // place in the image
    DEVICE_MEMBER int place(int j) const { return first + j * (neighbours ? 1 : LANES); }
};

// ---------------------------------------------------------------------------------------------------- single pixels

DEVICE int clip(int v) { return v < 0 ? 0 : v > 255 ? 255 : v; }

// ImageBlend: truncated, clipped; its branch for factors in [0, 1] and its shortcuts give the same values.
DEVICE int blend(int base, int value, float factor) {
    return clip((int)((float)base + factor * (float)(value - base)));
}

DEVICE int luma(int r, int g, int b) { return (19595 * r + 38470 * g + 7471 * b + 0x8000) >> 16; }

// One channel of HSV to RGB: the circle of hues has 1,530 steps, and each channel is a trapezium on it. Pillow's
// double-precision formulas round to the same value for all 2**24 (hue, saturation, value).
DEVICE int hsv_channel(int hue, int saturation, float value, int offset) {
    int position = 6 * hue + offset;
    position = position >= 1530 ? position - 1530 : position;
    int fall = min(min(position, 1020 - position), 255);
    fall = max(fall, 0);
    return (int)fused(value, fused((float)(saturation * fall), -1.0f / 65025.0f, 1.0f), 0.5f);
}

// RGB to Pillow's 8-bit HSV, the hue turned, and back. The hue must reproduce Pillow's single-precision roundings
// (they decide exact multiples of 1/255); a quotient a/b is a*r corrected by one residual, r being 1/b within 2 ulp,
// which is the correctly rounded quotient for all operands that occur. Equal to Pillow for all 2**24 colours.
DEVICE void shift_hue(int shift, int& r, int& g, int& b) {
    const int high = max(r, max(g, b)), low = min(r, min(g, b));
    const int chroma = high - low;
    int sector, ahead, behind;
    if (r == high) {
        sector = 0, ahead = b, behind = g;
    } else if (g == high) {
        sector = 2, ahead = r, behind = b;
    } else {
        sector = 4, ahead = g, behind = r;
    }
    // of ahead and behind one is the lowest channel, at distance 1; the other one is at distance q
    const float divisor = (float)max(chroma, 1), inverse = reciprocal(divisor);
    const float dividend = (float)(high - max(ahead, behind));
    float q = dividend * inverse;
    q = fused(fused(-divisor, q, dividend), inverse, q);
    const float angle = behind == low ? (float)(sector - 1) + q : (float)(sector + 1) - q;
    float turn = angle * (1.0f / 6.0f);
    turn = fused(fused(-6.0f, turn, angle), 1.0f / 6.0f, turn);
    turn = turn < 0.0f ? 1.0f + turn : turn;
    const int hue = (chroma == 0 ? shift : (int)multiply_down(turn, 255.0f) + shift) & 255;
    const int saturation = (int)((255.0f * (float)chroma + 0.5f) * reciprocal((float)max(high, 1)));
    r = hsv_channel(hue, saturation, (float)high, 5 * 255);
    g = hsv_channel(hue, saturation, (float)high, 3 * 255);
    b = hsv_channel(hue, saturation, (float)high, 1 * 255);
}

// Color, Hue, Grayscale: the ops that mix channels.
DEVICE void mix_channels(int code, int param, int& r, int& g, int& b) {
    if (code == OP_HUE) {
        shift_hue(param, r, g, b);
        return;
    }
    const int grey = luma(r, g, b);
    if (code == OP_GRAYSCALE) {
        r = g = b = grey;
    } else {
        const float factor = as_float(param);
        r = blend(grey, r, factor);
        g = blend(grey, g, factor);
        b = blend(grey, b, factor);
    }
}

// ---------------------------------------------------------------------------------------------------- neighbourhoods

// Scratch images are planes 0 and 2 of a block; what lies between the two passes of a blur fills the other two planes.
DEVICE u32* plane_of(const Job& job, int plane) { return job.scratch + ((size_t)block_index() * 3 + plane) * PLANE; }

DEVICE u32* other_image(const Job& job, const u32* image) {
    return plane_of(job, image == plane_of(job, 0) ? 2 : 0);
}

DEVICE uint2* between_passes(const Job& job, const u32* image) {
    return (uint2*)plane_of(job, image == plane_of(job, 0) ? 1 : 0);
}

DEVICE int reflect(int i) {  // without repeating the edge, again and again in images smaller than the blur
    if (SIZE == 1) return 0;
    do {
        i = i < 0 ? -i : i;
        i = min(i, 2 * (SIZE - 1) - i);
    } while (SIZE < TAPS + RUN && i < 0);
    return i;
}

// Sharpness: a blend of the image with a smoothed copy of it; the border stays. A thread filters RUN pixels of a column.
DEVICE void sharpen(const u32* image, float factor, u32* to) {
    for (int run = thread_index(); run < SIZE * RUNS; run += THREADS) {
        const int top = run / SIZE * RUN, x = run % SIZE;
        u32 centre[RUN + 2], odd[RUN + 2], even[RUN + 2];  // sums over three pixels: red and blue, green
#pragma unroll
        for (int i = 0; i < RUN + 2; i++) {
            const u32* row = image + min(max(top + i - 1, 0), SIZE - 1) * SIZE;
            const u32 left = row[max(x - 1, 0)], right = row[min(x + 1, SIZE - 1)];
            centre[i] = row[x];
            odd[i] = (left & 0xff00ff) + (centre[i] & 0xff00ff) + (right & 0xff00ff);
            even[i] = (left & 0xff00) + (centre[i] & 0xff00) + (right & 0xff00);
        }
#pragma unroll
        for (int i = 1; i <= RUN; i++) {
            const int y = top + i - 1;
            if (y >= SIZE) break;
            const u32 p = centre[i];
            const u32 rb = odd[i - 1] + odd[i] + odd[i + 1] + 4 * (p & 0xff00ff);
            const u32 green = even[i - 1] + even[i] + even[i + 1] + 4 * (p & 0xff00);
            const int r = blend((2 * (rb & 0xffff) + 13) / 26, p & 255, factor);
            const int g = blend((2 * (green >> 8) + 13) / 26, p >> 8 & 255, factor);
            const int b = blend((2 * (rb >> 16) + 13) / 26, p >> 16, factor);
            const bool border = x == 0 || y == 0 || x == SIZE - 1 || y == SIZE - 1;
            to[y * SIZE + x] = border ? p : r | g << 8 | b << 16;
        }
    }
    block_sync();
}

// The rows of a blur, to 16 bits a channel. A warp takes a stretch of a row, with what it needs of its surroundings.
DEVICE void blur_rows(Shared& s, const u32* image, int radius, uint2* to) {
    const int lane = thread_index() % LANES, warp = thread_index() / LANES;
    u32* row = s.row[warp];
    for (int stretch = warp; stretch < SIZE * STRETCHES; stretch += WARPS) {
        const int start = stretch / STRETCHES * SIZE, left = stretch % STRETCHES * STRETCH;
        const int length = min(STRETCH, SIZE - left);
        for (int i = lane; i < length + 2 * radius; i += LANES) row[i] = image[start + reflect(left + i - radius)];
        warp_sync();
        for (int x = lane; x < length; x += LANES) {
            const u32 *centre = row + radius + x, p = *centre;
            u32 r = s.blur[0] * (p & 255) + 64, g = s.blur[0] * (p >> 8 & 255) + 64, b = s.blur[0] * (p >> 16) + 64;
            for (int k = 1; k <= radius; k++) {
                const u32 weights = s.blur[k] * 0x10001u, before = centre[-k], after = centre[k];
                const u32 red_green = permute(before, after, 0x5140);
                r = dot_low(weights, red_green, r);
                g = dot_high(weights, red_green, g);
                b = dot_low(weights, permute(before, after, 0x0062), b);
            }
            to[start + left + x] = {r >> 7 | g >> 7 << 16, b >> 7};
        }
        warp_sync();
    }
    block_sync();
}

// The columns of a blur. A thread filters RUN pixels of a column: every value it loads serves all of them.
DEVICE void blur_columns(const Shared& s, const uint2* from, int radius, u32* to) {
    for (int run = thread_index(); run < SIZE * RUNS; run += THREADS) {
        const int top = run / SIZE * RUN, x = run % SIZE;
        u32 r[RUN], g[RUN], b[RUN];
#pragma unroll
        for (int j = 0; j < RUN; j++) r[j] = g[j] = b[j] = 1u << 22;
        for (int i = -radius; i < RUN + radius; i++) {
            const uint2 value = from[reflect(top + i) * SIZE + x];
#pragma unroll
            for (int j = 0; j < RUN; j++) {
                const int k = i < j ? j - i : i - j;
                const u32 weight = s.blur[min(k, TAPS)];
                r[j] += weight * (value.x & 0xffff);
                g[j] += weight * (value.x >> 16);
                b[j] += weight * value.y;
            }
        }
#pragma unroll
        for (int j = 0; j < RUN; j++)
            if (top + j < SIZE) to[(top + j) * SIZE + x] = r[j] >> 23 | g[j] >> 23 << 8 | b[j] >> 23 << 16;
    }
    block_sync();
}

DEVICE void blur(const Job& job, Shared& s, u32* image, const int* params) {
    for (int k = thread_index(); k <= TAPS; k += THREADS)
        s.blur[k] = k < TAPS ? (u32)params[k / 2] >> k % 2 * 16 & 0xffff : 0;
    block_sync();
    blur_rows(s, image, params[6], between_passes(job, image));
    blur_columns(s, between_passes(job, image), params[6], image);
}

// ------------------------------------------------------------------------------------------------------------ sweeps

template <typename T>
struct alignas(4 * sizeof(T)) Four {
    T v[4];
};

DEVICE int byte_of(u32 word, int i) { return word >> 8 * i & 255; }

// Four neighbours of the source, from ``at`` on.
DEVICE void load_neighbours(const View& view, int at, Pixels& p) {
    if (view.image) {
        const uint4 words = *(const uint4*)(view.image + at);
        const u32 word[BATCH] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            p.r[j] = byte_of(word[j], 0), p.g[j] = byte_of(word[j], 1), p.b[j] = byte_of(word[j], 2);
        return;
    }
    if (view.flip) at += SIZE - BATCH - at % SIZE * 2;
    const u32* words = (const u32*)(view.crop + at * 3);
    const u32 word[3] = {load(words), load(words + 1), load(words + 2)};
    int value[3 * BATCH];
#pragma unroll
    for (int i = 0; i < 3 * BATCH; i++) value[i] = byte_of(word[i / 4], i % 4);
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
        const int there = BATCH - 1 - j;
        p.r[j] = view.flip ? value[there * 3] : value[j * 3];
        p.g[j] = view.flip ? value[there * 3 + 1] : value[j * 3 + 1];
        p.b[j] = view.flip ? value[there * 3 + 2] : value[j * 3 + 2];
    }
}

// Pixels of the source, here and there.
DEVICE void gather(const View& view, const int* x, const int* y, Pixels& p) {
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
        if (view.image) {
            const u32 word = view.image[y[j] * SIZE + x[j]];
            p.r[j] = byte_of(word, 0), p.g[j] = byte_of(word, 1), p.b[j] = byte_of(word, 2);
            continue;
        }
        const int at = (y[j] * SIZE + (view.flip ? SIZE - 1 - x[j] : x[j])) * 3;
#if ALIGNED
        const u32* words = (const u32*)(view.crop + (at & ~3));
        const u32 word = shift_pair(load(words), (at & 3) > 1 ? load(words + 1) : 0, at % 4 * 8);
        p.r[j] = byte_of(word, 0), p.g[j] = byte_of(word, 1), p.b[j] = byte_of(word, 2);
#else
        p.r[j] = load(view.crop + at), p.g[j] = load(view.crop + at + 1), p.b[j] = load(view.crop + at + 2);
#endif
    }
}

// Load the pixels through the postponed warps.
DEVICE void load_source(const Shared& s, const View& view, Pixels& p) {
    if (p.neighbours) {
        load_neighbours(view, min(p.first, PIXELS - BATCH), p);
        return;
    }
    int x[BATCH], y[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
        const int at = min(p.place(j), PIXELS - 1);
        y[j] = at / SIZE;
        x[j] = at - y[j] * SIZE;
        p.fill[j] = -1;
    }
#pragma unroll 1
    for (int w = view.warps - 1; w >= 0; w--) {
        const int* a = s.warp[w];
        const int a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3], a4 = a[4], a5 = a[5];
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            const int u = (a2 + a0 * x[j] + a1 * y[j]) >> 16, v = (a5 + a3 * x[j] + a4 * y[j]) >> 16;
            if ((u32)u < SIZE && (u32)v < SIZE) {
                x[j] = u, y[j] = v;
            } else if (p.fill[j] < 0) {
                p.fill[j] = w;
            }
        }
    }
    gather(view, x, y, p);
}

DEVICE void look_up(const u8* table, Pixels& p) {
#pragma unroll
    for (int j = 0; j < BATCH; j++)
        p.r[j] = table[p.r[j]], p.g[j] = table[256 + p.g[j]], p.b[j] = table[512 + p.b[j]];
}

// The image after all postponed ops but the last table and the fills.
DEVICE void evaluate(const Shared& s, const View& view, Pixels& p) {
    load_source(s, view, p);
    for (int k = 0; k < view.stages; k++) {
        if (view.tabled >> k & 1) look_up(s.tables[k], p);
        const int code = s.stage_code[k], param = s.stage_param[k];
#pragma unroll
        for (int j = 0; j < BATCH; j++) mix_channels(code, param, p.r[j], p.g[j], p.b[j]);
    }
}

// The last table and the fills: the pixels of the current image.
DEVICE void complete(const Shared& s, const View& view, Pixels& p) {
    if (view.tabled >> view.stages & 1) look_up(s.tables[view.stages], p);
    if (view.warps == 0) return;
#pragma unroll
    for (int j = 0; j < BATCH; j++)
        if (p.fill[j] >= 0) {
            const u8* fill = s.fills + p.fill[j] * 3;
            p.r[j] = fill[0], p.g[j] = fill[1], p.b[j] = fill[2];
        }
}

// The same, normalised, into the warp's staging area.
DEVICE void stage(const Shared& s, int lane, Out* to, const Pixels& p) {
    Four<Out> v[3];  // all loads before the first store: the compiler cannot tell the arrays apart
#pragma unroll
    for (int i = 0; i < 3 * BATCH; i++) {
        const int j = i / 3, value = i % 3 == 0 ? p.r[j] : i % 3 == 1 ? p.g[j] : p.b[j];
        v[i / 4].v[i % 4] = s.final_table[i % 3 * 256 + value];
    }
    if (p.neighbours) {
#pragma unroll
        for (int i = 0; i < 3; i++) ((Four<Out>*)to)[lane * 3 + i] = v[i];
        return;
    }
#pragma unroll
    for (int i = 0; i < 3 * BATCH; i++)
        if (p.fill[i / 3] >= 0) v[i / 4].v[i % 4] = s.final_fills[p.fill[i / 3] * 3 + i % 3];
#pragma unroll
    for (int i = 0; i < 3 * BATCH; i++) to[(lane + i / 3 * LANES) * 3 + i % 3] = v[i / 4].v[i % 4];
}

// A warp writes its tile, in the order of memory.
DEVICE void write_tile(const uint4* staging, int lane, Out* to, int pixels) {
#if ALIGNED
    const int words = pixels * 3 * OUT_BYTES / 16;
#pragma unroll
    for (int k = 0; k < (STAGING / 16 + LANES - 1) / LANES; k++) {
        const int i = lane + k * LANES;
        if (i < words) store((uint4*)to + i, staging[i]);
    }
#else
    for (int i = lane; i < pixels * 3; i += LANES) to[i] = ((const Out*)staging)[i];
#endif
}

// Visit all pixels of the current image. ``image`` receives them unless null; ``sink`` says what else becomes of them.
DEVICE void sweep(Shared& s, const View& view, Sink sink, u32* image, Out* out) {
    const int lane = thread_index() % LANES, warp = thread_index() / LANES;
    const bool neighbours = ALIGNED && SIZE % BATCH == 0 && view.warps == 0;
    u32 sum = 0;
    int low[3] = {255, 255, 255}, high[3] = {0, 0, 0};
    for (int tile = warp; tile < TILES; tile += WARPS) {
#pragma unroll 1
        for (int part = 0; part < PARTS; part++) {
            const int base = tile * TILE + part * LANES * BATCH;
            Pixels p;
            p.neighbours = neighbours;
            p.first = base + (neighbours ? lane * BATCH : lane);
            evaluate(s, view, p);
            if (sink == OUTPUT) {
                stage(s, lane, (Out*)s.staging[warp] + part * LANES * BATCH * 3, p);
                continue;
            }
            complete(s, view, p);
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                const int at = p.place(j);
                if (at >= PIXELS) break;
                const int r = p.r[j], g = p.g[j], b = p.b[j];
                if (image) image[at] = r | g << 8 | b << 16;
                if (sink == LUMA) {
                    sum += luma(r, g, b);
                } else if (sink == RANGE) {
                    low[0] = min(low[0], r), low[1] = min(low[1], g), low[2] = min(low[2], b);
                    high[0] = max(high[0], r), high[1] = max(high[1], g), high[2] = max(high[2], b);
                } else if (sink == HISTOGRAM) {
                    u32* histogram = s.histograms[warp % HISTOGRAMS];
                    atomicAdd(histogram + r, 1u);
                    atomicAdd(histogram + 256 + g, 1u);
                    atomicAdd(histogram + 512 + b, 1u);
                }
            }
        }
        if (sink == OUTPUT) {
            warp_sync();
            write_tile(s.staging[warp], lane, out + (size_t)tile * TILE * 3, min(TILE, PIXELS - tile * TILE));
            warp_sync();
        }
    }
    if (sink == LUMA) add_from_warp(&s.sum, sum);
    if (sink == RANGE)
        for (int c = 0; c < 3; c++) {
            min_from_warp(s.low + c, low[c]);
            max_from_warp(s.high + c, high[c]);
        }
    block_sync();
}

DEVICE void clear_statistics(Shared& s, Sink sink) {
    for (int c = thread_index(); c < 3; c += THREADS) s.low[c] = 255, s.high[c] = 0;
    if (thread_index() == 0) s.sum = 0;
    if (sink == HISTOGRAM)
        for (int i = thread_index(); i < HISTOGRAMS * VALUES; i += THREADS) s.histograms[0][i] = 0;
    block_sync();
}

// ------------------------------------------------------------------------------------------------------------ tables

// Equalize: the histogram's running sum, in Pillow's integer arithmetic. Fills ``equalized``.
DEVICE void equalize(Shared& s) {
    u32* histogram = s.histograms[0];
    for (int i = thread_index(); i < VALUES; i += THREADS) {
        u32 count = 0;
        for (int copy = 0; copy < HISTOGRAMS; copy++) count += s.histograms[copy][i];
        histogram[i] = count;
        if (count) {
            atomicMin(s.low + i / 256, i & 255);
            atomicMax(s.high + i / 256, i & 255);
        }
    }
    block_sync();
    for (int i = thread_index(); i < VALUES / SEGMENT; i += THREADS) {
        u32 count = 0;
        for (int k = 0; k < SEGMENT; k++) count += histogram[i * SEGMENT + k];
        s.segments[i] = count;
    }
    block_sync();
    for (int i = thread_index(); i < VALUES; i += THREADS) {
        const int c = i / 256, value = i & 255;
        const u32 step = (PIXELS - histogram[c * 256 + s.high[c]]) / 255;
        u32 level = step / 2;
        for (int k = c * (256 / SEGMENT); k < i / SEGMENT; k++) level += s.segments[k];
        for (int k = i / SEGMENT * SEGMENT; k < i; k++) level += histogram[k];
        s.equalized[i] = step == 0 || s.low[c] == s.high[c] ? value : clip(level / step);
    }
    block_sync();
}

// What an op that acts on each channel alone makes of ``value``.
DEVICE int tone(const Shared& s, int code, int param, int c, int value) {
    switch (code) {
        case OP_BRIGHTNESS: return blend(0, value, as_float(param));
        case OP_CONTRAST: return blend((2 * s.sum + PIXELS) / (2 * PIXELS), value, as_float(param));
        case OP_POSTERIZE: return value & param;
        case OP_SOLARIZE: return value < param ? value : 255 - value;
        case OP_EQUALIZE: return s.equalized[c * 256 + value];
        default: {  // AutoContrast; Pillow computes in double precision
            const int low = s.low[c], high = s.high[c];
            if (high <= low) return value;
            const double scale = 255.0 / (high - low), offset = -low * scale;
            return clip((int)(value * scale + offset));
        }
    }
}

// Fold an op that acts on each channel alone into the last table.
DEVICE void fold(Shared& s, View& view, int code, int param) {
    u8* table = s.tables[view.stages];
    const bool tabled = view.tabled >> view.stages & 1;
    for (int i = thread_index(); i < VALUES + view.warps * 3; i += THREADS) {
        if (i < VALUES) {
            table[i] = tone(s, code, param, i / 256, tabled ? table[i] : i & 255);
        } else {
            u8* fill = s.fills + i - VALUES;
            *fill = tone(s, code, param, (i - VALUES) % 3, *fill);
        }
    }
    view.tabled |= 1u << view.stages;
    block_sync();
}

DEVICE void push_stage(Shared& s, View& view, int code, int param) {
    if (thread_index() == 0) s.stage_code[view.stages] = code, s.stage_param[view.stages] = param;
    for (int w = thread_index(); w < view.warps; w += THREADS) {
        u8* fill = s.fills + w * 3;
        int r = fill[0], g = fill[1], b = fill[2];
        mix_channels(code, param, r, g, b);
        fill[0] = r, fill[1] = g, fill[2] = b;
    }
    view.stages++;
    block_sync();
}

DEVICE void push_warp(Shared& s, View& view, const int* params) {
    for (int i = thread_index(); i < 6; i += THREADS) s.warp[view.warps][i] = params[i];
    for (int i = thread_index(); i < 3; i += THREADS) s.fills[view.warps * 3 + i] = 0;
    view.warps++;
    block_sync();
}

// The last table and the normalisation in one.
DEVICE void finish_tables(Shared& s, const View& view) {
    const u8* table = s.tables[view.stages];
    const bool tabled = view.tabled >> view.stages & 1;
    for (int i = thread_index(); i < VALUES + view.warps * 3; i += THREADS) {
        if (i < VALUES) {
            s.final_table[i] = s.normalisation[tabled ? (i & ~255) + table[i] : i];
        } else {
            const int k = i - VALUES;
            s.final_fills[k] = s.normalisation[k % 3 * 256 + s.fills[k]];
        }
    }
    block_sync();
}

// ---------------------------------------------------------------------------------------------------------- programs

DEVICE bool is_warp(int code) {
    return code == OP_ROTATE || code == OP_SHEAR_X || code == OP_SHEAR_Y || code == OP_TRANSLATE_X ||
           code == OP_TRANSLATE_Y;
}

DEVICE bool is_mixing(int code) { return code == OP_COLOR || code == OP_HUE || code == OP_GRAYSCALE; }

DEVICE bool is_neighbourhood(int code) { return code == OP_SHARPNESS || code == OP_GAUSSIAN_BLUR; }

// The sweep that an op needs before it can be run or postponed.
DEVICE Sink sweep_before(const View& view, int code) {
    if (code == END) return OUTPUT;
    if (code == OP_CONTRAST) return LUMA;
    if (code == OP_AUTO_CONTRAST) return RANGE;
    if (code == OP_EQUALIZE) return HISTOGRAM;
    const bool stored = view.image && view.warps + view.stages == 0 && view.tabled == 0;
    if (is_neighbourhood(code)) return stored ? NOTHING : SCRATCH;
    const bool full = is_mixing(code) ? view.stages == MAX_STAGES : is_warp(code) && view.warps == MAX_WARPS;
    return full ? SCRATCH : NOTHING;
}

// Ops ``first`` to ``first`` + CHUNK of a program, END behind the last one.
DEVICE void fetch_ops(const Job& job, Shared& s, size_t program, int first) {
    block_sync();
    for (int i = thread_index(); i < CHUNK * 8; i += THREADS) {
        const int op = first + i / 8;
        const bool inside = op < job.length;
        if (inside) s.params[i / 8][i % 8] = job.params[(program + op) * 8 + i % 8];
        if (i % 8 == 0) s.codes[i / 8] = inside ? job.codes[program + op] : END;
    }
    block_sync();
}

DEVICE void make_view(const Job& job, Shared& s, int item) {
    const int position = item / job.batch, sample = item - position * job.batch;
    const int t = job.schedule[position * 2], crop = sample * job.crops_a_sample + job.schedule[position * 2 + 1];
    const size_t program = ((size_t)sample * job.views + t) * job.length;
    Out* out = opaque(job.out + ((size_t)t * job.batch + sample) * PIXELS * 3);
    View view = {opaque(job.crops + (size_t)crop * PIXELS * 3), job.flips[crop] != 0, 0, 0, 0, 0};
    for (int i = 0;; i++) {
        if (i % CHUNK == 0) fetch_ops(job, s, program, i);
        const int code = s.codes[i % CHUNK];
        const int* params = s.params[i % CHUNK];
        if (code == OP_IDENTITY || (code == OP_GAUSSIAN_BLUR && params[6] == 0)) continue;
        const Sink sink = sweep_before(view, code);
        if (sink != NOTHING) {
            if (sink == OUTPUT) {
                finish_tables(s, view);
            } else if (sink != SCRATCH) {
                clear_statistics(s, sink);
            }
            // a statistic stores what it evaluates, unless that was next to nothing
            const bool keep = sink == SCRATCH || (sink != OUTPUT && view.warps + view.stages > 0);
            u32* image = keep ? other_image(job, view.image) : 0;
            sweep(s, view, sink, image, out);
            if (sink == OUTPUT) return;
            if (keep) view.image = image, view.warps = view.stages = 0, view.tabled = 0;
            if (sink == HISTOGRAM) equalize(s);
        }
        if (is_warp(code)) {
            push_warp(s, view, params);
        } else if (is_mixing(code)) {
            push_stage(s, view, code, params[0]);
        } else if (code == OP_GAUSSIAN_BLUR) {
            blur(job, s, view.image, params);
        } else if (code == OP_SHARPNESS) {
            u32* image = other_image(job, view.image);
            sharpen(view.image, as_float(params[0]), image);
            view.image = image;
        } else {
            fold(s, view, code, params[0]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) make_views(const Job job) {
    __shared__ Shared s;
    for (int i = thread_index(); i < VALUES; i += THREADS) s.normalisation[i] = job.normalisation[i];
    block_sync();
    for (int item = block_index(); item < job.batch * job.views;) {
        // asked for now, used at the end, so that nobody waits for the answer
        const u32 ticket = thread_index() == 0 ? atomicAdd(job.queue, 1u) : 0;
        make_view(job, s, item);
        if (thread_index() == 0) s.next = block_count() + (int)ticket;
        block_sync();
        item = s.next;
    }
}
