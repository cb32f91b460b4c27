/* Masks that keep the n entries of largest score in every block of m, of equal ones the first, a NaN after all numbers: what
 * functional/masks.py defines. Compiled once for each instruction set.
 *
 * Scores become integers of the same order, so that one comparison ranks numbers, zeros of both signs and NaN. An entry's
 * rank is the number of entries of its block that beat it; all pairs of some blocks are compared side by side. */
#include "lanes.h"

enum { TOGETHER = 64 }; /* blocks that are ranked side by side */
enum { UNIT = 64 };     /* of them, a unit of work */
enum { LONGEST = 64 };  /* entries of a block */

/* A floating-point number as a signed integer of the same order: the bits are a sign and a magnitude. NaN has a magnitude
 * above that of infinity, and becomes the lowest integer. */
#define KEY_OF_FLOAT(WORD, KEY, INFINITY_BITS)                                             \
    {                                                                                      \
        WORD sign = (WORD)((WORD)1 << (8 * sizeof(WORD) - 1)), bits;                       \
        memcpy(&bits, (const WORD *)t->scores + at, sizeof bits);                             \
        KEY size = (KEY)(bits & (WORD)~sign);                                              \
        KEY key = !t->magnitude && bits & sign ? (KEY)-size : size;                           \
        return size > (KEY)(INFINITY_BITS) ? (KEY)sign : key;                              \
    }

/* An integer; of the lowest one the magnitude is itself, as torch has it. */
#define KEY_OF_INTEGER(WORD, KEY)                                                          \
    {                                                                                      \
        KEY key = ((const KEY *)t->scores)[at];                                               \
        return t->magnitude && key < 0 ? (KEY)(0 - (WORD)key) : key;                          \
    }

INLINE int32_t key_float32(const nm_top *t, int64_t at) KEY_OF_FLOAT(uint32_t, int32_t, 0x7f800000)
INLINE int16_t key_half(const nm_top *t, int64_t at) KEY_OF_FLOAT(uint16_t, int16_t, t->dtype == NM_FLOAT16 ? 0x7c00 : 0x7f80)
INLINE int64_t key_float64(const nm_top *t, int64_t at) KEY_OF_FLOAT(uint64_t, int64_t, 0x7ff0000000000000)
INLINE int32_t key_int32(const nm_top *t, int64_t at) KEY_OF_INTEGER(uint32_t, int32_t)
INLINE int64_t key_int64(const nm_top *t, int64_t at) KEY_OF_INTEGER(uint64_t, int64_t)

/* Some blocks from `first` on. Those that begin at equal distances have a `step`, which may be a constant, as may m: 0 where
 * blocks lie in several rows of entries. */
#define SOME_BLOCKS(NAME, KEY)                                                                                            \
    INLINE void some_##NAME(const nm_top *t, int64_t first, int64_t count, const int64_t m, const int64_t step) {         \
        KEY keys[LONGEST][TOGETHER], ranks[LONGEST][TOGETHER];                                                            \
        int64_t begins[TOGETHER], inner = t->inner, begin = first / inner * m * inner + first % inner;                    \
        for (int64_t b = 0; b < TOGETHER && !step; b++) {                                                                 \
            int64_t block = first + (b < count ? b : 0); /* what is over repeats the first */                             \
            begins[b] = block / inner * m * inner + block % inner;                                                        \
        }                                                                                                                 \
        for (int64_t k = 0; k < m; k++)                                                                                   \
            for (int64_t b = 0; b < TOGETHER; b++)                                                                        \
                keys[k][b] = key_##NAME(t, (step ? begin + b * step : begins[b]) + k * inner);                            \
        /* As long as no comparison is won, an entry loses to all that follow it. */                                      \
        for (int64_t k = 0; k < m; k++)                                                                                   \
            for (int64_t b = 0; b < TOGETHER; b++) ranks[k][b] = (KEY)(m - 1 - k);                                        \
        for (int64_t i = 0; i < m; i++)                                                                                   \
            for (int64_t j = i + 1; j < m; j++)                                                                           \
                for (int64_t b = 0; b < TOGETHER; b++) {                                                                  \
                    KEY won = keys[i][b] >= keys[j][b];                                                                   \
                    ranks[i][b] = (KEY)(ranks[i][b] - won);                                                               \
                    ranks[j][b] = (KEY)(ranks[j][b] + won);                                                               \
                }                                                                                                         \
        for (int64_t k = 0; k < m; k++)                                                                                   \
            for (int64_t b = 0; b < count; b++)                                                                           \
                t->kept[(step ? begin + b * step : begins[b]) + k * inner] = ranks[k][b] < t->n;                          \
    }                                                                                                                     \
    static void NAME##_task(int64_t begin, int64_t end, void *context) {                                                  \
        const nm_top *t = context;                                                                                        \
        int64_t inner = t->inner, last = nm_min(end * UNIT * TOGETHER, t->blocks);                                        \
        for (int64_t first = begin * UNIT * TOGETHER; first < last; first += TOGETHER) {                                  \
            int64_t count = nm_min(TOGETHER, t->blocks - first);                                                          \
            if (count == TOGETHER && inner >= TOGETHER && first % inner <= inner - TOGETHER)                              \
                some_##NAME(t, first, TOGETHER, t->m, 1);                                                                 \
            else if (count == TOGETHER && inner == 1 && t->m == 2) some_##NAME(t, first, TOGETHER, 2, 2);                 \
            else if (count == TOGETHER && inner == 1 && t->m == 4) some_##NAME(t, first, TOGETHER, 4, 4);                 \
            else if (count == TOGETHER && inner == 1) some_##NAME(t, first, TOGETHER, t->m, t->m);                        \
            else some_##NAME(t, first, count, t->m, 0);                                                                   \
        }                                                                                                                 \
    }

SOME_BLOCKS(float32, int32_t)
SOME_BLOCKS(half, int16_t)
SOME_BLOCKS(float64, int64_t)
SOME_BLOCKS(int32, int32_t)
SOME_BLOCKS(int64, int64_t)

void LEVEL(nm_top)(nm_top *t) {
    static const nm_task tasks[] = {float32_task, half_task, half_task, float64_task, int32_task, int64_task};
    nm_run(t->parallel, t->threads, nm_ceil(t->blocks, UNIT * TOGETHER), tasks[t->dtype], t);
}
