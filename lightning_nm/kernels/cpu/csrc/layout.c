/* Layouts from masks, and the values of a layout from a weight.
 *
 * A mask is one bit of the bytes bits[r * row_stride + d * depth_stride], r < rows, d < depth, one of the strides 1. The
 * weight has the same strides. `order`, if it is not NULL, has the position in memory for every d. */
#include <string.h>

#include "shared.h"

static inline int64_t place(const nm_mask *m, int64_t depth) { return m->order ? m->order[depth] : depth; }

/* A word of eight bytes, of each only the lowest bit, set where the mask is. */
static inline uint64_t eight(const nm_mask *m, const uint8_t *bytes, int64_t left) {
    uint64_t word = 0;
    if (left >= 8)
        memcpy(&word, bytes, 8);
    else
        memcpy(&word, bytes, (size_t)left);
    return word >> m->bit & 0x0101010101010101u;
}

/* For each set bit of `line`: `at` is its position. */
#define EACH_SET(mask, line, size, at)                                                  \
    for (int64_t base_ = 0; base_ < (size); base_ += 8)                                 \
        for (uint64_t word_ = eight(mask, (line) + base_, (size) - base_); word_; word_ &= word_ - 1) \
            for (int64_t at = base_ + (__builtin_ctzll(word_) >> 3), once_ = 1; once_; once_ = 0)

typedef struct {
    const nm_mask *mask;
    int64_t lanes, slots;
    int32_t paired;
    uint8_t *index;
    int32_t crowded;
    void *values;
} permute_job;

/* Functions that take `paired`, 0 or 1, as a constant: the compiler makes one for each. */
#define INLINE static inline __attribute__((always_inline))

/* Where in a block a slot of a row is. */
INLINE int64_t slot_at(int64_t slot, int64_t row, int64_t tile, int32_t paired) {
    return (slot >> paired) * (tile << paired) + (row << paired) + (slot & paired);
}

/* The rows of the tiles begin .. end. */
INLINE void permute_layout_of(permute_job *job, int64_t begin, int64_t end, const int32_t paired) {
    const nm_mask *m = job->mask;
    int64_t size = job->lanes << paired, slots = job->slots, tile = 2 * job->lanes, blocks = nm_ceil(m->depth, size);
    int64_t unit = slots * tile, first = begin * tile, rows = nm_min(end * tile, m->rows) - first;
    uint8_t *index = job->index + begin * blocks * unit;
    memset(index, NM_EMPTY, (size_t)((end - begin) * blocks * unit));
    if (m->depth_stride == 1 && !m->order) {
        for (int64_t r = 0; r < rows; r++) {
            uint8_t *at_row = index + r / tile * blocks * unit + slot_at(0, r % tile, tile, paired);
            const uint8_t *line = m->bits + (first + r) * m->row_stride;
            int64_t block = -1, slot = 0;
            EACH_SET(m, line, m->depth, d) {
                slot = d / size == block ? slot + 1 : 0;
                block = d / size;
                if (slot == slots) {
                    job->crowded = 1;
                    return;
                }
                at_row[block * unit + slot_at(slot, 0, tile, paired)] = (uint8_t)(d % size);
            }
        }
        return;
    }
    for (int64_t d = 0; d < m->depth; d++) {
        const uint8_t *line = m->bits + place(m, d) * m->depth_stride + first;
        EACH_SET(m, line, rows, r) {
            uint8_t *at = index + (r / tile * blocks + d / size) * unit + slot_at(0, r % tile, tile, paired);
            int64_t slot = 0;
            while (slot < slots && at[slot_at(slot, 0, tile, paired)] != NM_EMPTY) slot++;
            if (slot == slots) {
                job->crowded = 1;
                return;
            }
            at[slot_at(slot, 0, tile, paired)] = (uint8_t)(d % size);
        }
    }
}

static void permute_layout_task(int64_t begin, int64_t end, void *context) {
    permute_job *job = context;
    if (job->paired)
        permute_layout_of(job, begin, end, 1);
    else
        permute_layout_of(job, begin, end, 0);
}

/* Write the index of a permute layout for tiles of 2 * lanes rows, `slots`, and blocks of `lanes` or, if it is paired,
 * of 2 * lanes.
 * Returns 0, or -1 where a block has more nonzeros than slots. */
int32_t nm_permute_layout(const nm_mask *m, int64_t lanes, int64_t slots, int32_t paired, uint8_t *index) {
    if (m->depth_stride != 1 && m->row_stride != 1) return -2;
    permute_job job = {.mask = m, .lanes = lanes, .slots = slots, .paired = paired, .index = index};
    nm_run(m->parallel, m->threads, nm_ceil(m->rows, 2 * lanes), permute_layout_task, &job);
    return job.crowded ? -1 : 0;
}

/* Whether an index may be read by the kernels: every entry is empty or within its block. */
int32_t nm_permute_valid(const uint8_t *index, int64_t size, int64_t block) {
    uint8_t wrong = 0;
    for (int64_t i = 0; i < size; i++) wrong |= index[i] != NM_EMPTY && index[i] >= block;
    return !wrong;
}

static inline float read_value(const nm_mask *m, int64_t at) {
    if (m->dtype == NM_FLOAT32) return ((const float *)m->weight)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)m->weight)[at] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* To nearest even in bfloat16, as a cast of the weight rounds; NaN stays NaN. */
static inline float rounded(float value, int32_t round) {
    if (!round || value != value) return value;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE void put_value(void *values, int64_t at, float value, int32_t paired) {
    if (!paired) {
        ((float *)values)[at] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, 4);
    ((uint16_t *)values)[at] = (uint16_t)(bits >> 16 | (value != value ? 0x40 : 0));
}

INLINE void permute_values_of(const permute_job *job, int64_t begin, int64_t end, const int32_t paired) {
    const nm_mask *m = job->mask;
    int64_t size = job->lanes << paired, slots = job->slots, tile = 2 * job->lanes, blocks = nm_ceil(m->depth, size);
    for (int64_t t = begin; t < end; t++) {
        int64_t rows = nm_min(tile, m->rows - t * tile), whole = blocks * slots * tile;
        const uint8_t *from = job->index + t * whole;
        char *to = (char *)job->values + t * whole * (paired ? 2 : 4);
        if (rows < tile) memset(to, 0, (size_t)(whole * (paired ? 2 : 4)));
        if (m->row_stride == 1) {
            for (int64_t u = 0; u < blocks * slots; u++)
                for (int64_t r = 0; r < rows; r++) {
                    int64_t i = from[slot_at(u, r, tile, paired)];
                    int64_t at = i & NM_EMPTY ? 0 : place(m, u / slots * size + i) * m->depth_stride + t * tile + r;
                    float value = i & NM_EMPTY ? 0 : read_value(m, at);
                    put_value(to, slot_at(u, r, tile, paired), rounded(value, m->round || paired), paired);
                }
        } else {
            for (int64_t r = 0; r < rows; r++) {
                int64_t row = (t * tile + r) * m->row_stride;
                for (int64_t b = 0; b < blocks; b++)
                    for (int64_t s = 0; s < slots; s++) {
                        int64_t u = slot_at(b * slots + s, r, tile, paired), i = from[u];
                        int64_t at = i & NM_EMPTY ? 0 : row + place(m, b * size + i) * m->depth_stride;
                        float value = i & NM_EMPTY ? 0 : read_value(m, at);
                        put_value(to, u, rounded(value, m->round || paired), paired);
                    }
            }
        }
    }
}

static void permute_values_task(int64_t begin, int64_t end, void *context) {
    const permute_job *job = context;
    if (job->paired)
        permute_values_of(job, begin, end, 1);
    else
        permute_values_of(job, begin, end, 0);
}

/* The values of a permute layout; those of a paired one are rounded to bfloat16. */
void nm_permute_values(const nm_mask *m, int64_t lanes, int64_t slots, int32_t paired, const uint8_t *index,
                       void *values) {
    permute_job job = {m, lanes, slots, paired, (uint8_t *)index, 0, values};
    nm_run(m->parallel, m->threads, nm_ceil(m->rows, 2 * lanes), permute_values_task, &job);
}

typedef struct {
    const nm_mask *mask;
    int32_t *start, *next, *offset, *source, *slot;
} csr_job;

enum { BAND = 256 }; /* rows of a csr layout that one task takes: whole cache lines of a transposed mask */

static void csr_count_task(int64_t begin, int64_t end, void *context) {
    const csr_job *job = context;
    const nm_mask *m = job->mask;
    int64_t first = begin * BAND, rows = nm_min(end * BAND, m->rows) - first;
    int32_t *count = job->start + 1 + first;
    memset(count, 0, (size_t)rows * 4);
    if (m->row_stride == 1) {
        for (int64_t d = 0; d < m->depth; d++) {
            const uint8_t *line = m->bits + d * m->depth_stride + first;
            EACH_SET(m, line, rows, r) count[r]++;
        }
    } else {
        for (int64_t r = 0; r < rows; r++) {
            const uint8_t *line = m->bits + (first + r) * m->row_stride;
            for (int64_t d = 0; d < m->depth; d += 8) count[r] += __builtin_popcountll(eight(m, line + d, m->depth - d));
        }
    }
}

/* Count the entries of each row into start [rows + 1]; returns their number, or -1 if it is 2^31 or more. */
int64_t nm_csr_start(const nm_mask *m, int32_t *start) {
    if (m->depth_stride != 1 && m->row_stride != 1) return -2;
    csr_job job = {.mask = m, .start = start};
    start[0] = 0;
    nm_run(m->parallel, m->threads, nm_ceil(m->rows, BAND), csr_count_task, &job);
    int64_t entries = 0;
    for (int64_t r = 0; r < m->rows; r++) {
        entries += start[r + 1];
        if (entries > INT32_MAX) return -1;
        start[r + 1] = (int32_t)entries;
    }
    return entries;
}

static void csr_fill_task(int64_t begin, int64_t end, void *context) {
    const csr_job *job = context;
    const nm_mask *m = job->mask;
    int64_t first = begin * BAND, rows = nm_min(end * BAND, m->rows) - first;
    int64_t entry = job->start[first];
    memcpy(job->next + first, job->start + first, (size_t)rows * 4);
    if (m->row_stride == 1) {
        for (int64_t d = 0; d < m->depth; d++) {
            const uint8_t *line = m->bits + d * m->depth_stride + first;
            EACH_SET(m, line, rows, r) {
                int32_t slot = job->next[first + r]++;
                job->offset[slot] = (int32_t)(d * NM_PANEL);
                job->source[entry] = (int32_t)(d * m->depth_stride + first + r);
                job->slot[entry++] = slot;
            }
        }
    } else {
        for (int64_t r = 0; r < rows; r++) {
            const uint8_t *line = m->bits + (first + r) * m->row_stride;
            EACH_SET(m, line, m->depth, d) {
                job->offset[entry] = (int32_t)(d * NM_PANEL);
                job->source[entry] = (int32_t)((first + r) * m->row_stride + d);
                job->slot[entry] = (int32_t)entry;
                entry++;
            }
        }
    }
}

/* Fill a csr layout: offsets, and for the entries, in the order of memory within a band of rows, their place in memory
 * and in the layout. `next` [rows] is room to work in. */
void nm_csr_fill(const nm_mask *m, const int32_t *start, int32_t *next, int32_t *offset, int32_t *source,
                 int32_t *slot) {
    csr_job job = {m, (int32_t *)start, next, offset, source, slot};
    nm_run(m->parallel, m->threads, nm_ceil(m->rows, BAND), csr_fill_task, &job);
}

/* Whether a csr layout may be read by the kernels. */
int32_t nm_csr_valid(const int32_t *start, int64_t rows, const int32_t *offset, int64_t entries, int64_t depth) {
    if (start[0] != 0 || start[rows] != entries) return 0;
    for (int64_t r = 0; r < rows; r++)
        if (start[r] > start[r + 1]) return 0;
    for (int64_t e = 0; e < entries; e++)
        if (offset[e] < 0 || offset[e] % NM_PANEL || offset[e] / NM_PANEL >= depth) return 0;
    return 1;
}

typedef struct {
    const nm_mask *mask;
    const int32_t *source, *slot;
    int64_t entries;
    float *values;
} csr_values_job;

enum { ENTRIES = 1 << 14 }; /* that one task takes */

static void csr_values_task(int64_t begin, int64_t end, void *context) {
    const csr_values_job *job = context;
    for (int64_t e = begin * ENTRIES; e < nm_min(end * ENTRIES, job->entries); e++)
        job->values[job->slot[e]] = rounded(read_value(job->mask, job->source[e]), job->mask->round);
}

/* The values of a csr layout. */
void nm_csr_values(const nm_mask *m, const int32_t *source, const int32_t *slot, int64_t entries, float *values) {
    csr_values_job job = {m, source, slot, entries, values};
    nm_run(m->parallel, m->threads, nm_ceil(entries, ENTRIES), csr_values_task, &job);
}
