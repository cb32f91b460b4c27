/* Passes over a weight and its mask, see evolve.c. */
#ifndef NM_EVOLVE_H
#define NM_EVOLVE_H
#include "nm.h"

enum { NM_FLOAT16 = 2 };     /* a third dtype of weights and gradients */
enum { NM_LONGEST = 32 };    /* entries of a block */
enum { NM_BLOCKS = 64 };     /* blocks of a unit of work; a multiple of 8 */
enum { NM_STATES = 4 };      /* tensors of the optimizer's state */

typedef struct {
    nm_parallel parallel; /* as in nm_operands */
    int64_t threads;
    int64_t entries;
    uint8_t *bits;
    void *weight, *grad; /* grad is NULL if there is none */
    int32_t dtype, failed;
    /* Gathering: from the values that were kept to the present ones, which are new tensors; keeping: back. */
    float *old_value, *old_square, *value, *square;
    int32_t whole_value, whole_square; /* keep all entries, not the pruned ones alone */
    float own_ratio;                   /* of V of kept entries, which counts other steps */
    float unit;                        /* old_value is U / unit, a power of two */
    float limit;                       /* what is larger is no evidence */
    float decay, take, correction, epsilon, size;
    double kept_square; /* results */
    int64_t kept;
    /* Blocks of m entries: block (out * taps + tap) * blocks_per_row + column. */
    int64_t blocks, blocks_per_row, taps, n, m, out_stride, tap_stride, in_stride;
    int32_t in_line, unused; /* whether block b begins at entry b * m, and entries follow each other */
    float *gain;
    uint8_t *pruned, *regrown, *chosen, *oscillation;
    uint8_t *exchanged; /* a bit for each entry */
    int64_t states;
    void *state[NM_STATES];
    int32_t state_dtype[NM_STATES], state_is_square[NM_STATES];
    float moment; /* of the optimizer's second moment */
    int64_t budget, better; /* `better` is a result: blocks that gain, or bits that changed */
    /* The backward mask: entries are [rows, columns], and position i holds row order[i]. */
    const int64_t *order;
    int64_t columns;
} nm_evolution;

typedef struct {
    void (*kept_size)(nm_evolution *);
    void (*gather)(nm_evolution *);
    void (*best)(nm_evolution *);
    void (*exchange)(nm_evolution *);
    void (*keep)(nm_evolution *);
    void (*mask)(nm_evolution *);
    void (*decay)(nm_evolution *);
    void (*largest)(nm_evolution *);
    void (*largest_of_columns)(nm_evolution *);
} nm_evolution_passes;

extern const nm_evolution_passes nm_evolve_baseline, nm_evolve_avx2, nm_evolve_avx512;
#endif
