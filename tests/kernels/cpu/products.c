/* The csr products of the baseline against double precision: for processors that run neither Python nor torch here. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nm.h"

int32_t nm_best_level(void);
int32_t nm_csr_product(int32_t level, int32_t product, nm_operands *o, const nm_csr *a);

enum { MOST = 150 };
static double A[MOST][MOST], X[MOST][MOST], G[MOST][MOST], B[MOST];
static uint8_t x[MOST * MOST * 4], grad[MOST * MOST * 4], right[MOST * MOST * 4], bias[MOST * 4], y[MOST * MOST * 4];
static int32_t start[MOST + 1], offset[MOST * MOST];
static float values[MOST * MOST];

static double draw(void) { return (rand() % 255 - 127) / 64.0; } /* exact in bfloat16 */

static void put(uint8_t *to, int32_t dtype, int64_t at, double value) {
    float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, 4);
    if (dtype == NM_BFLOAT16) {
        uint16_t half = (uint16_t)(bits >> 16);
        memcpy(to + 2 * at, &half, 2);
    } else {
        memcpy(to + 4 * at, &single, 4);
    }
}

/* All sums are exact in float32: they are multiples of 1 / 4096 below 2^12. bfloat16 is one rounding to nearest even. */
static int wrong(int32_t dtype, int64_t at, double exact) {
    float single = (float)exact;
    uint32_t bits;
    uint16_t half;
    memcpy(&bits, &single, 4);
    if (dtype != NM_BFLOAT16) return memcmp(y + 4 * at, &single, 4) != 0 && single != 0;
    bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    memcpy(&half, y + 2 * at, 2);
    return half != bits && single != 0;
}

int main(void) {
    int errors = 0;
    for (int trial = 0; trial < 60; trial++) {
        int rows = 1 + rand() % MOST, depth = 1 + rand() % MOST, tokens = 1 + rand() % MOST, entries = 0;
        int32_t dtype = trial % 2;
        for (int r = 0; r < rows; r++) {
            start[r] = entries;
            for (int d = 0; d < depth; d++) {
                A[r][d] = rand() % 4 ? 0 : draw();
                if (A[r][d] == 0) continue;
                offset[entries] = d * NM_PANEL;
                values[entries++] = (float)A[r][d];
            }
            put(bias, dtype, r, B[r] = draw());
        }
        start[rows] = entries;
        for (int t = 0; t < tokens; t++) {
            for (int d = 0; d < depth; d++) {
                put(x, dtype, (int64_t)t * depth + d, X[t][d] = draw());
                put(right, dtype, (int64_t)d * tokens + t, X[t][d]);
            }
            for (int r = 0; r < rows; r++) put(grad, dtype, (int64_t)t * rows + r, G[t][r] = draw());
        }
        nm_csr a = {start, offset, values};
        for (int product = 0; product < 3; product++) {
            nm_operands o = {.threads = 1, .rows = rows, .depth = depth, .tokens = tokens, .dtype = dtype, .y = y};
            o.x = product == 1 ? right : x;
            o.bias = product == 0 ? bias : NULL;
            o.grad = product == 2 ? grad : NULL;
            if (nm_csr_product(nm_best_level(), product, &o, &a)) errors++;
            for (int r = 0; r < rows; r++) {
                for (int t = 0; t < tokens && product < 2; t++) {
                    double exact = product == 0 ? B[r] : 0;
                    for (int d = 0; d < depth; d++) exact += A[r][d] * X[t][d];
                    errors += wrong(dtype, product == 0 ? (int64_t)t * rows + r : (int64_t)r * tokens + t, exact);
                }
                for (int d = 0; d < depth && product == 2; d++) {
                    double exact = 0;
                    for (int t = 0; t < tokens; t++) exact += A[r][d] == 0 ? 0 : G[t][r] * X[t][d];
                    errors += wrong(dtype, (int64_t)r * depth + d, exact);
                }
            }
        }
    }
    printf("%d errors at level %d\n", errors, nm_best_level());
    return errors != 0;
}
