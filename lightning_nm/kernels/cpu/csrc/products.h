/* The products of matrices: how the work is cut, and what is done in which order. kernels.c and bf16.c include this after
 * they have defined, for their elements, what is done with registers:
 *
 *   words, pick, load_words, load_pick, permute, multiply_add       the permute layout
 *   gather_blocks      copies the inputs of some tokens into blocks
 *   write_tile         rounds the sums of a tile
 *   gather_sampled     copies some columns of SAMPLED_TOKENS tokens, as words
 *   block_words, sampled_pick, load_block, load_sampled_pick, permute_block
 *   transposed_panel, straight_panel      fill a panel              the csr layout
 *   csr_rows           adds the entries of some rows in a panel to their sums
 *   inner              multiplies one column of two panels */

/* ----------------------------------------------------------------------------------------- the permute layout */

#if NM_LEVEL > 0
#define SAMPLED_TILES 8

typedef struct {
    nm_operands *o;
    const nm_permute *a;
    int64_t parts;
} permute_job;

/* One tile of rows for `count` tokens, of which `valid` exist. */
INLINE void permute_tile(const int count, int64_t valid, const nm_operands *o, const nm_permute *a, int64_t tile,
                         int64_t first, const element *x) {
    int64_t blocks = nm_ceil(o->depth, BLOCK), row = tile * TILE, rows = nm_min(TILE, o->rows - row);
    const uint8_t *index = a->index + tile * blocks * a->slots * TILE;
    const element *values = (const element *)a->values + tile * blocks * a->slots * TILE;
    float bias[TILE] = {0};
    if (o->bias) read_floats(bias, o->bias, o->dtype, row, rows);
    vec low[TOKENS], high[TOKENS];
    for (int t = 0; t < count; t++) low[t] = load(bias), high[t] = load(bias + LANES);
    for (int64_t b = 0; b < blocks; b++, x += count * BLOCK) {
        words inputs[TOKENS];
        for (int t = 0; t < count; t++) inputs[t] = load_words(x + t * BLOCK);
        for (int64_t s = 0; s < a->slots; s += PER_WORD, index += 2 * BLOCK, values += 2 * BLOCK) {
            pick i = load_pick(index), j = load_pick(index + BLOCK);
            words v = load_words(values), w = load_words(values + BLOCK);
            for (int t = 0; t < count; t++) {
                low[t] = multiply_add(low[t], v, permute(i, inputs[t]));
                high[t] = multiply_add(high[t], w, permute(j, inputs[t]));
            }
        }
    }
    for (int t = 0; t < count && t < valid; t++)
        write_tile(o, (first + t) * o->rows + row, rows, low[t], high[t]);
}

static void permute_linear_task(int64_t begin, int64_t end, void *context) {
    const permute_job *job = context;
    nm_operands *o = job->o;
    int64_t tiles = nm_ceil(o->rows, TILE), filled = -1;
    element *x = (element *)scratch(nm_ceil(o->depth, BLOCK) * TOKENS * LANES);
    if (!x) {
        o->failed = NM_NO_MEMORY;
        return;
    }
    for (int64_t item = begin; item < end; item++) {
        int64_t first = item / job->parts * TOKENS, part = item % job->parts;
        int64_t valid = nm_min(TOKENS, o->tokens - first);
        int64_t count = valid > 4 ? 8 : valid > 2 ? 4 : valid;
        if (filled != first) gather_blocks(x, o, first, valid, count);
        filled = first;
        for (int64_t tile = tiles * part / job->parts; tile < tiles * (part + 1) / job->parts; tile++) {
            if (count == 1)
                permute_tile(1, valid, o, job->a, tile, first, x);
            else if (count == 2)
                permute_tile(2, valid, o, job->a, tile, first, x);
            else if (count == 4 || TOKENS == 4)
                permute_tile(4, valid, o, job->a, tile, first, x);
            else
                permute_tile(TOKENS, valid, o, job->a, tile, first, x);
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

/* A unit is a block and PER_WORD of its slots: sums are [tile][unit][half of the tile][slot][LANES], indices
 * [tile][unit][row][slot]. */
#define UNIT (PER_WORD * TILE)
#define PARTS (2 * PER_WORD) /* registers of sums of a unit */

/* Add to the sums of `units` units of one tile those over SAMPLED_TOKENS tokens. x is [block][SAMPLED_WORDS][BLOCK], grad
 * [SAMPLED_WORDS][TILE]. */
INLINE void sampled_units(const int units, const nm_permute *a, int64_t unit, const uint8_t *index, const word *x,
                          const word *grad, float *sums) {
    sampled_pick picks[UNITS][PARTS];
    vec sum[UNITS][PARTS];
    const word *inputs[UNITS];
    for (int u = 0; u < units; u++) {
        for (int p = 0; p < PARTS; p++) {
            picks[u][p] = load_sampled_pick(index + (unit + u) * UNIT, p);
            sum[u][p] = load(sums + (unit + u) * UNIT + p * LANES);
        }
        inputs[u] = x + (unit + u) / (a->slots / PER_WORD) * SAMPLED_STEP;
    }
    for (int64_t t = 0; t < SAMPLED_WORDS; t++) {
        words d[2] = {load_words(grad + t * TILE), load_words(grad + t * TILE + LANES)};
        for (int u = 0; u < units; u++) {
            block_words block = load_block(inputs[u] + t * BLOCK);
            for (int p = 0; p < PARTS; p++)
                sum[u][p] = multiply_add(sum[u][p], d[p / PER_WORD], permute_block(picks[u][p], block));
        }
    }
    for (int u = 0; u < units; u++)
        for (int p = 0; p < PARTS; p++) store(sums + (unit + u) * UNIT + p * LANES, sum[u][p]);
}

/* Write the rows begin * TILE .. end * TILE of the gradient from their sums. `row` [depth] is room to work in. */
static void write_sampled(const nm_operands *o, const nm_permute *a, int64_t begin, int64_t end, const float *sums,
                          float *row) {
    int64_t units = nm_ceil(o->depth, BLOCK) * (a->slots / PER_WORD);
    for (int64_t r = begin * TILE; r < nm_min(end * TILE, o->rows); r++) {
        const uint8_t *index = a->index + r / TILE * units * UNIT + r % TILE * PER_WORD;
        const float *from = sums + (r / TILE - begin) * units * UNIT + r % TILE / LANES * BLOCK + r % LANES;
        memset(row, 0, (size_t)o->depth * 4);
        for (int64_t u = 0; u < units; u++)
            for (int64_t s = 0; s < PER_WORD; s++) {
                int64_t at = index[u * UNIT + s];
                if (!(at & NM_EMPTY)) row[u / (a->slots / PER_WORD) * BLOCK + at] = from[u * UNIT + s * LANES];
            }
        write_floats(o->y, o->dtype, r * o->depth, row, o->depth);
    }
}

static void permute_sampled_task(int64_t begin, int64_t end, void *context) {
    const permute_job *job = context;
    nm_operands *o = job->o;
    const nm_permute *a = job->a;
    int64_t blocks = nm_ceil(o->depth, BLOCK), units = blocks * (a->slots / PER_WORD), size = units * UNIT;
    word *x = (word *)scratch(blocks * SAMPLED_STEP);
    word *grad = (word *)scratch(SAMPLED_TILES * SAMPLED_WORDS * TILE);
    float *sums = scratch((end - begin) * size), *row = scratch(o->depth);
    if (x && grad && sums && row) {
        memset(sums, 0, (size_t)((end - begin) * size) * 4);
        for (int64_t first = 0; first < o->tokens; first += SAMPLED_TOKENS) {
            gather_sampled(x, SAMPLED_STEP, BLOCK, o, o->x, o->depth, first, 0, o->depth);
            for (int64_t group = begin; group < end; group += SAMPLED_TILES) {
                int64_t tiles = nm_min(SAMPLED_TILES, end - group);
                int64_t rows = nm_min(tiles * TILE, o->rows - group * TILE);
                gather_sampled(grad, SAMPLED_WORDS * TILE, TILE, o, o->grad, o->rows, first, group * TILE, rows);
                for (int64_t unit = 0; unit < units; unit += UNITS) {
                    for (int64_t tile = 0; tile < tiles; tile++) {
                        const uint8_t *index = a->index + (group + tile) * size;
                        float *into = sums + (group + tile - begin) * size;
                        const word *d = grad + tile * SAMPLED_WORDS * TILE;
                        if (unit + UNITS <= units)
                            sampled_units(UNITS, a, unit, index, x, d, into);
                        else
                            for (int64_t u = unit; u < units; u++) sampled_units(1, a, u, index, x, d, into);
                    }
                }
            }
        }
        write_sampled(o, a, begin, end, sums, row);
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

#define DEPTH 1024 /* rows of a panel: as much of it as a second-level cache keeps beside the sums */
#define ROWS 512 /* rows whose sums are written together, so that a token gets whole cache lines */

/* Write the sums y [rows][NM_PANEL] of the rows from `row` on to the tokens first .. first + count of y [tokens, rows]. */
static void write_transposed(nm_operands *o, const float *y, int64_t row, int64_t rows, int64_t first, int64_t count) {
    float block[16 * 16];
    for (int64_t t = 0; t < count; t += 16) {
        int64_t tokens = nm_min(16, count - t);
        for (int64_t r = 0; r < rows; r += 16) {
            int64_t wide = nm_min(16, rows - r), at = (first + t) * o->rows + row + r;
            if (tokens == 16 && wide == 16 && o->dtype == NM_FLOAT32) {
                transpose16(y + r * NM_PANEL + t, NM_PANEL, (float *)o->y + at, o->rows);
                continue;
            }
            transpose16(y + r * NM_PANEL + t, NM_PANEL, block, 16);
            for (int64_t i = 0; i < tokens; i++) {
                if (wide == 16)
                    write_floats(o->y, o->dtype, at + i * o->rows, block + i * 16, 16);
                else
                    write_floats(o->y, o->dtype, at + i * o->rows, block + i * 16, wide);
            }
        }
    }
}

/* The sums begin with the bias. */
static void begin_sums(const nm_operands *o, const nm_csr *a, int64_t row, int64_t rows, float *y, int32_t *next) {
    memcpy(next, a->start + row, (size_t)rows * 4);
    for (int64_t r = 0; r < rows; r++) {
        float bias = 0;
        if (o->bias) read_floats(&bias, o->bias, o->dtype, row + r, 1);
        for (int v = 0; v < NM_PANEL; v += LANES) store(y + r * NM_PANEL + v, fill(bias));
    }
}
typedef struct {
    nm_operands *o;
    const nm_csr *a;
    int64_t parts;
    int transposed;
} csr_job;

static void csr_task(int64_t begin, int64_t end, void *context) {
    const csr_job *job = context;
    nm_operands *o = job->o;
    int64_t deep = nm_min(o->depth, DEPTH), panels = nm_ceil(o->depth, DEPTH), groups = nm_ceil(o->rows, 16);
    /* With one panel, sums are written in groups of rows; with more, all rows wait for the last panel. */
    int64_t most = panels > 1 ? nm_ceil(groups, job->parts) * 16 : ROWS, filled = -1;
    element *panel = (element *)scratch(deep * NM_PANEL / PER_WORD + most * NM_PANEL + most);
    float *y = (float *)(panel + deep * NM_PANEL);
    int32_t *next = (int32_t *)(y + most * NM_PANEL);
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
                        transposed_panel(panel, NM_PANEL, o->x, o->dtype, o->depth, first, count, p * DEPTH, depth);
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
    element *panel = (element *)scratch(o->depth * NM_PANEL), *grad = (element *)scratch(rows * NM_PANEL);
    float *sums = scratch(entries), *line = scratch(o->depth);
    if (panel && grad && sums && line) {
        memset(sums, 0, (size_t)entries * 4);
        for (int64_t first = 0; first < o->tokens; first += WIDE) {
            int64_t count = nm_min(WIDE, o->tokens - first);
            transposed_panel(panel, WIDE, o->x, o->dtype, o->depth, first, count, 0, o->depth);
            transposed_panel(grad, WIDE, o->grad, o->dtype, o->rows, first, count, first_row, rows);
            for (int64_t r = 0; r < rows; r++)
                for (int32_t e = a->start[first_row + r]; e < a->start[first_row + r + 1]; e++)
                    sums[e - base] += inner(panel + (int64_t)a->offset[e] * PER_WORD, grad + r * WIDE);
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
