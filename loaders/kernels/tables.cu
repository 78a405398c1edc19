// Ops that act on each channel alone fold into a table of 256 entries a channel; some need a statistic first.

#pragma once

#include "sweep.cu"

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
