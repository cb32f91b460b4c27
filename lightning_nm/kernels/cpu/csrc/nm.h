/* Products with an N:M sparse matrix A [rows, depth] on CPUs: what Python calls. kernels/cpu/library.py reads this file, without
 * its preprocessor lines: it holds declarations alone. What the files of the library share besides is in shared.h.
 *
 * kernels.c is compiled once for each instruction set (NM_LEVEL) and gives one `nm_kernels` each. bf16.c has the bfloat16
 * products of CPUs with AVX512_BF16, whose other products are those of AVX-512; both put what they do with registers into
 * products.h. int8.c has the products of int8 weights. layout.c turns masks into layouts, and weights into the values of a
 * layout. evolve.c moves masks. library.c detects the CPU and exports the functions.
 *
 * The layouts:
 *   permute  For matrices that are N:M along the depth. A register holds `lanes` inputs of one token, its lanes are
 *            outputs: one permutation picks the input of each output. Rows are cut into tiles of 2 * lanes, the depth
 *            into blocks of `lanes`; index[tile][block][slot][2 * lanes] has in its low bits the input within the
 *            block, and NM_EMPTY where an output has no such nonzero. Values have the same order, in float32.
 *   paired   The permute layout of bfloat16 on CPUs that multiply pairs: blocks are of 2 * lanes, the slots are even in
 *            number, and two of a row lie beside each other: index[tile][block][slot / 2][2 * lanes][2]. Values have the
 *            same order, in bfloat16.
 *   csr      For any matrix. Row r has the entries start[r] .. start[r + 1]; an entry multiplies 64 consecutive values
 *            of a panel [depth][64] that begin at offset[entry]. Convolutions take it with a depth of
 *            [in / groups][taps], see conv.c.
 *   int8     For int8 weights that are N:M along the depth, M a divisor of 64; the same on every CPU, see nm_int8.
 *
 * Every output is summed in an order that depends on neither the number of threads nor the other outputs. */
#ifndef NM_H
#define NM_H
#include <stdint.h>

/* Products of matrices, and of convolutions. */
enum { NM_LINEAR, NM_MATMUL, NM_SAMPLED };
enum { NM_FORWARD, NM_DGRAD, NM_WGRAD };
/* Passes over a weight and its mask. */
enum { NM_SIZES, NM_GATHER, NM_EXCHANGE, NM_KEEP, NM_MASK, NM_DECAY, NM_LARGEST, NM_LARGEST_OF_COLUMNS };
/* Operands are of the first two, weights and gradients of a pass of the first three, scores of all. */
enum { NM_FLOAT32, NM_BFLOAT16, NM_FLOAT16, NM_FLOAT64, NM_INT32, NM_INT64 };
enum { NM_NO_MEMORY = 1, NM_NO_KERNEL, NM_TOO_LARGE }; /* why there is no result */
enum { NM_EMPTY = 0x80 };
enum { NM_PANEL = 64 }; /* lanes of a panel */

typedef void (*nm_task)(int64_t begin, int64_t end, void *context);
/* torch_parallel_for of torch's stable C interface; NULL runs on the calling thread. */
typedef int32_t (*nm_parallel)(int64_t begin, int64_t end, int64_t grain, nm_task task, void *context);

/* The dense operands of a product; `dtype` is that of x, bias, grad and y. */
typedef struct {
    nm_parallel parallel;
    int64_t threads;
    int64_t rows, depth;
    int64_t tokens; /* rows of x and grad; columns of x and y in csr_matmul */
    int32_t dtype;
    int32_t failed; /* NM_NO_MEMORY, or 0 */
    const void *x;
    const void *bias; /* [rows] or NULL */
    const void *grad; /* [tokens, rows] */
    void *y;
} nm_operands;

typedef struct {
    const uint8_t *index;
    const void *values;
    int64_t slots, paired;
} nm_permute;

typedef struct {
    const int32_t *start, *offset;
    const float *values;
} nm_csr;

enum { NM_INT8_ROWS = 16, NM_INT8_BLOCK = 64, NM_INT8_ENTRIES = 4 };

/* A matrix of int8 values, none of them -128, and a scale for each row. Rows are cut into tiles of 16, the depth into blocks
 * of 64. A row has n * 64 / m entries in a block, in the order of their positions, and then zeros up to a multiple of 4:
 *
 *   values[tile][block][group][16][4]     entry 4 * group + j of a row
 *   positions, in the same order          `bits` each, 2, 4 or 8: where in its m inputs an entry lies; the first one in the
 *                                         lowest bits of a byte
 *
 * Entry e of a block belongs to the inputs e / n * m .. e / n * m + m of the block. */
typedef struct {
    const int8_t *values;
    const uint8_t *positions;
    const float *scale;    /* [rows] */
    const int32_t *offset; /* [tiles][16]: -128 times the sum of a row's values */
    int64_t n, m, bits;
} nm_int8;

/* A dense matrix of int8 values [rows, depth], at most 2^16 of a row, and a scale for each row. */
typedef struct {
    const int8_t *values;
    const float *scale;
} nm_rows;

/* A convolution of images x [images, in, size], sparse W [out, in / groups, kernel], to y or dY [images, out, positions].
 * Pairs are height and width; from `in` to `groups` the fields are those of Convolution in kernels/api.py. */
typedef struct {
    nm_parallel parallel;
    int64_t threads;
    int64_t images, in, out, size[2], kernel[2], stride[2], padding[2], dilation[2], groups, positions[2];
    int32_t dtype, failed;
    const void *x;
    const void *bias; /* [out] or NULL */
    const void *grad;
    void *y;
} nm_conv;

/* A mask, a bit of each of its bytes, and a weight with the same strides. */
typedef struct {
    nm_parallel parallel; /* as in nm_operands */
    int64_t threads;
    const uint8_t *bits;
    int32_t bit;
    int64_t rows, depth, row_stride, depth_stride;
    const int64_t *order; /* [depth] or NULL */
    const void *weight;
    int32_t dtype, round; /* whether values are rounded to bfloat16 */
} nm_mask;

enum { NM_STATES = 4 }; /* tensors of the optimizer's state */

/* A pass over a weight and its mask, see evolve.c. */
typedef struct {
    nm_parallel parallel; /* as in nm_operands */
    int64_t threads;
    int64_t entries; /* of the weight; m divides them where blocks are looked at */
    uint8_t *bits;
    void *weight, *grad; /* grad is NULL if there is none */
    int32_t dtype, failed;
    /* Gathering: from the values that were kept to the present ones, which are new tensors; keeping: back. */
    float *old_value, *old_square, *value, *square;
    int32_t whole_value, whole_square; /* keep all entries, not the pruned ones alone */
    float own_ratio;                   /* of V of kept entries, which counts other steps */
    float unit;                        /* gathering begins with old_value * unit, keeping divides by it */
    float limit;                       /* what is larger is no evidence */
    double decay;
    float correction, epsilon, size;
    double kept_square, pruned_square; /* results */
    int64_t kept;
    /* Blocks of m entries: block (out * taps + tap) * blocks_per_row + column. */
    int64_t blocks_per_row, taps, n, m, out_stride, tap_stride, in_stride;
    int32_t in_line; /* whether block b begins at entry b * m, and entries follow each other */
    uint8_t *oscillation; /* of each block */
    uint8_t *exchanged;   /* a bit for each entry */
    int64_t states;
    void *state[NM_STATES];
    int32_t state_dtype[NM_STATES], state_is_square[NM_STATES];
    float moment; /* of the optimizer's second moment */
    int64_t budget;
    int64_t changed, better; /* results: blocks or bits that changed, blocks that would gain by an exchange */
    /* The backward mask: entries are [rows, columns], and position i holds row order[i]. */
    const int64_t *order;
    int64_t columns;
    /* Work space of the library. */
    int64_t blocks;
    float *gain; /* of each block, as the next three */
    uint8_t *pruned, *regrown, *chosen;
} nm_evolution;

/* The blocks of scores [blocks / inner, m, inner]: of each the n largest entries are kept, see top.c. */
typedef struct {
    nm_parallel parallel;
    int64_t threads;
    const void *scores;
    uint8_t *kept; /* 1 or 0 for each entry */
    int64_t blocks, inner, n, m;
    int32_t dtype, magnitude; /* whether scores are compared by their magnitude */
} nm_top;

const char *nm_source(void); /* the hash of what this library was compiled from */
int32_t nm_best_level(void);
int64_t nm_lanes(int32_t level);
int32_t nm_int8_level(int32_t level);

int32_t nm_permute_layout(const nm_mask *m, int64_t lanes, int64_t slots, int32_t paired, uint8_t *index);
int32_t nm_permute_valid(const uint8_t *index, int64_t size, int64_t block);
void nm_permute_values(const nm_mask *m, int64_t lanes, int64_t slots, int32_t paired, const uint8_t *index,
                       void *values);
int64_t nm_csr_start(const nm_mask *m, int32_t *start);
void nm_csr_fill(const nm_mask *m, const int32_t *start, int32_t *next, int32_t *offset, int32_t *source,
                 int32_t *slot);
int32_t nm_csr_valid(const int32_t *start, int64_t rows, const int32_t *offset, int64_t entries, int64_t depth);
void nm_csr_values(const nm_mask *m, const int32_t *source, const int32_t *slot, int64_t entries, float *values);
int32_t nm_permute_product(int32_t level, int32_t product, nm_operands *o, const nm_permute *a);
int32_t nm_csr_product(int32_t level, int32_t product, nm_operands *o, const nm_csr *a);
int32_t nm_int8_product(int32_t level, int32_t product, nm_operands *o, const nm_int8 *a);
int32_t nm_rows_product(int32_t level, int32_t product, nm_operands *o, const nm_rows *a);
int32_t nm_conv_product(int32_t level, int32_t product, nm_conv *c, const nm_csr *a);
int32_t nm_evolution_pass(int32_t level, int32_t pass, nm_evolution *e);
void nm_top_mask(int32_t level, nm_top *t);
#endif
