/* Blocks of m entries, and the n of each that are stored: positions are bytes [blocks, n], values [blocks, n]. */
#include <string.h>

#include "shared.h"

enum { BLOCKS = 4096 }; /* of a unit of work */

typedef struct {
    const uint8_t *positions;
    int64_t blocks, n, m;
    char *values, *dense; /* dense is [blocks, m] */
} packed_job;

#define EACH_BLOCK(job, begin, end, TYPE, BODY)                                              \
    do {                                                                                     \
        int64_t n = (job)->n, m = (job)->m, last = nm_min((end) * BLOCKS, (job)->blocks);    \
        for (int64_t block = (begin) * BLOCKS; block < last; block++) {                      \
            const uint8_t *at = (job)->positions + block * n;                                \
            TYPE *values = (TYPE *)(job)->values + block * n;                                \
            TYPE *dense = (TYPE *)(job)->dense + block * m;                                  \
            BODY                                                                             \
        }                                                                                    \
    } while (0)

#define SPREAD memset(dense, 0, (size_t)m * sizeof *dense); for (int64_t k = 0; k < n; k++) dense[at[k]] = values[k];
#define COLLECT for (int64_t k = 0; k < n; k++) values[k] = dense[at[k]];

#define TASKS(TYPE)                                                                          \
    static void spread_##TYPE(int64_t begin, int64_t end, void *context) {                   \
        EACH_BLOCK((const packed_job *)context, begin, end, TYPE, SPREAD);                   \
    }                                                                                        \
    static void collect_##TYPE(int64_t begin, int64_t end, void *context) {                  \
        EACH_BLOCK((const packed_job *)context, begin, end, TYPE, COLLECT);                  \
    }

TASKS(uint8_t)
TASKS(uint16_t)
TASKS(uint32_t)
TASKS(uint64_t)

/* Entries are moved as bits of 1, 2, 4 or 8 bytes. */
static nm_task task_of(int32_t spreads, int64_t bytes) {
    if (bytes == 1) return spreads ? spread_uint8_t : collect_uint8_t;
    if (bytes == 2) return spreads ? spread_uint16_t : collect_uint16_t;
    if (bytes == 4) return spreads ? spread_uint32_t : collect_uint32_t;
    return spreads ? spread_uint64_t : collect_uint64_t;
}

/* Write `dense` from `values`, zero where nothing is stored, if it spreads; else `values` from `dense`. */
void nm_packed_move(nm_parallel parallel, int64_t threads, int32_t spreads, int64_t bytes, const uint8_t *positions,
                    int64_t blocks, int64_t n, int64_t m, void *values, void *dense) {
    packed_job job = {positions, blocks, n, m, values, dense};
    nm_run(parallel, threads, nm_ceil(blocks, BLOCKS), task_of(spreads, bytes), &job);
}
