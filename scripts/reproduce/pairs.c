/* The SMO of Keerthi et al. 2001 on one SVM, without and with the stop rule of Franc, Laskov and Mueller 2008.

   State: alpha, and F = K (alpha * y) - y. With a = alpha * y, a pair is one variable whose a can rise and
   one whose a can fall; the most violating pair has the least F of the first kind and the largest of the
   second. bound.py compiles this file and calls `solve`: the paper's counts of kernel columns, up to millions
   for one problem, are those of steps taken one after the other, which tensor operations do not speed up. */

#include <stdlib.h>
#include <string.h>

#define BLOCK 64
#define FAR 1e300
#define TINY 1e-12

enum stop { OUT_OF_STEPS = 0, EPSILON_KKT = 1, PROVED = 2 };

typedef struct {
    long columns;       /* kernel columns read */
    long beta_columns;  /* those of them that only beta needed */
    long steps;         /* pairs optimised */
    int stopped;        /* enum stop */
    int sign;           /* of the held-out output */
    double bias;
} outcome;

typedef struct {
    int n, blocks;
    const double *K, *y;
    double C;
    double *alpha, *F;
    double *cannot_rise, *cannot_fall;  /* 0 or FAR, (n) */
    double *least, *largest;            /* of F in every block */
} machine;

/* Problem (13) of the paper: its dual H(beta), raised one variable at a time. */
typedef struct {
    const double *K_r;
    double *beta, *h;                   /* variables and gradient, (n) */
    double *cannot_grow, *cannot_shrink;
    double *worst;                      /* violation in every block */
    double value;                       /* H(beta) */
} bound;

static double smaller(double a, double b) { return a < b ? a : b; }
static double larger(double a, double b) { return a > b ? a : b; }

static double *numbers(int n) { return calloc(n, sizeof(double)); }

static void mark(machine *m, int k) {
    int can_grow = m->alpha[k] < m->C, can_shrink = m->alpha[k] > 0;
    m->cannot_rise[k] = (m->y[k] > 0 ? can_grow : can_shrink) ? 0 : FAR;
    m->cannot_fall[k] = (m->y[k] > 0 ? can_shrink : can_grow) ? 0 : FAR;
}

/* F += step (K_i - K_j), and the extremes of F in every block. */
static void update(machine *m, double step, int i, int j) {
    const double *K_i = m->K + (long)i * m->n, *K_j = m->K + (long)j * m->n;
    for (int b = 0; b < m->blocks; b++) {
        int first = b * BLOCK, end = first + BLOCK < m->n ? first + BLOCK : m->n;
        double least = FAR, largest = -FAR;
        for (int k = first; k < end; k++) {
            double f = m->F[k] + step * (K_i[k] - K_j[k]);
            m->F[k] = f;
            least = smaller(least, f + m->cannot_rise[k]);
            largest = larger(largest, f - m->cannot_fall[k]);
        }
        m->least[b] = least;
        m->largest[b] = largest;
    }
}

/* The most violating pair; returns the violation. */
static double worst_pair(const machine *m, int *i, int *j) {
    int up = 0, low = 0;
    for (int b = 1; b < m->blocks; b++) {
        if (m->least[b] < m->least[up]) up = b;
        if (m->largest[b] > m->largest[low]) low = b;
    }
    *i = up * BLOCK;
    while (m->F[*i] + m->cannot_rise[*i] != m->least[up]) ++*i;
    *j = low * BLOCK;
    while (m->F[*j] - m->cannot_fall[*j] != m->largest[low]) ++*j;
    return m->largest[low] - m->least[up];
}

static double snapped(double alpha, double C) {
    if (alpha < TINY * C) return 0;
    return C - alpha < TINY * C ? C : alpha;
}

/* One step on a pair: to the maximum on its line or to a bound. */
static void pair_step(machine *m, int i, int j, double violation) {
    double k_ii = m->K[(long)i * m->n + i], k_jj = m->K[(long)j * m->n + j], k_ij = m->K[(long)i * m->n + j];
    double room_i = m->y[i] > 0 ? m->C - m->alpha[i] : m->alpha[i];
    double room_j = m->y[j] > 0 ? m->alpha[j] : m->C - m->alpha[j];
    double step = violation / larger(k_ii + k_jj - 2 * k_ij, TINY);
    step = smaller(step, smaller(room_i, room_j));
    m->alpha[i] = snapped(m->alpha[i] + m->y[i] * step, m->C);
    m->alpha[j] = snapped(m->alpha[j] - m->y[j] * step, m->C);
    mark(m, i);
    mark(m, j);
    update(m, step, i, j);
}

static void mark_beta(bound *d, double C, int k) {
    d->cannot_grow[k] = d->beta[k] < C ? 0 : FAR;
    d->cannot_shrink[k] = d->beta[k] > 0 ? 0 : FAR;
}

/* h after beta_j has changed by `change`, and the worst violation in every block. */
static void update_beta(const machine *m, bound *d, double change, int j, int r) {
    const double *K_j = m->K + (long)j * m->n;
    double scale = change * m->y[j], corner = d->K_r[r] - d->K_r[j];
    for (int b = 0; b < m->blocks; b++) {
        int first = b * BLOCK, end = first + BLOCK < m->n ? first + BLOCK : m->n;
        double worst = 0;
        for (int k = first; k < end; k++) {
            double h = d->h[k] - m->y[k] * scale * (K_j[k] - d->K_r[k] + corner);
            d->h[k] = h;
            worst = larger(worst, larger(h - d->cannot_grow[k], -h - d->cannot_shrink[k]));
        }
        d->worst[b] = worst;
    }
}

/* One step of beta along variable j. */
static void climb(const machine *m, bound *d, int j, int r) {
    double curvature = m->K[(long)j * m->n + j] - 2 * d->K_r[j] + d->K_r[r];
    double target = d->beta[j] + d->h[j] / larger(curvature, TINY);
    double change = larger(0, smaller(m->C, target)) - d->beta[j];
    if (j == r || change == 0) return;
    d->value += change * (d->h[j] - change * curvature / 2);
    d->beta[j] = snapped(d->beta[j] + change, m->C);
    mark_beta(d, m->C, j);
    update_beta(m, d, change, j, r);
}

/* The variable of beta that violates its conditions most, or -1 where none does. */
static int worst_beta(const machine *m, const bound *d) {
    int worst = 0;
    for (int b = 1; b < m->blocks; b++)
        if (d->worst[b] > d->worst[worst]) worst = b;
    if (d->worst[worst] <= TINY) return -1;
    int j = worst * BLOCK;
    while (larger(d->h[j] - d->cannot_grow[j], -d->h[j] - d->cannot_shrink[j]) != d->worst[worst]) ++j;
    return j;
}

/* beta begins at alpha, whose gradient is known: y^T alpha = 0. */
static void begin_bound(const machine *m, bound *d, int r) {
    double f_r = m->F[r] + m->y[r];
    d->K_r = m->K + (long)r * m->n;
    d->value = 0;
    for (int k = 0; k < m->n; k++) {
        d->beta[k] = m->alpha[k];
        d->h[k] = 1 - m->y[k] * (m->F[k] + m->y[k] - f_r);
        d->value += d->beta[k] * (1 + d->h[k]) / 2;
        mark_beta(d, m->C, k);
    }
    d->cannot_grow[r] = d->cannot_shrink[r] = FAR;
    update_beta(m, d, 0, r, r);
}

/* The number that has `place` smaller ones before it if x were sorted; x is reordered. */
static double order_statistic(double *x, int count, int place) {
    int first = 0, last = count - 1;
    while (first < last) {
        double pivot = x[(first + last) / 2];
        int i = first, j = last;
        while (i <= j) {
            while (x[i] < pivot) i++;
            while (x[j] > pivot) j--;
            if (i > j) break;
            double swapped = x[i];
            x[i++] = x[j];
            x[j--] = swapped;
        }
        if (place <= j) last = j;
        else if (place >= i) first = i;
        else break;
    }
    return x[place];
}

/* The primal objective at alpha with the best bias: of -F without row r, as many smaller as y are positive. */
static double primal(const machine *m, int r, double *bias, double *room) {
    int count = 0, positive = 0;
    double total = 0, loss = 0;
    for (int k = 0; k < m->n; k++) {
        if (k == r) continue;
        room[count++] = -m->F[k];
        positive += m->y[k] > 0;
    }
    *bias = order_statistic(room, count, positive > 0 ? positive - 1 : 0);
    for (int k = 0; k < m->n; k++) {
        total += m->alpha[k] * m->y[k] * (m->F[k] + m->y[k]) / 2;
        if (k != r) loss += larger(0, -m->y[k] * (m->F[k] + *bias));
    }
    return total + m->C * loss;
}

static machine new_machine(int n, const double *K, const double *y, double C, double *alpha, double *F) {
    machine m = {n, (n + BLOCK - 1) / BLOCK, K, y, C, alpha, F, numbers(n), numbers(n), 0, 0};
    m.least = numbers(m.blocks);
    m.largest = numbers(m.blocks);
    return m;
}

static bound new_bound(int n, int blocks) {
    bound d = {0, numbers(n), numbers(n), numbers(n), numbers(n), numbers(blocks), 0};
    return d;
}

/* Solve one problem from alpha and F, which are changed, until epsilon-KKT or a proof of the sign at row r.

   r: the row left out, whose alpha is 0; -1 for the full machine.
   proof: 0 without the bound, Algorithm 2; 1 with it, Algorithm 3: beta moves along its own worst variable,
   whose column is counted; 2: along the two variables whose columns the step on alpha has read.
   The bound is compared with the primal objective after so many steps that no stop is late by more than a
   64th. */
void solve(int n, const double *K, const double *y, double C, int r, double *alpha, double *F, double epsilon,
           long most_steps, int proof, outcome *out) {
    machine m = new_machine(n, K, y, C, alpha, F);
    bound d = new_bound(proof ? n : 1, m.blocks);
    double *room = numbers(n);
    long ask = 0;
    for (int k = 0; k < n; k++) mark(&m, k);
    if (r >= 0) m.cannot_rise[r] = m.cannot_fall[r] = FAR;
    update(&m, 0, 0, 0);
    if (proof) begin_bound(&m, &d, r);
    memset(out, 0, sizeof *out);
    for (;;) {
        int i, j;
        double violation = worst_pair(&m, &i, &j);
        out->bias = -(F[i] + F[j]) / 2;
        if (violation <= epsilon) {
            out->stopped = EPSILON_KKT;
            break;
        }
        if (proof && out->steps >= ask) {
            double bias, objective = primal(&m, r, &bias, room);
            ask = out->steps + 1 + out->steps / 64;
            if (objective < d.value - 1e-9 * objective) {
                out->stopped = PROVED;
                out->bias = bias;
                break;
            }
        }
        if (out->steps == most_steps) break;
        pair_step(&m, i, j, violation);
        out->steps++;
        out->columns += 2;
        if (proof == 1) {
            int own = worst_beta(&m, &d);
            if (own >= 0) {
                climb(&m, &d, own, r);
                out->columns++;
                out->beta_columns++;
            }
        } else if (proof == 2) {
            climb(&m, &d, i, r);
            climb(&m, &d, j, r);
        }
    }
    out->sign = r >= 0 && F[r] + y[r] + out->bias < 0 ? -1 : 1;
    double *used[] = {m.cannot_rise, m.cannot_fall, m.least, m.largest, d.beta, d.h,
                      d.cannot_grow, d.cannot_shrink, d.worst, room};
    for (size_t k = 0; k < sizeof used / sizeof *used; k++) free(used[k]);
}
