/* Convolutions with any mask, for one instruction set, see lanes.h.
 *
 * A plane is an image of one channel with its margin of zeros, row after row; lanes are consecutive positions in it. A
 * kept entry multiplies the plane of its channel, shifted by its tap. Where the stride is not 1, the input is cut into
 * phases, the rows and the columns with one remainder each: within a phase every tap steps by 1.
 *
 *   forward  Rows are output channels. A row of positions is as wide as that of a plane; the positions beyond the output
 *            are computed and dropped.
 *   dgrad    Rows are input channels in one phase. The planes are those of dY, with a margin as wide as the taps reach;
 *            shifts go backwards. The results of the phases are interleaved.
 *   wgrad    An entry is a sum over images and positions, of dY times the shifted plane. Positions beyond the output are
 *            zero in dY; the input may be anything there, so infinity at a border may give NaN.
 *
 * Of a layout, offset / NM_PANEL is the column [in / groups][taps] of an entry; where it is in the planes is computed for
 * each call, which is one pass over the entries. */
#include "lanes.h"

#define MOST 8 /* vectors of sums at a time */
#define SLICES 16 /* sums of wgrad that are added at the end, whatever the number of threads */

/* What the three products share. */
typedef struct {
    nm_conv *c;
    const nm_csr *a;
    int64_t taps, phases, inputs; /* of a group */
    int64_t deep, wide;           /* rows and columns of a phase that taps reach beyond a position */
    int64_t line;                 /* width of a plane */
    int64_t *phase, *down, *right; /* of a tap: its phase, its shift in rows and columns */
    int64_t *top, *left;          /* of a phase: its remainders */
} plan;

static int make_plan(plan *p, nm_conv *c, const nm_csr *a) {
    int64_t taps = c->kernel[0] * c->kernel[1];
    *p = (plan){.c = c, .a = a, .taps = taps, .inputs = c->in / c->groups};
    p->deep = (c->kernel[0] - 1) * c->dilation[0] / c->stride[0];
    p->wide = (c->kernel[1] - 1) * c->dilation[1] / c->stride[1];
    p->line = c->positions[1] + p->wide;
    p->phase = malloc((size_t)(5 * taps) * sizeof *p->phase);
    if (!p->phase) return 0;
    p->down = p->phase + taps, p->right = p->down + taps, p->top = p->right + taps, p->left = p->top + taps;
    for (int64_t t = 0; t < taps; t++) {
        int64_t y = t / c->kernel[1] * c->dilation[0], x = t % c->kernel[1] * c->dilation[1], f = 0;
        int64_t top = y % c->stride[0], left = x % c->stride[1];
        while (f < p->phases && (p->top[f] != top || p->left[f] != left)) f++;
        if (f == p->phases) p->top[f] = top, p->left[f] = left, p->phases++;
        p->phase[t] = f, p->down[t] = y / c->stride[0], p->right[t] = x / c->stride[1];
    }
    return 1;
}

/* Where every entry begins in the planes [phases][in] of the input, each of `step` floats. */
static void place_entries(const plan *p, int64_t step, int32_t *offset) {
    const nm_conv *c = p->c;
    const nm_csr *a = p->a;
    for (int64_t r = 0; r < c->out; r++) {
        int64_t base = r / (c->out / c->groups) * p->inputs;
        for (int32_t e = a->start[r]; e < a->start[r + 1]; e++) {
            int64_t column = a->offset[e] / NM_PANEL, tap = column % p->taps;
            int64_t plane = p->phase[tap] * c->in + base + column / p->taps;
            offset[e] = (int32_t)(plane * step + p->down[tap] * p->line + p->right[tap]);
        }
    }
}

static int64_t first_at(int64_t above, int64_t stride) { return above > 0 ? nm_ceil(above, stride) : 0; }
static int64_t clamp(int64_t value, int64_t low, int64_t high) { return value < low ? low : nm_min(value, high); }

/* Where planes are read from: channels of one image, [channels][size[0]][size[1]]. */
typedef struct {
    const void *from;
    int32_t dtype;
    int64_t channels, size[2], stride[2], padding[2];
} source;

/* One phase of the channels from element `at` on: `rows` rows of `line` positions each, from row `first` of the padded
 * phase. */
static void fill_planes(float *to, int64_t step, const source *s, int64_t at, int64_t top, int64_t left, int64_t first,
                        int64_t rows, int64_t line) {
    int64_t before = clamp(first_at(s->padding[1] - left, s->stride[1]), 0, line);
    int64_t end = clamp(first_at(s->size[1] + s->padding[1] - left, s->stride[1]), before, line);
    for (int64_t i = 0; i < s->channels; i++, at += s->size[0] * s->size[1]) {
        for (int64_t r = 0; r < rows; r++) {
            float *row = to + i * step + r * line;
            int64_t y = (first + r) * s->stride[0] + top - s->padding[0];
            if (y < 0 || y >= s->size[0]) {
                memset(row, 0, (size_t)line * 4);
                continue;
            }
            for (int64_t x = 0; x < before; x++) row[x] = 0;
            for (int64_t x = end; x < line; x++) row[x] = 0;
            int64_t from = at + y * s->size[1] + before * s->stride[1] + left - s->padding[1];
            if (s->stride[1] == 1) {
                read_floats(row + before, s->from, s->dtype, from, end - before);
            } else if (s->dtype == NM_FLOAT32) {
                const float *floats = (const float *)s->from + from;
                for (int64_t x = before; x < end; x++, floats += s->stride[1]) row[x] = *floats;
            } else {
                const uint16_t *halves = (const uint16_t *)s->from + from;
                for (int64_t x = before; x < end; x++, halves += s->stride[1]) row[x] = widen(*halves);
            }
        }
    }
}

/* Rows of positions whose planes have about `budget` floats, but no fewer than the lanes need. */
static int64_t rows_of_chunk(int64_t budget, int64_t planes, int64_t line, int64_t deep, int64_t rows) {
    int64_t found = budget / (planes * line) - deep, least = nm_ceil(MOST * LANES, line);
    found = found < least ? least : found;
    return nm_ceil(rows, nm_ceil(rows, nm_min(found, rows)));
}

/* ---------------------------------------------------------------------------------------------- forward and dgrad */

/* Where the results of some rows go: those of positions in `rows` and `columns`, to row r and column c at
 * base + r * down + c * right of a channel. */
typedef struct {
    int64_t rows[2], columns[2], base, down, right;
} view;

typedef struct {
    int64_t lane, count, to;
} segment;

typedef struct {
    const plan *p;
    source from;
    int64_t copies;        /* of a channel: phases of the input */
    int64_t rows[2], deep; /* of positions; that the planes have beyond them */
    int64_t chunk, chunks, parts, step;
    int64_t channels, views; /* rows of the layout: channels of each view */
    int64_t size;          /* of a channel of the result */
    const view *view;
    int32_t *start, *offset;
    float *values;
    const void *bias;
    void *y;
} planes_job;

INLINE void write_segment(void *to, int32_t dtype, int64_t at, int64_t right, const float *from, int64_t count) {
    if (dtype == NM_FLOAT32 && right == 1 && count >= LANES) {
        float *floats = (float *)to + at;
        for (int64_t i = 0; i < count - LANES; i += LANES) store(floats + i, load(from + i));
        store(floats + count - LANES, load(from + count - LANES));
    } else if (dtype == NM_FLOAT32) {
        float *floats = (float *)to + at;
        for (int64_t i = 0; i < count; i++) floats[i * right] = from[i];
    } else {
        uint16_t *halves = (uint16_t *)to + at;
        if (right == 1)
            for (int64_t i = 0; i < count; i++) halves[i] = narrow(from[i]);
        else
            for (int64_t i = 0; i < count; i++) halves[i * right] = narrow(from[i]);
    }
}

/* The segments of `count` positions from `at` on that a view has; `first` is the row of position 0. */
static int64_t find_segments(segment *found, const view *v, int64_t line, int64_t first, int64_t at, int64_t count) {
    int64_t number = 0;
    for (int64_t r = at / line; r * line < at + count; r++) {
        int64_t row = first + r, from = r * line + v->columns[0], to = r * line + v->columns[1];
        if (row < v->rows[0] || row >= v->rows[1]) continue;
        from = from < at ? at : from, to = nm_min(to, at + count);
        if (from < to)
            found[number++] =
                (segment){from - at, to - from, v->base + row * v->down + (from - r * line) * v->right};
    }
    return number;
}

/* The rows from .. to of one view at `vectors` * LANES positions. */
INLINE void conv_tile(const int vectors, const planes_job *job, const float *planes, int64_t from, int64_t to,
                      int64_t image, const view *v, const segment *segments, int64_t number) {
    int32_t dtype = job->p->c->dtype;
    float y[MOST * LANES];
    for (int64_t r = from; r < to; r++) {
        float bias = 0;
        if (job->bias) read_floats(&bias, job->bias, dtype, r % job->channels, 1);
        vec sums[MOST];
        for (int i = 0; i < vectors; i++) sums[i] = fill(bias);
        for (int32_t e = job->start[r]; e < job->start[r + 1]; e++) {
            const float *x = planes + job->offset[e];
            vec w = fill(job->values[e]);
            for (int i = 0; i < vectors; i++) sums[i] += w * load(x + i * LANES);
        }
        for (int i = 0; i < vectors; i++) store(y + i * LANES, sums[i]);
        int64_t at = (image * job->channels + r % job->channels) * job->size;
        for (int64_t s = 0; s < number; s++)
            write_segment(job->y, dtype, at + segments[s].to, v->right, y + segments[s].lane, segments[s].count);
    }
}

static void planes_task(int64_t begin, int64_t end, void *context) {
    const planes_job *job = context;
    const plan *p = job->p;
    const source *s = &job->from;
    int64_t floats = job->copies * s->channels * job->step + p->line + 2 * MOST * LANES, filled = -1;
    float *planes = scratch(floats);
    segment segments[MOST * LANES + 2];
    if (!planes) {
        p->c->failed = NM_NO_MEMORY;
        return;
    }
    memset(planes, 0, (size_t)floats * 4);
    for (int64_t item = begin; item < end; item++) {
        int64_t place = item / job->parts, part = item % job->parts, image = place / job->chunks;
        int64_t first = job->rows[0] + place % job->chunks * job->chunk, rows = nm_min(job->chunk, job->rows[1] - first);
        if (filled != place)
            for (int64_t f = 0; f < job->copies; f++)
                fill_planes(planes + f * s->channels * job->step, job->step, s,
                            image * s->channels * s->size[0] * s->size[1], job->copies > 1 ? p->top[f] : 0,
                            job->copies > 1 ? p->left[f] : 0, first, rows + job->deep, p->line);
        filled = place;
        int64_t from = job->channels * part / job->parts, to = job->channels * (part + 1) / job->parts;
        for (int64_t at = 0, left = rows * p->line, vectors; left > 0; at += vectors * LANES, left -= vectors * LANES) {
            vectors = left > 6 * LANES ? 8 : left > 3 * LANES ? 4 : left > LANES ? 2 : 1;
            for (int64_t w = 0; w < job->views; w++) {
                const view *v = job->view + w;
                int64_t number = find_segments(segments, v, p->line, first, at, nm_min(left, vectors * LANES));
                int64_t low = w * job->channels + from, high = w * job->channels + to;
                if (!number) continue;
                if (vectors == 8)
                    conv_tile(8, job, planes + at, low, high, image, v, segments, number);
                else if (vectors == 4)
                    conv_tile(4, job, planes + at, low, high, image, v, segments, number);
                else if (vectors == 2)
                    conv_tile(2, job, planes + at, low, high, image, v, segments, number);
                else
                    conv_tile(1, job, planes + at, low, high, image, v, segments, number);
            }
        }
    }
    free(planes);
}

#ifndef PLANES
#define PLANES (1 << 16) /* floats of the planes of one item */
#endif

static void run_planes(planes_job *job) {
    nm_conv *c = job->p->c;
    int64_t rows = job->rows[1] - job->rows[0], planes = job->copies * job->from.channels;
    job->chunk = rows_of_chunk(PLANES, planes, job->p->line, job->deep, rows);
    job->chunks = nm_ceil(rows, job->chunk);
    job->step = (job->chunk + job->deep) * job->p->line;
    int64_t items = c->images * job->chunks;
    job->parts = c->threads > 1 && items < 4 * c->threads && items % c->threads ? nm_min(job->channels, c->threads) : 1;
    if (planes * job->step > INT32_MAX) c->failed = NM_TOO_LARGE;
}

static void free_job(planes_job *job) {
    free(job->start);
    free(job->offset);
    free(job->values);
}

static void conv_forward(nm_conv *c, const nm_csr *a) {
    plan p;
    view v = {{0, c->positions[0]}, {0, c->positions[1]}, 0, c->positions[1], 1};
    if (!make_plan(&p, c, a)) {
        c->failed = NM_NO_MEMORY;
        return;
    }
    planes_job job = {
        .p = &p,
        .from = {c->x, c->dtype, c->in, {c->size[0], c->size[1]}, {c->stride[0], c->stride[1]},
                 {c->padding[0], c->padding[1]}},
        .copies = p.phases,
        .rows = {0, c->positions[0]},
        .deep = p.deep,
        .channels = c->out,
        .views = 1,
        .size = c->positions[0] * c->positions[1],
        .view = &v,
        .start = (int32_t *)a->start,
        .values = (float *)a->values,
        .bias = c->bias,
        .y = c->y,
    };
    run_planes(&job);
    job.offset = malloc((size_t)(a->start[c->out] + 1) * 4);
    if (!job.offset) c->failed = NM_NO_MEMORY;
    if (!c->failed) {
        place_entries(&p, job.step, job.offset);
        nm_run(c->parallel, c->threads, c->images * job.chunks * job.parts, planes_task, &job);
    }
    free(job.offset);
    free(p.phase);
}

/* The layout by rows [phases][in], each with the entries (output, tap) in the order of memory. */
static void transpose_entries(planes_job *job) {
    const plan *p = job->p;
    const nm_conv *c = p->c;
    const nm_csr *a = p->a;
    int64_t rows = p->phases * c->in;
    int32_t *start = job->start;
    memset(start, 0, (size_t)(rows + 2) * 4);
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t o = 0; o < c->out; o++) {
            int64_t base = o / (c->out / c->groups) * p->inputs;
            for (int32_t e = a->start[o]; e < a->start[o + 1]; e++) {
                int64_t column = a->offset[e] / NM_PANEL, tap = column % p->taps;
                int64_t row = p->phase[tap] * c->in + base + column / p->taps;
                if (pass == 0) {
                    start[row + 2]++;
                    continue;
                }
                int32_t slot = start[row + 1]++;
                job->offset[slot] =
                    (int32_t)(o * job->step + (p->deep - p->down[tap]) * p->line + p->wide - p->right[tap]);
                job->values[slot] = a->values[e];
            }
        }
        if (pass == 0)
            for (int64_t r = 0; r < rows; r++) start[r + 2] += start[r + 1];
    }
}

static void conv_dgrad(nm_conv *c, const nm_csr *a) {
    plan p;
    if (!make_plan(&p, c, a)) {
        c->failed = NM_NO_MEMORY;
        return;
    }
    view *views = malloc((size_t)p.phases * sizeof *views);
    int64_t rows = c->positions[0] + p.deep, entries = a->start[c->out];
    planes_job job = {
        .p = &p,
        .from = {c->grad, c->dtype, c->out, {c->positions[0], c->positions[1]}, {1, 1}, {p.deep, p.wide}},
        .copies = 1,
        .rows = {rows, 0},
        .deep = p.deep,
        .channels = c->in,
        .views = p.phases,
        .size = c->size[0] * c->size[1],
        .view = views,
        .start = malloc((size_t)(p.phases * c->in + 2) * 4),
        .offset = malloc((size_t)(entries + 1) * 4),
        .values = malloc((size_t)(entries + 1) * 4),
        .y = c->y,
    };
    if (!views || !job.start || !job.offset || !job.values) c->failed = NM_NO_MEMORY;
    int whole = p.phases == c->stride[0] * c->stride[1];
    for (int64_t f = 0; f < p.phases && !c->failed; f++) {
        int64_t y = p.top[f] - c->padding[0], x = p.left[f] - c->padding[1];
        view v = {{first_at(-y, c->stride[0]), first_at(c->size[0] - y, c->stride[0])},
                  {first_at(-x, c->stride[1]), first_at(c->size[1] - x, c->stride[1])},
                  y * c->size[1] + x,
                  c->stride[0] * c->size[1],
                  c->stride[1]};
        whole = whole && v.rows[1] <= rows && v.columns[1] <= p.line;
        v.rows[1] = nm_min(v.rows[1], rows), v.columns[1] = nm_min(v.columns[1], p.line);
        job.rows[0] = nm_min(job.rows[0], v.rows[0]);
        job.rows[1] = v.rows[1] > job.rows[1] ? v.rows[1] : job.rows[1];
        views[f] = v;
    }
    if (!c->failed) {
        if (!whole) memset(c->y, 0, (size_t)(c->images * c->in * job.size * width(c->dtype)));
        if (job.rows[0] < job.rows[1]) {
            run_planes(&job);
            if (!c->failed) {
                transpose_entries(&job);
                nm_run(c->parallel, c->threads, c->images * job.chunks * job.parts, planes_task, &job);
            }
        }
    }
    free(views);
    free_job(&job);
    free(p.phase);
}

/* ------------------------------------------------------------------------------------------------------------ wgrad */

typedef struct {
    const plan *p;
    source x, grad;
    int64_t chunk, chunks, block, blocks, slices; /* rows, images */
    int64_t step, image;                          /* floats of a plane, and of the planes of an image */
    int32_t *offset;
    float *sums; /* [slices][entries] */
} sampled_job;

/* Add to `sums` the dot products of dY [images][positions] with `entries` shifted planes; `image` floats are between the
 * planes of two images, `along` vectors in dY of one. */
INLINE void dots(const int entries, const int32_t *offset, const float *planes, int64_t image, const float *grad,
                 int64_t images, int64_t along, float *sums) {
    vec found[MOST];
    for (int e = 0; e < entries; e++) found[e] = fill(0);
    for (int64_t n = 0; n < images; n++, planes += image) {
        const float *x[MOST];
        for (int e = 0; e < entries; e++) x[e] = planes + offset[e];
        for (int64_t i = 0; i < along; i++, grad += LANES) {
            vec d = load(grad);
            for (int e = 0; e < entries; e++) found[e] += d * load(x[e] + i * LANES);
        }
    }
    for (int e = 0; e < entries; e++) sums[e] += total(found[e]);
}

static void sampled_task(int64_t begin, int64_t end, void *context) {
    const sampled_job *job = context;
    const plan *p = job->p;
    const nm_csr *a = p->a;
    nm_conv *c = p->c;
    int64_t entries = a->start[c->out], floats = job->block * job->image + p->line + 2 * MOST * LANES;
    int64_t most = nm_ceil(job->chunk * p->line, LANES) * LANES;
    float *planes = scratch(floats), *grad = scratch(job->block * most);
    if (planes && grad) {
        memset(planes, 0, (size_t)floats * 4); /* what lies between planes meets zeros in dY, so it must be finite */
        for (int64_t slice = begin; slice < end; slice++) {
            float *sums = job->sums + slice * entries;
            int64_t items = job->blocks * job->chunks;
            memset(sums, 0, (size_t)entries * 4);
            for (int64_t item = items * slice / job->slices; item < items * (slice + 1) / job->slices; item++) {
                int64_t image = item / job->chunks * job->block, images = nm_min(job->block, c->images - image);
                int64_t first = item % job->chunks * job->chunk, rows = nm_min(job->chunk, c->positions[0] - first);
                int64_t along = nm_ceil(rows * p->line, LANES), pixels = c->size[0] * c->size[1];
                for (int64_t n = 0; n < images; n++)
                    for (int64_t f = 0; f < p->phases; f++)
                        fill_planes(planes + n * job->image + f * c->in * job->step, job->step, &job->x,
                                    (image + n) * c->in * pixels, p->top[f], p->left[f], first, rows + p->deep, p->line);
                for (int64_t r = 0; r < c->out; r++) {
                    int32_t e = a->start[r], last = a->start[r + 1];
                    if (e == last) continue;
                    for (int64_t n = 0; n < images; n++) {
                        float *to = grad + n * along * LANES;
                        int64_t at = ((image + n) * c->out + r) * c->positions[0] * c->positions[1];
                        fill_planes(to, 0, &job->grad, at, 0, 0, first, rows, p->line);
                        for (int64_t i = rows * p->line; i < along * LANES; i++) to[i] = 0;
                    }
                    for (; e + 8 <= last; e += 8)
                        dots(8, job->offset + e, planes, job->image, grad, images, along, sums + e);
                    if (e + 4 <= last) {
                        dots(4, job->offset + e, planes, job->image, grad, images, along, sums + e);
                        e += 4;
                    }
                    if (e + 2 <= last) {
                        dots(2, job->offset + e, planes, job->image, grad, images, along, sums + e);
                        e += 2;
                    }
                    if (e < last) dots(1, job->offset + e, planes, job->image, grad, images, along, sums + e);
                }
            }
        }
    } else {
        c->failed = NM_NO_MEMORY;
    }
    free(planes);
    free(grad);
}

#ifndef SAMPLED_PLANES
#define SAMPLED_PLANES (1 << 16)
#endif

static void conv_sampled(nm_conv *c, const nm_csr *a) {
    plan p;
    if (!make_plan(&p, c, a)) {
        c->failed = NM_NO_MEMORY;
        return;
    }
    int64_t entries = a->start[c->out], columns = p.inputs * p.taps, planes = p.phases * c->in;
    sampled_job job = {
        .p = &p,
        .x = {c->x, c->dtype, c->in, {c->size[0], c->size[1]}, {c->stride[0], c->stride[1]},
              {c->padding[0], c->padding[1]}},
        .grad = {c->grad, c->dtype, 1, {c->positions[0], c->positions[1]}, {1, 1}, {0, 0}},
    };
    job.chunk = rows_of_chunk(SAMPLED_PLANES, planes, p.line, p.deep, c->positions[0]);
    job.chunks = nm_ceil(c->positions[0], job.chunk);
    job.step = (job.chunk + p.deep) * p.line;
    job.image = planes * job.step;
    job.block = job.chunks > 1 ? 1 : clamp(SAMPLED_PLANES / job.image, 1, c->images);
    job.blocks = nm_ceil(c->images, job.block);
    job.slices = nm_min(SLICES, job.blocks * job.chunks);
    if (job.image > INT32_MAX) c->failed = NM_TOO_LARGE;
    job.offset = malloc((size_t)(entries + 1) * 4);
    job.sums = scratch(job.slices * entries);
    float *line = scratch(columns);
    if (!job.offset || !job.sums || !line) c->failed = NM_NO_MEMORY;
    if (!c->failed) {
        place_entries(&p, job.step, job.offset);
        nm_run(c->parallel, c->threads, job.slices, sampled_task, &job);
    }
    for (int64_t r = 0; r < c->out && !c->failed; r++) {
        memset(line, 0, (size_t)columns * 4);
        for (int32_t e = a->start[r]; e < a->start[r + 1]; e++)
            for (int64_t s = 0; s < job.slices; s++) line[a->offset[e] / NM_PANEL] += job.sums[s * entries + e];
        write_floats(c->y, c->dtype, r * columns, line, columns);
    }
    free(job.offset);
    free(job.sums);
    free(line);
    free(p.phase);
}

const nm_conv_kernels LEVEL(nm_conv) = {conv_forward, conv_dgrad, conv_sampled};
