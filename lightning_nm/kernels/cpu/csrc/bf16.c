/* The products of bfloat16 matrices on CPUs with AVX512_BF16, whose vdpbf16ps multiplies two pairs of bfloat16 values and
 * adds both products to a sum in float32. What is a pair:
 *
 *   permute_linear           two nonzeros of a row in one block of 32 inputs, see the paired layout in nm.h
 *   permute_sampled          two tokens: a permutation picks the same input of both
 *   csr_linear, csr_matmul   two entries of a row
 *   csr_sampled              two tokens
 *
 * The instruction takes denormal numbers as zeros. Nothing is multiplied with an input that the mask prunes: where a pair
 * has one half alone, the other one is zero on both sides. */
#include "panels.h"

#define BLOCK (2 * LANES) /* inputs that a register holds */
#define TILE (2 * LANES)

typedef __m512i pairs; /* of bfloat16, one for each lane */

INLINE pairs load_pairs(const void *p) { return _mm512_loadu_si512(p); }
INLINE void store_pairs(void *p, pairs v) { _mm512_storeu_si512(p, v); }
INLINE __m512 multiply(__m512 sum, pairs a, pairs b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

/* The first `count` of `size` bits. */
INLINE uint32_t first_bits(int64_t count, int64_t size) {
    return count <= 0 ? 0 : (uint32_t)(((uint64_t)1 << nm_min(count, size)) - 1);
}

/* 16 values of one row beside those of the next, of which the first `rows` exist, each with `columns` values. */
INLINE pairs beside(const uint16_t *row, int64_t ld, int64_t rows, int64_t columns) {
    __mmask16 wide = (__mmask16)first_bits(columns, 16);
    pairs a = _mm512_setzero_si512(), b = a;
    if (rows > 0) a = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(wide, row));
    if (rows > 1) b = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(wide, row + ld));
    return _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
}

/* ----------------------------------------------------------------------------------------- the permute layout */

#define TOKENS 8
#define UNITS 3 /* pairs of slots whose sums permute_sampled holds in registers */
#define SAMPLED_PAIRS 32 /* of tokens */
#define SAMPLED_STEP ((SAMPLED_PAIRS + 1) * BLOCK) /* not a power of two, which one set of a cache would hold */
#define SAMPLED_TILES 8

typedef struct {
    nm_operands *o;
    const nm_permute *a;
    int64_t parts;
} permute_job;

/* Copy `count` rows of x from row `first` into [block][into][BLOCK]; what is beyond them is zero. */
static void gather_blocks(uint16_t *to, const nm_operands *o, int64_t first, int64_t count, int64_t into) {
    int64_t blocks = nm_ceil(o->depth, BLOCK);
    for (int64_t t = 0; t < into; t++) {
        const uint16_t *row = (const uint16_t *)o->x + (first + nm_min(t, count - 1)) * o->depth;
        for (int64_t b = 0; b < blocks; b++) {
            __mmask32 valid = first_bits(t < count ? o->depth - b * BLOCK : 0, BLOCK);
            store_pairs(to + (b * into + t) * BLOCK, _mm512_maskz_loadu_epi16(valid, row + b * BLOCK));
        }
    }
}

/* Sixteen pairs of indices, and which of them are not empty. */
typedef struct {
    pairs at;
    __mmask32 kept;
} pick;

INLINE pick load_pick(const uint8_t *index) {
    __m256i bytes = _mm256_loadu_si256((const __m256i *)index);
    return (pick){_mm512_cvtepu8_epi16(bytes), ~_mm256_movepi8_mask(bytes)};
}

INLINE pairs permute(pick p, pairs inputs) { return _mm512_maskz_permutexvar_epi16(p.kept, p.at, inputs); }

/* One tile of rows for `count` tokens, of which `valid` exist. */
INLINE void permute_tile(const int count, int64_t valid, const nm_operands *o, const nm_permute *a, int64_t tile,
                         int64_t first, const uint16_t *x) {
    int64_t blocks = nm_ceil(o->depth, BLOCK), row = tile * TILE, rows = nm_min(TILE, o->rows - row);
    const uint8_t *index = a->index + tile * blocks * a->slots * TILE;
    const uint16_t *values = (const uint16_t *)a->values + tile * blocks * a->slots * TILE;
    float bias[TILE] = {0};
    if (o->bias) read_floats(bias, o->bias, NM_BFLOAT16, row, rows);
    __m512 low[TOKENS], high[TOKENS];
    for (int t = 0; t < count; t++) low[t] = _mm512_loadu_ps(bias), high[t] = _mm512_loadu_ps(bias + LANES);
    for (int64_t b = 0; b < blocks; b++, x += count * BLOCK) {
        pairs inputs[TOKENS];
        for (int t = 0; t < count; t++) inputs[t] = load_pairs(x + t * BLOCK);
        for (int64_t s = 0; s < a->slots; s += 2, index += 2 * TILE, values += 2 * TILE) {
            pick i = load_pick(index), j = load_pick(index + TILE);
            pairs v = load_pairs(values), w = load_pairs(values + TILE);
            for (int t = 0; t < count; t++) {
                low[t] = multiply(low[t], v, permute(i, inputs[t]));
                high[t] = multiply(high[t], w, permute(j, inputs[t]));
            }
        }
    }
    for (int t = 0; t < count && t < valid; t++) {
        uint16_t *y = (uint16_t *)o->y + (first + t) * o->rows + row;
        _mm512_mask_storeu_epi16(y, first_bits(rows, TILE), (__m512i)_mm512_cvtne2ps_pbh(high[t], low[t]));
    }
}

static void permute_linear_task(int64_t begin, int64_t end, void *context) {
    const permute_job *job = context;
    nm_operands *o = job->o;
    int64_t tiles = nm_ceil(o->rows, TILE), filled = -1;
    uint16_t *x = (uint16_t *)scratch(nm_ceil(o->depth, BLOCK) * TOKENS * LANES);
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
            else if (count == 4)
                permute_tile(4, valid, o, job->a, tile, first, x);
            else
                permute_tile(8, valid, o, job->a, tile, first, x);
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

/* Add to the sums of `units` (block, pair of slots) of one tile those over one group of tokens. x is
 * [block][pair of tokens][BLOCK], grad [pair of tokens][TILE], both of pairs; sums are [unit][half of the tile][2][LANES].
 */
INLINE void sampled_units(const int units, const nm_permute *a, int64_t unit, const uint8_t *index, const uint32_t *x,
                          const uint32_t *grad, float *sums) {
    pairs i[UNITS][4];
    __m512 sum[UNITS][4];
    const uint32_t *inputs[UNITS];
    for (int u = 0; u < units; u++) {
        for (int q = 0; q < 4; q++) { /* the permutation reads the lowest 5 bits */
            const __m256i *both = (const __m256i *)(index + (unit + u) * 2 * TILE + q / 2 * TILE);
            i[u][q] = _mm512_srli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(both)), q % 2 * 8);
            sum[u][q] = _mm512_loadu_ps(sums + (unit + u) * 2 * TILE + q * LANES);
        }
        inputs[u] = x + (unit + u) / (a->slots / 2) * SAMPLED_STEP;
    }
    for (int64_t t = 0; t < SAMPLED_PAIRS; t++) {
        pairs d[2] = {load_pairs(grad + t * TILE), load_pairs(grad + t * TILE + LANES)};
        for (int u = 0; u < units; u++) {
            pairs low = load_pairs(inputs[u] + t * BLOCK), high = load_pairs(inputs[u] + t * BLOCK + LANES);
            for (int q = 0; q < 4; q++)
                sum[u][q] = multiply(sum[u][q], d[q / 2], _mm512_permutex2var_epi32(low, i[u][q], high));
        }
    }
    for (int u = 0; u < units; u++)
        for (int q = 0; q < 4; q++) _mm512_storeu_ps(sums + (unit + u) * 2 * TILE + q * LANES, sum[u][q]);
}

/* Write the rows begin * TILE .. end * TILE of the gradient from their sums. `row` [depth] is room to work in. */
static void write_sampled(const nm_operands *o, const nm_permute *a, int64_t begin, int64_t end, const float *sums,
                          float *row) {
    int64_t units = nm_ceil(o->depth, BLOCK) * (a->slots / 2);
    for (int64_t r = begin * TILE; r < nm_min(end * TILE, o->rows); r++) {
        const uint8_t *index = a->index + r / TILE * units * 2 * TILE + r % TILE * 2;
        const float *from = sums + (r / TILE - begin) * units * 2 * TILE + r % TILE / LANES * TILE + r % LANES;
        memset(row, 0, (size_t)o->depth * 4);
        for (int64_t u = 0; u < units; u++)
            for (int64_t s = 0; s < 2; s++) {
                int64_t at = index[u * 2 * TILE + s];
                if (!(at & NM_EMPTY)) row[u / (a->slots / 2) * BLOCK + at] = from[u * 2 * TILE + s * LANES];
            }
        write_floats(o->y, NM_BFLOAT16, r * o->depth, row, o->depth);
    }
}

/* Copy `columns` columns of the tokens first .. first + 2 * SAMPLED_PAIRS of a matrix [tokens, ld] into rows of pairs of
 * tokens, BLOCK columns at a time, each of `step` pairs; what is beyond the matrix is zero. */
static void gather_pairs(uint32_t *to, int64_t step, const void *matrix, int64_t ld, int64_t first, int64_t tokens,
                         int64_t column, int64_t columns) {
    for (int64_t t = 0; t < SAMPLED_PAIRS; t++) {
        const uint16_t *row = (const uint16_t *)matrix + (first + 2 * t) * ld + column;
        for (int64_t c = 0; c < columns; c += LANES)
            store_pairs(to + c / BLOCK * step + t * BLOCK + c % BLOCK,
                        beside(row + c, ld, tokens - first - 2 * t, nm_min(columns, ld - column) - c));
    }
}

static void permute_sampled_task(int64_t begin, int64_t end, void *context) {
    const permute_job *job = context;
    nm_operands *o = job->o;
    const nm_permute *a = job->a;
    int64_t blocks = nm_ceil(o->depth, BLOCK), units = blocks * (a->slots / 2), size = units * 2 * TILE;
    uint32_t *x = (uint32_t *)scratch(blocks * SAMPLED_STEP);
    uint32_t *grad = (uint32_t *)scratch(SAMPLED_TILES * SAMPLED_PAIRS * TILE);
    float *sums = scratch((end - begin) * size), *row = scratch(o->depth);
    if (x && grad && sums && row) {
        memset(sums, 0, (size_t)((end - begin) * size) * 4);
        for (int64_t first = 0; first < o->tokens; first += 2 * SAMPLED_PAIRS) {
            gather_pairs(x, SAMPLED_STEP, o->x, o->depth, first, o->tokens, 0, blocks * BLOCK);
            for (int64_t group = begin; group < end; group += SAMPLED_TILES) {
                int64_t tiles = nm_min(SAMPLED_TILES, end - group);
                gather_pairs(grad, SAMPLED_PAIRS * TILE, o->grad, o->rows, first, o->tokens, group * TILE, tiles * TILE);
                for (int64_t unit = 0; unit < units; unit += UNITS) {
                    for (int64_t tile = 0; tile < tiles; tile++) {
                        const uint8_t *index = a->index + (group + tile) * size;
                        float *into = sums + (group + tile - begin) * size;
                        const uint32_t *d = grad + tile * SAMPLED_PAIRS * TILE;
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

/* --------------------------------------------------------------------------------------------- the csr layout */

#define WIDE (2 * NM_PANEL) /* tokens of a panel of csr_sampled: of both panels as many bytes as in float32 */

/* Panels have their tokens in groups of 32, each in the order of quarters 0 4 1 5 2 6 3 7 of 4 tokens: so the low and the
 * high words of two columns, interleaved in every 128 bits, are 16 consecutive tokens each. */
INLINE int64_t token_of(int64_t pair) { return 16 * (pair >> 1 & 1) + 4 * (pair >> 2) + 2 * (pair & 1); }

/* panel [columns][lanes] = the transpose of the rows first .. first + count of a matrix [.., ld], its columns from
 * `column` on; zeros where there is no row. */
static void transposed_panel(uint16_t *panel, int64_t lanes, const void *matrix, int64_t ld, int64_t first,
                             int64_t count, int64_t column, int64_t columns) {
    float block[16 * 16], turned[16 * 16]; /* of pairs of tokens */
    for (int64_t t = 0; t < lanes; t += 32) {
        for (int64_t k = 0; k < columns; k += 16) {
            float *to = (float *)(panel + k * lanes + t);
            int whole = columns - k >= 16;
            for (int64_t i = 0; i < 16; i++) {
                int64_t token = t + token_of(i);
                const uint16_t *row = (const uint16_t *)matrix + (first + nm_min(token, count)) * ld + column + k;
                store_pairs(block + i * 16, beside(row, ld, count - token, columns - k));
            }
            transpose16(block, 16, whole ? to : turned, whole ? lanes / 2 : 16);
            for (int64_t c = 0; c < columns - k && !whole; c++) memcpy(to + c * lanes / 2, turned + c * 16, 64);
        }
    }
}

/* panel [depth][NM_PANEL] = the columns first .. first + count of x [.., tokens], `depth` rows from row `from` on. */
static void straight_panel(uint16_t *panel, const nm_operands *o, int64_t first, int64_t count, int64_t from,
                           int64_t depth) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t k = 0; k < depth; k++) {
        const uint16_t *row = (const uint16_t *)o->x + (from + k) * o->tokens + first;
        for (int64_t t = 0; t < NM_PANEL; t += 32) {
            pairs tokens = _mm512_setzero_si512();
            if (t < count) tokens = _mm512_maskz_loadu_epi16(first_bits(count - t, 32), row + t);
            store_pairs(panel + k * NM_PANEL + t, _mm512_permutexvar_epi64(order, tokens));
        }
    }
}

/* Add to the sums of NM_PANEL tokens `count` entries of a row, one or two. `panel` is that of offset 0. */
INLINE void add_entries(const int count, __m512 *sums, const nm_csr *a, int32_t entry, const uint16_t *panel) {
    const uint16_t *x = panel + a->offset[entry], *z = panel + a->offset[entry + count - 1];
    pairs weights; /* the upper halves of one or two floats */
    if (count == 2) {
        int64_t two;
        memcpy(&two, a->values + entry, 8);
        weights = _mm512_shuffle_epi8(_mm512_set1_epi64(two), _mm512_set1_epi32(0x07060302));
    } else {
        weights = _mm512_srli_epi32(_mm512_castps_si512(_mm512_set1_ps(a->values[entry])), 16);
    }
    for (int h = 0; h < 2; h++) {
        pairs v = load_pairs(x + h * 32), w = count == 2 ? load_pairs(z + h * 32) : _mm512_setzero_si512();
        sums[2 * h] = multiply(sums[2 * h], weights, _mm512_unpacklo_epi16(v, w));
        sums[2 * h + 1] = multiply(sums[2 * h + 1], weights, _mm512_unpackhi_epi16(v, w));
    }
}

/* Whether a row has `count` more entries in the panel. */
INLINE int has(const nm_csr *a, int32_t next, int32_t count, int32_t last, int32_t limit) {
    return next + count <= last && a->offset[next + count - 1] < limit;
}

/* Add to the sums of a row its entries from `next` on whose offset is below `limit`; return the entry after them. */
INLINE int32_t csr_row(__m512 *sums, const nm_csr *a, int32_t next, int32_t last, int32_t limit, const uint16_t *panel) {
    for (; has(a, next, 2, last, limit); next += 2) add_entries(2, sums, a, next, panel);
    if (has(a, next, 1, last, limit)) add_entries(1, sums, a, next++, panel);
    return next;
}

INLINE void load_sums(__m512 *sums, const float *y) {
    for (int v = 0; v < 4; v++) sums[v] = _mm512_loadu_ps(y + v * LANES);
}

INLINE void store_sums(float *y, const __m512 *sums) {
    for (int v = 0; v < 4; v++) _mm512_storeu_ps(y + v * LANES, sums[v]);
}

/* Add to the sums y [rows][NM_PANEL] the entries of the rows from `first` on that lie in one panel. Two rows at a time
 * because four sums alone would wait for each other. */
static void csr_rows(const nm_csr *a, int64_t first, int64_t rows, int32_t *next, int32_t limit, const uint16_t *panel,
                     float *y) {
    const int32_t *last = a->start + first + 1;
    __m512 one[4], two[4];
    for (; rows >= 2; rows -= 2, next += 2, last += 2, y += 2 * NM_PANEL) {
        int32_t e = next[0], f = next[1];
        load_sums(one, y), load_sums(two, y + NM_PANEL);
        for (; has(a, e, 2, last[0], limit) && has(a, f, 2, last[1], limit); e += 2, f += 2) {
            add_entries(2, one, a, e, panel);
            add_entries(2, two, a, f, panel);
        }
        next[0] = csr_row(one, a, e, last[0], limit, panel);
        next[1] = csr_row(two, a, f, last[1], limit, panel);
        store_sums(y, one), store_sums(y + NM_PANEL, two);
    }
    if (rows) {
        load_sums(one, y);
        next[0] = csr_row(one, a, next[0], last[0], limit, panel);
        store_sums(y, one);
    }
}

static void csr_task(int64_t begin, int64_t end, void *context) {
    const csr_job *job = context;
    nm_operands *o = job->o;
    int64_t deep = nm_min(o->depth, DEPTH), panels = nm_ceil(o->depth, DEPTH), groups = nm_ceil(o->rows, 16);
    /* With one panel, sums are written in groups of rows; with more, all rows wait for the last panel. */
    int64_t most = panels > 1 ? nm_ceil(groups, job->parts) * 16 : ROWS, filled = -1;
    float *y = scratch(most * NM_PANEL + most + deep * NM_PANEL / 2);
    int32_t *next = (int32_t *)(y + most * NM_PANEL);
    uint16_t *panel = (uint16_t *)(next + most);
    if (!y) {
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
                        transposed_panel(panel, NM_PANEL, o->x, o->depth, first, count, p * DEPTH, depth);
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
                    write_floats(o->y, NM_BFLOAT16, (row + r) * o->tokens + first, y + r * NM_PANEL, count);
        }
    }
    free(y);
}

static void csr_product(nm_operands *o, const nm_csr *a, int transposed) {
    int64_t panels = nm_ceil(o->tokens, NM_PANEL), groups = nm_ceil(o->rows, 16);
    int64_t parts = o->threads > 1 && panels % o->threads ? nm_min(groups, o->threads) : 1;
    csr_job job = {o, a, parts, transposed};
    nm_run(o->parallel, o->threads, panels * parts, csr_task, &job);
}

static void csr_linear(nm_operands *o, const nm_csr *a) { csr_product(o, a, 1); }
static void csr_matmul(nm_operands *o, const nm_csr *a) { csr_product(o, a, 0); }

/* The product of one column of both panels. */
INLINE float inner(const uint16_t *x, const uint16_t *grad) {
    __m512 even = _mm512_setzero_ps(), odd = even;
    for (int v = 0; v < WIDE; v += 64) {
        even = multiply(even, load_pairs(x + v), load_pairs(grad + v));
        odd = multiply(odd, load_pairs(x + v + 32), load_pairs(grad + v + 32));
    }
    return _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
}

/* Rows begin * 16 .. end * 16 of the gradient at kept entries; here a panel has tokens as lanes on both sides. */
static void csr_sampled_task(int64_t begin, int64_t end, void *context) {
    const csr_job *job = context;
    nm_operands *o = job->o;
    const nm_csr *a = job->a;
    int64_t first_row = begin * 16, rows = nm_min(end * 16, o->rows) - first_row;
    int32_t base = a->start[first_row], entries = a->start[first_row + rows] - base;
    uint16_t *panel = (uint16_t *)scratch(o->depth * WIDE / 2), *grad = (uint16_t *)scratch(rows * WIDE / 2);
    float *sums = scratch(entries), *line = scratch(o->depth);
    if (panel && grad && sums && line) {
        memset(sums, 0, (size_t)entries * 4);
        for (int64_t first = 0; first < o->tokens; first += WIDE) {
            int64_t count = nm_min(WIDE, o->tokens - first);
            transposed_panel(panel, WIDE, o->x, o->depth, first, count, 0, o->depth);
            transposed_panel(grad, WIDE, o->grad, o->rows, first, count, first_row, rows);
            for (int64_t r = 0; r < rows; r++)
                for (int32_t e = a->start[first_row + r]; e < a->start[first_row + r + 1]; e++)
                    sums[e - base] += inner(panel + (int64_t)a->offset[e] * (WIDE / NM_PANEL), grad + r * WIDE);
        }
        for (int64_t r = 0; r < rows; r++) {
            memset(line, 0, (size_t)o->depth * 4);
            for (int32_t e = a->start[first_row + r]; e < a->start[first_row + r + 1]; e++)
                line[a->offset[e] / NM_PANEL] = sums[e - base];
            write_floats(o->y, NM_BFLOAT16, (first_row + r) * o->depth, line, o->depth);
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
    .lanes = LANES,
    .permute_linear = permute_linear,
    .permute_sampled = permute_sampled,
    .csr_linear = csr_linear,
    .csr_matmul = csr_matmul,
    .csr_sampled = csr_sampled,
};
