/* Panels of the csr products and their sums, for one instruction set, see lanes.h. */
#ifndef NM_PANELS_H
#define NM_PANELS_H
#include "lanes.h"

#define DEPTH 1024 /* rows of a panel: as much of it as a second-level cache keeps beside the sums */

typedef struct {
    nm_operands *o;
    const nm_csr *a;
    int64_t parts;
    int transposed;
} csr_job;

/* to [16][into] = the transpose of from [16][ld]. */
#if NM_LEVEL >= 2
INLINE void transpose16(const float *from, int64_t ld, float *to, int64_t into) {
    __m512 r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_ps(from + i * ld);
    for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int h = 0; h < 2; h++) {
            __m512d a = _mm512_castps_pd(t[i + h]), b = _mm512_castps_pd(t[i + 2 + h]);
            r[i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            r[i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    /* r[4 g + c] has in its quarter q column 4 q + c of the rows 4 g .. 4 g + 3 */
    for (int c = 0; c < 4; c++) {
        __m512 a = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
        __m512 d = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88), e = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
        _mm512_storeu_ps(to + c * into, _mm512_shuffle_f32x4(a, d, 0x88));
        _mm512_storeu_ps(to + (8 + c) * into, _mm512_shuffle_f32x4(a, d, 0xdd));
        _mm512_storeu_ps(to + (4 + c) * into, _mm512_shuffle_f32x4(b, e, 0x88));
        _mm512_storeu_ps(to + (12 + c) * into, _mm512_shuffle_f32x4(b, e, 0xdd));
    }
}
#elif NM_LEVEL == 1
INLINE void transpose8(const float *from, int64_t ld, float *to, int64_t into) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(from + i * ld);
    for (int i = 0; i < 8; i += 2) t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int h = 0; h < 2; h++) {
            r[i + 2 * h] = _mm256_shuffle_ps(t[i + h], t[i + 2 + h], 0x44);
            r[i + 2 * h + 1] = _mm256_shuffle_ps(t[i + h], t[i + 2 + h], 0xee);
        }
    for (int c = 0; c < 4; c++) {
        _mm256_storeu_ps(to + c * into, _mm256_permute2f128_ps(r[c], r[4 + c], 0x20));
        _mm256_storeu_ps(to + (4 + c) * into, _mm256_permute2f128_ps(r[c], r[4 + c], 0x31));
    }
}
INLINE void transpose16(const float *from, int64_t ld, float *to, int64_t into) {
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 16; j += 8) transpose8(from + i * ld + j, ld, to + j * into + i, into);
}
#else
INLINE void transpose16(const float *from, int64_t ld, float *to, int64_t into) {
    for (int j = 0; j < 16; j++)
        for (int i = 0; i < 16; i++) to[j * into + i] = from[i * ld + j];
}
#endif

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
#endif
