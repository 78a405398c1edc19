// Sweeps: visit all pixels of the image as it is after the postponed ops, for a statistic, into scratch, or as output.

#pragma once

#include "pixels.cu"

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
