/* What the products of matrices do with registers, for one instruction set, see lanes.h; products.h has the products. Only
 * permutations and transposes are written with intrinsics. */
#include "panels.h"

/* ----------------------------------------------------------------------------------------- the permute layout */

#if NM_LEVEL > 0
typedef vec words; /* of a register */
INLINE words load_words(const float *p) { return load(p); }
INLINE vec multiply_add(vec sum, words a, words b) { return sum + a * b; }

#if NM_LEVEL == 2
#define UNITS 6 /* (block, slot) pairs whose sums permute_sampled holds in registers */
typedef __m512i pick;
INLINE pick load_pick(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE words permute(pick p, words v) { return (words)_mm512_permutexvar_ps(p, (__m512)v); }
#else
#define UNITS 3
typedef __m256i pick;
INLINE pick load_pick(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE words permute(pick p, words v) { return (words)_mm256_permutevar8x32_ps((__m256)v, p); }
#endif

/* Copy `columns` columns, from `column` on, of `count` rows of a matrix [.., ld] from row `first` on into
 * [block][token][wide], of which a block has `step` floats and room for `into` tokens; the others are zero. */
INLINE void gather(float *to, int64_t step, const int64_t wide, const void *matrix, int32_t dtype, int64_t ld,
                   int64_t first, int64_t count, int64_t into, int64_t column, int64_t columns) {
    int64_t blocks = nm_ceil(columns, wide), whole = columns / wide;
    for (int64_t t = 0; t < into; t++) {
        float *row = to + t * wide;
        if (t >= count) {
            for (int64_t b = 0; b < blocks; b++) memset(row + b * step, 0, (size_t)wide * 4);
            continue;
        }
        int64_t at = (first + t) * ld + column;
        for (int64_t b = 0; b < whole; b++) read_floats(row + b * step, matrix, dtype, at + b * wide, wide);
        if (whole < blocks) {
            memset(row + whole * step, 0, (size_t)wide * 4);
            read_floats(row + whole * step, matrix, dtype, at + whole * wide, columns - whole * wide);
        }
    }
}

INLINE void gather_blocks(float *to, const nm_operands *o, int64_t first, int64_t count, int64_t into) {
    gather(to, into * BLOCK, BLOCK, o->x, o->dtype, o->depth, first, count, into, 0, o->depth);
}

INLINE void gather_sampled(float *to, int64_t step, const int64_t wide, const nm_operands *o, const void *matrix,
                           int64_t ld, int64_t first, int64_t column, int64_t columns) {
    int64_t count = nm_min(SAMPLED_TOKENS, o->tokens - first);
    gather(to, step, wide, matrix, o->dtype, ld, first, count, SAMPLED_TOKENS, column, columns);
}

/* Write the sums of one token in a tile, of which `rows` rows exist, to y from entry `at` on. */
INLINE void write_tile(const nm_operands *o, int64_t at, int64_t rows, vec low, vec high) {
    if (o->dtype == NM_FLOAT32 && rows == TILE) {
        store((float *)o->y + at, low);
        store((float *)o->y + at + LANES, high);
    } else {
        float out[TILE];
        store(out, low);
        store(out + LANES, high);
        write_floats(o->y, o->dtype, at, out, rows);
    }
}

/* permute_sampled permutes the words of a block as permute_linear does. */
typedef pick sampled_pick;
typedef words block_words;
INLINE sampled_pick load_sampled_pick(const uint8_t *unit, int part) { return load_pick(unit + part * LANES); }
INLINE block_words load_block(const word *p) { return load(p); }
INLINE words permute_block(sampled_pick p, block_words v) { return permute(p, v); }
#endif

/* --------------------------------------------------------------------------------------------- the csr layout */

/* panel [columns][lanes] = the transpose of the rows first .. first + count of a matrix [.., ld], its columns from
 * `column` on; zeros where there is no row. */
static void transposed_panel(float *panel, const int64_t lanes, const void *matrix, int32_t dtype, int64_t ld,
                             int64_t first, int64_t count, int64_t column, int64_t columns) {
    float block[16 * 16];
    for (int64_t t = 0; t < lanes; t += 16) {
        int64_t rows = nm_min(16, count - t);
        for (int64_t k = 0; k < columns; k += 16) {
            int64_t wide = nm_min(16, columns - k), at = (first + t) * ld + column + k;
            if (rows == 16 && wide == 16 && dtype == NM_FLOAT32) {
                transpose16((const float *)matrix + at, ld, panel + k * lanes + t, lanes);
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
                transpose16(block, 16, panel + k * lanes + t, lanes);
            } else {
                for (int64_t j = 0; j < wide; j++)
                    for (int64_t i = 0; i < 16; i++) panel[(k + j) * lanes + t + i] = block[i * 16 + j];
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

/* The product of one column of both panels. */
INLINE float inner(const float *x, const float *grad) {
    vec sum = load(x) * load(grad);
    for (int v = LANES; v < NM_PANEL; v += LANES) sum += load(x + v) * load(grad + v);
    return total(sum);
}

#include "products.h"
