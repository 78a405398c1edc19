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
// Every operation gives Pillow's bits (compile with -fmad=false). The host compiles a module for each configuration:
// SIZE pixels a side, OUT_BYTES a value, ALIGNED (views start at multiples of 16 bytes, crops at multiples of 4),
// THREADS a block, BLOCKS resident on a multiprocessor, and the codes OP_* and END.

#include "neighbourhoods.cu"
#include "tables.cu"

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
