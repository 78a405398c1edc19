// Pillow's arithmetic on single pixels, to the bit.

#pragma once

#include "device.cu"

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
