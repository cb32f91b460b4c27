/* The products of matrices, for one instruction set, see lanes.h. Only permutations and transposes are written with
 * intrinsics. */
#include "panels.h"

/* ----------------------------------------------------------------------------------------- the permute layout */

#if NM_LEVEL > 0
#if NM_LEVEL == 2
#define TOKENS 8
#define UNITS 6 /* (block, slot) pairs whose sums permute_sampled holds in registers */
typedef __m512i lane_index;
INLINE lane_index load_index(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE vec permute(lane_index i, vec v) { return (vec)_mm512_permutexvar_ps(i, (__m512)v); }
#else
#define TOKENS 4
#define UNITS 3
typedef __m256i lane_index;
INLINE lane_index load_index(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE vec permute(lane_index i, vec v) { return (vec)_mm256_permutevar8x32_ps((__m256)v, i); }
#endif
#define TILE (2 * LANES)
#define SAMPLED_TOKENS 64
#define SAMPLED_STEP ((SAMPLED_TOKENS + 1) * LANES) /* not a power of two, which one set of a cache would hold */
#define SAMPLED_TILES 8

typedef struct {
    nm_operands *o;
    const nm_permute *a;
    int64_t parts;
} permute_job;

/* Copy `count` rows of x [.., depth] from row `first` into [block][token][LANES], of which a block has `step` floats and
 * room for `into` tokens; the others are zero. */
INLINE void gather_blocks(float *to, int64_t step, const nm_operands *o, int64_t first, int64_t count, int64_t into) {
    int64_t blocks = nm_ceil(o->depth, LANES), whole = o->depth / LANES;
    for (int64_t t = 0; t < into; t++) {
        float *row = to + t * LANES;
        if (t >= count) {
            for (int64_t b = 0; b < blocks; b++) store(row + b * step, fill(0));
            continue;
        }
        int64_t at = (first + t) * o->depth;
        for (int64_t b = 0; b < whole; b++) read_floats(row + b * step, o->x, o->dtype, at + b * LANES, LANES);
        if (whole < blocks) {
            store(row + whole * step, fill(0));
            read_floats(row + whole * step, o->x, o->dtype, at + whole * LANES, o->depth - whole * LANES);
        }
    }
}

/* One tile of rows for `count` tokens, of which `valid` exist. */
INLINE void permute_tile(const int count, int64_t valid, const nm_operands *o, const nm_permute *a, int64_t tile,
                         int64_t first, const float *x) {
    int64_t blocks = nm_ceil(o->depth, LANES), row = tile * TILE, rows = nm_min(TILE, o->rows - row);
    const uint8_t *index = a->index + tile * blocks * a->slots * TILE;
    const float *values = (const float *)a->values + tile * blocks * a->slots * TILE;
    float bias[TILE] = {0};
    if (o->bias) read_floats(bias, o->bias, o->dtype, row, rows);
    vec low[TOKENS], high[TOKENS];
    for (int t = 0; t < count; t++) low[t] = load(bias), high[t] = load(bias + LANES);
    for (int64_t b = 0; b < blocks; b++, x += count * LANES) {
        vec inputs[TOKENS];
        for (int t = 0; t < count; t++) inputs[t] = load(x + t * LANES);
        for (int64_t s = 0; s < a->slots; s++, index += TILE, values += TILE) {
            lane_index i = load_index(index), j = load_index(index + LANES);
            vec v = load(values), w = load(values + LANES);
            for (int t = 0; t < count; t++) {
                low[t] += v * permute(i, inputs[t]);
                high[t] += w * permute(j, inputs[t]);
            }
        }
    }
    for (int t = 0; t < count && t < valid; t++) {
        int64_t at = (first + t) * o->rows + row;
        if (o->dtype == NM_FLOAT32 && rows == TILE) {
            store((float *)o->y + at, low[t]);
            store((float *)o->y + at + LANES, high[t]);
        } else {
            float out[TILE];
            store(out, low[t]);
            store(out + LANES, high[t]);
            write_floats(o->y, o->dtype, at, out, rows);
        }
    }
}

static void permute_linear_task(int64_t begin, int64_t end, void *context) {
    const permute_job *job = context;
    nm_operands *o = job->o;
    int64_t blocks = nm_ceil(o->depth, LANES), tiles = nm_ceil(o->rows, TILE), filled = -1;
    float *x = scratch(blocks * TOKENS * LANES);
    if (!x) {
        o->failed = NM_NO_MEMORY;
        return;
    }
    for (int64_t item = begin; item < end; item++) {
        int64_t first = item / job->parts * TOKENS, part = item % job->parts;
        int64_t valid = nm_min(TOKENS, o->tokens - first);
        int64_t count = valid > 4 ? 8 : valid > 2 ? 4 : valid;
        if (filled != first) gather_blocks(x, count * LANES, o, first, valid, count);
        filled = first;
        for (int64_t tile = tiles * part / job->parts; tile < tiles * (part + 1) / job->parts; tile++) {
            if (count == 1)
                permute_tile(1, valid, o, job->a, tile, first, x);
            else if (count == 2)
                permute_tile(2, valid, o, job->a, tile, first, x);
            else if (count == 4)
                permute_tile(4, valid, o, job->a, tile, first, x);
#if TOKENS > 4
            else
                permute_tile(8, valid, o, job->a, tile, first, x);
#endif
        }
    }
    free(x);
}

static void permute_linear(nm_operands *o, const nm_permute *a) {
    if (!o->tokens) return;
    int64_t groups = nm_ceil(o->tokens, TOKENS), tiles = nm_ceil(o->rows, TILE);
    int64_t parts = groups >= 8 * o->threads ? 1 : nm_min(tiles, nm_ceil(4 * o->threads, groups));
    permute_job job = {o, a, o->threads > 1 ? parts : 1};
    nm_run(o->parallel, o->threads, groups * job.parts, permute_linear_task, &job);
}

/* The sums of `units` (block, slot) pairs of one tile over one group of tokens. x is [block][tokens][LANES], grad
 * [tokens][TILE]. */
INLINE void sampled_units(const int units, const nm_permute *a, int64_t unit, const uint8_t *index, const float *x,
                          const float *grad, float *sums) {
    lane_index i[UNITS], j[UNITS];
    vec low[UNITS], high[UNITS];
    const float *inputs[UNITS];
    for (int u = 0; u < units; u++) {
        i[u] = load_index(index + (unit + u) * TILE), j[u] = load_index(index + (unit + u) * TILE + LANES);
        low[u] = load(sums + (unit + u) * TILE), high[u] = load(sums + (unit + u) * TILE + LANES);
        inputs[u] = x + (unit + u) / a->slots * SAMPLED_STEP;
    }
    for (int64_t t = 0; t < SAMPLED_TOKENS; t++) {
        vec d = load(grad + t * TILE), e = load(grad + t * TILE + LANES);
        for (int u = 0; u < units; u++) {
            vec v = load(inputs[u] + t * LANES);
            low[u] += d * permute(i[u], v);
            high[u] += e * permute(j[u], v);
        }
    }
    for (int u = 0; u < units; u++) {
        store(sums + (unit + u) * TILE, low[u]);
        store(sums + (unit + u) * TILE + LANES, high[u]);
    }
}

static void permute_sampled_task(int64_t begin, int64_t end, void *context) {
    const permute_job *job = context;
    nm_operands *o = job->o;
    const nm_permute *a = job->a;
    int64_t blocks = nm_ceil(o->depth, LANES), units = blocks * a->slots;
    float *x = scratch(blocks * SAMPLED_STEP);
    float *grad = scratch(SAMPLED_TILES * SAMPLED_TOKENS * TILE);
    float *sums = scratch((end - begin) * units * TILE);
    float *row = scratch(o->depth);
    if (x && grad && sums && row) {
        memset(sums, 0, (size_t)((end - begin) * units * TILE) * 4);
        for (int64_t first = 0; first < o->tokens; first += SAMPLED_TOKENS) {
            int64_t count = nm_min(SAMPLED_TOKENS, o->tokens - first);
            gather_blocks(x, SAMPLED_STEP, o, first, count, SAMPLED_TOKENS);
            for (int64_t group = begin; group < end; group += SAMPLED_TILES) {
                int64_t tiles = nm_min(SAMPLED_TILES, end - group);
                if (count < SAMPLED_TOKENS || (group + tiles) * TILE > o->rows)
                    memset(grad, 0, (size_t)(SAMPLED_TILES * SAMPLED_TOKENS * TILE) * 4);
                for (int64_t t = 0; t < count; t++)
                    for (int64_t tile = 0; tile < tiles; tile++) {
                        int64_t row = (group + tile) * TILE;
                        read_floats(grad + (tile * SAMPLED_TOKENS + t) * TILE, o->grad, o->dtype,
                                    (first + t) * o->rows + row, nm_min(TILE, o->rows - row));
                    }
                for (int64_t unit = 0; unit < units; unit += UNITS) {
                    int64_t left = nm_min(UNITS, units - unit);
                    for (int64_t tile = 0; tile < tiles; tile++) {
                        const uint8_t *index = a->index + (group + tile) * units * TILE;
                        float *into = sums + (group + tile - begin) * units * TILE;
                        const float *d = grad + tile * SAMPLED_TOKENS * TILE;
                        if (left == UNITS)
                            sampled_units(UNITS, a, unit, index, x, d, into);
                        else
                            for (int64_t u = unit; u < units; u++) sampled_units(1, a, u, index, x, d, into);
                    }
                }
            }
        }
        for (int64_t r = begin * TILE; r < nm_min(end * TILE, o->rows); r++) {
            const uint8_t *index = a->index + r / TILE * units * TILE + r % TILE;
            const float *from = sums + (r / TILE - begin) * units * TILE + r % TILE;
            memset(row, 0, (size_t)o->depth * 4);
            for (int64_t u = 0; u < units; u++) {
                int64_t at = index[u * TILE];
                if (!(at & NM_EMPTY)) row[u / a->slots * LANES + at] = from[u * TILE];
            }
            write_floats(o->y, o->dtype, r * o->depth, row, o->depth);
        }
    } else {
        o->failed = NM_NO_MEMORY;
    }
    free(x);
    free(grad);
    free(sums);
    free(row);
}

static void permute_sampled(nm_operands *o, const nm_permute *a) {
    permute_job job = {o, a, 0};
    nm_run(o->parallel, o->threads, nm_ceil(o->rows, TILE), permute_sampled_task, &job);
}
#endif

/* --------------------------------------------------------------------------------------------- the csr layout */

/* panel [columns][NM_PANEL] = the transpose of the rows first .. first + count of a matrix [.., ld], its columns from
 * `column` on; zeros where there is no row. */
static void transposed_panel(float *panel, const void *matrix, int32_t dtype, int64_t ld, int64_t first, int64_t count,
                             int64_t column, int64_t columns) {
    float block[16 * 16];
    for (int64_t t = 0; t < NM_PANEL; t += 16) {
        int64_t rows = nm_min(16, count - t);
        for (int64_t k = 0; k < columns; k += 16) {
            int64_t wide = nm_min(16, columns - k), at = (first + t) * ld + column + k;
            if (rows == 16 && wide == 16 && dtype == NM_FLOAT32) {
                transpose16((const float *)matrix + at, ld, panel + k * NM_PANEL + t, NM_PANEL);
                continue;
            }
            if (rows < 16 || wide < 16) memset(block, 0, sizeof block);
            for (int64_t i = 0; i < rows; i++) {
                if (wide == 16)
                    read_floats(block + i * 16, matrix, dtype, at + i * ld, 16);
                else
                    read_floats(block + i * 16, matrix, dtype, at + i * ld, wide);
            }
            if (wide == 16) {
                transpose16(block, 16, panel + k * NM_PANEL + t, NM_PANEL);
            } else {
                for (int64_t j = 0; j < wide; j++)
                    for (int64_t i = 0; i < 16; i++) panel[(k + j) * NM_PANEL + t + i] = block[i * 16 + j];
            }
        }
    }
}

/* panel [depth][NM_PANEL] = the columns first .. first + count of x [.., tokens], `depth` rows from row `from` on. */
static void straight_panel(float *panel, const nm_operands *o, int64_t first, int64_t count, int64_t from,
                           int64_t depth) {
    for (int64_t k = 0; k < depth; k++) {
        if (count < NM_PANEL) memset(panel + k * NM_PANEL, 0, NM_PANEL * 4);
        read_floats(panel + k * NM_PANEL, o->x, o->dtype, (from + k) * o->tokens + first, count);
    }
}

#define GROUP (LANES < 8 ? 8 : NM_PANEL / LANES) /* vectors that are summed at a time */

/* Add to the sums y [NM_PANEL] of a row its entries from `next` on whose offset is below `limit`; return the entry after
 * them. `panel` is that of offset 0. */
INLINE int32_t csr_row(const nm_csr *a, int32_t next, int32_t last, int32_t limit, const float *panel, float *y) {
    int32_t end = next;
    for (int part = 0; part < NM_PANEL; part += GROUP * LANES) {
        vec sums[GROUP];
        for (int v = 0; v < GROUP; v++) sums[v] = load(y + part + v * LANES);
        for (end = next; end < last && a->offset[end] < limit; end++) {
            const float *x = panel + a->offset[end] + part;
            vec w = fill(a->values[end]);
            for (int v = 0; v < GROUP; v++) sums[v] += w * load(x + v * LANES);
        }
        for (int v = 0; v < GROUP; v++) store(y + part + v * LANES, sums[v]);
    }
    return end;
}

#if NM_LEVEL == 2
/* The same for two rows at once: four sums alone would wait for each other. The order of each sum is that of csr_row. */
INLINE void csr_two_rows(const nm_csr *a, int32_t *next, const int32_t *last, int32_t limit, const float *panel,
                         float *y) {
    int32_t e = next[0], f = next[1];
    vec sums[2][GROUP];
    for (int v = 0; v < GROUP; v++) sums[0][v] = load(y + v * LANES), sums[1][v] = load(y + NM_PANEL + v * LANES);
    for (; e < last[0] && f < last[1] && a->offset[e] < limit && a->offset[f] < limit; e++, f++) {
        const float *x = panel + a->offset[e], *z = panel + a->offset[f];
        vec w = fill(a->values[e]), u = fill(a->values[f]);
        for (int v = 0; v < GROUP; v++) sums[0][v] += w * load(x + v * LANES), sums[1][v] += u * load(z + v * LANES);
    }
    for (; e < last[0] && a->offset[e] < limit; e++)
        for (int v = 0; v < GROUP; v++) sums[0][v] += fill(a->values[e]) * load(panel + a->offset[e] + v * LANES);
    for (; f < last[1] && a->offset[f] < limit; f++)
        for (int v = 0; v < GROUP; v++) sums[1][v] += fill(a->values[f]) * load(panel + a->offset[f] + v * LANES);
    for (int v = 0; v < GROUP; v++) store(y + v * LANES, sums[0][v]), store(y + NM_PANEL + v * LANES, sums[1][v]);
    next[0] = e, next[1] = f;
}
#endif

/* Add to the sums y [rows][NM_PANEL] the entries of the rows from `first` on that lie in one panel. */
static void csr_rows(const nm_csr *a, int64_t first, int64_t rows, int32_t *next, int32_t limit, const float *panel,
                     float *y) {
    int64_t r = 0;
    const int32_t *last = a->start + first + 1;
#if NM_LEVEL == 2
    for (; r + 2 <= rows; r += 2) csr_two_rows(a, next + r, last + r, limit, panel, y + r * NM_PANEL);
#endif
    for (; r < rows; r++) next[r] = csr_row(a, next[r], last[r], limit, panel, y + r * NM_PANEL);
}

static void csr_task(int64_t begin, int64_t end, void *context) {
    const csr_job *job = context;
    nm_operands *o = job->o;
    int64_t deep = nm_min(o->depth, DEPTH), panels = nm_ceil(o->depth, DEPTH), groups = nm_ceil(o->rows, 16);
    /* With one panel, sums are written in groups of rows; with more, all rows wait for the last panel. */
    int64_t most = panels > 1 ? nm_ceil(groups, job->parts) * 16 : ROWS;
    float *panel = scratch(deep * NM_PANEL + most * NM_PANEL + most), *y = panel + deep * NM_PANEL;
    int32_t *next = (int32_t *)(y + most * NM_PANEL);
    int64_t filled = -1;
    if (!panel) {
        o->failed = NM_NO_MEMORY;
        return;
    }
    for (int64_t item = begin; item < end; item++) {
        int64_t first = item / job->parts * NM_PANEL, part = item % job->parts;
        int64_t count = nm_min(NM_PANEL, o->tokens - first);
        int64_t from = groups * part / job->parts * 16;
        int64_t to = nm_min(groups * (part + 1) / job->parts * 16, o->rows);
        for (int64_t row = from; row < to; row += most) {
            int64_t rows = nm_min(most, to - row);
            begin_sums(o, job->a, row, rows, y, next);
            for (int64_t p = 0; p < panels; p++) {
                int64_t depth = nm_min(DEPTH, o->depth - p * DEPTH);
                if (panels > 1 || filled != first) {
                    if (job->transposed)
                        transposed_panel(panel, o->x, o->dtype, o->depth, first, count, p * DEPTH, depth);
                    else
                        straight_panel(panel, o, first, count, p * DEPTH, depth);
                }
                filled = first;
                int32_t limit = (int32_t)((p * DEPTH + depth) * NM_PANEL);
                csr_rows(job->a, row, rows, next, limit, panel - p * DEPTH * NM_PANEL, y);
            }
            if (job->transposed)
                write_transposed(o, y, row, rows, first, count);
            else
                for (int64_t r = 0; r < rows; r++)
                    write_floats(o->y, o->dtype, (row + r) * o->tokens + first, y + r * NM_PANEL, count);
        }
    }
    free(panel);
}

static void csr_product(nm_operands *o, const nm_csr *a, int transposed) {
    int64_t panels = nm_ceil(o->tokens, NM_PANEL), groups = nm_ceil(o->rows, 16);
    int64_t parts = o->threads > 1 && panels % o->threads ? nm_min(groups, o->threads) : 1;
    csr_job job = {o, a, parts, transposed};
    nm_run(o->parallel, o->threads, panels * parts, csr_task, &job);
}

static void csr_linear(nm_operands *o, const nm_csr *a) { csr_product(o, a, 1); }
static void csr_matmul(nm_operands *o, const nm_csr *a) { csr_product(o, a, 0); }

/* Rows begin * 16 .. end * 16 of the gradient at kept entries; here a panel has tokens as lanes on both sides. */
static void csr_sampled_task(int64_t begin, int64_t end, void *context) {
    const csr_job *job = context;
    nm_operands *o = job->o;
    const nm_csr *a = job->a;
    int64_t first_row = begin * 16, rows = nm_min(end * 16, o->rows) - first_row;
    int32_t base = a->start[first_row], entries = a->start[first_row + rows] - base;
    float *panel = scratch(o->depth * NM_PANEL), *grad = scratch(rows * NM_PANEL), *sums = scratch(entries);
    float *line = scratch(o->depth);
    if (panel && grad && sums && line) {
        memset(sums, 0, (size_t)entries * 4);
        for (int64_t first = 0; first < o->tokens; first += NM_PANEL) {
            int64_t count = nm_min(NM_PANEL, o->tokens - first);
            transposed_panel(panel, o->x, o->dtype, o->depth, first, count, 0, o->depth);
            transposed_panel(grad, o->grad, o->dtype, o->rows, first, count, first_row, rows);
            for (int64_t r = 0; r < rows; r++)
                for (int32_t e = a->start[first_row + r]; e < a->start[first_row + r + 1]; e++) {
                    const float *x = panel + a->offset[e], *d = grad + r * NM_PANEL;
                    vec sum = load(x) * load(d);
                    for (int v = LANES; v < NM_PANEL; v += LANES) sum += load(x + v) * load(d + v);
                    sums[e - base] += total(sum);
                }
        }
        for (int64_t r = 0; r < rows; r++) {
            memset(line, 0, (size_t)o->depth * 4);
            for (int32_t e = a->start[first_row + r]; e < a->start[first_row + r + 1]; e++)
                line[a->offset[e] / NM_PANEL] = sums[e - base];
            write_floats(o->y, o->dtype, (first_row + r) * o->depth, line, o->depth);
        }
    } else {
        o->failed = NM_NO_MEMORY;
    }
    free(panel);
    free(grad);
    free(sums);
    free(line);
}

static void csr_sampled(nm_operands *o, const nm_csr *a) {
    csr_job job = {o, a, 1, 0};
    nm_run(o->parallel, o->threads, nm_ceil(o->rows, 16), csr_sampled_task, &job);
}

const nm_kernels LEVEL(nm) = {
#if NM_LEVEL > 0
    .lanes = LANES,
    .permute_linear = permute_linear,
    .permute_sampled = permute_sampled,
#endif
    .csr_linear = csr_linear,
    .csr_matmul = csr_matmul,
    .csr_sampled = csr_sampled,
};
