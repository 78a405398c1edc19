// Sharpness and GaussianBlur: from one scratch image of a block to another. All threads of the block take part.

#pragma once

#include "pixels.cu"

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

// Sharpness: a blend of the image with a smoothed copy of it; the border stays. A thread filters RUN pixels of a
// column.
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
