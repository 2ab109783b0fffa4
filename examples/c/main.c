// Calls the launcher of `mhcgen emit --streams 4 --fuse pre --abi c` and compares its results with the same formulas
// in double, written plainly below. Prints one line per result; the exit status is 0 if all are close.

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "memory.h"
#include "pre.h"

enum { N = MHC_PRE_STREAMS, H = MHC_PRE_HIDDEN, ROWS = (2 + N) * N, TOKENS = 3 };

// The defaults of `mhcgen emit`.
static const int ITERATIONS = 20;
static const double EPS = 1e-6;

// Numbers in [-1, 1) that are the same everywhere.
static float next_number(void) {
  static uint64_t state = 1;
  state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (float)((double)(state >> 40) / (1 << 23) - 1.0);
}

static double sigmoid(double v) { return 1.0 / (1.0 + exp(-v)); }

// Softmax of each row plus eps, columns by their sums plus eps, then rows and columns in turn.
static void sinkhorn(double c[N][N]) {
  for (int i = 0; i < N; ++i) {
    double most = c[i][0], total = 0;
    for (int j = 1; j < N; ++j) most = fmax(most, c[i][j]);
    for (int j = 0; j < N; ++j) total += c[i][j] = exp(c[i][j] - most);
    for (int j = 0; j < N; ++j) c[i][j] = c[i][j] / total + EPS;
  }
  for (int iteration = 0; iteration < ITERATIONS; ++iteration) {
    for (int i = 0; i < N && iteration > 0; ++i) {
      double total = EPS;
      for (int j = 0; j < N; ++j) total += c[i][j];
      for (int j = 0; j < N; ++j) c[i][j] /= total;
    }
    for (int j = 0; j < N; ++j) {
      double total = EPS;
      for (int i = 0; i < N; ++i) total += c[i][j];
      for (int i = 0; i < N; ++i) c[i][j] /= total;
    }
  }
}

struct values {
  float x[TOKENS][N][H], mixes[TOKENS][ROWS], scale[3], base[ROWS];
  float pre[TOKENS][N], post[TOKENS][N], comb[TOKENS][N][N], y[TOKENS][H];
};

struct expected {
  double pre[TOKENS][N], post[TOKENS][N], comb[TOKENS][N][N], y[TOKENS][H];
};

static void compute(const struct values *v, struct expected *e) {
  for (int t = 0; t < TOKENS; ++t) {
    double squares = 0, logits[ROWS];
    for (int c = 0; c < N; ++c)
      for (int h = 0; h < H; ++h) squares += (double)v->x[t][c][h] * v->x[t][c][h];
    const double root = sqrt(squares / ((double)N * H) + EPS);
    for (int r = 0; r < ROWS; ++r) {
      const int part = r < N ? 0 : r < 2 * N ? 1 : 2;
      logits[r] = v->mixes[t][r] / root * v->scale[part] + v->base[r];
    }
    for (int c = 0; c < N; ++c) {
      e->pre[t][c] = sigmoid(logits[c]) + EPS;
      e->post[t][c] = 2.0 * sigmoid(logits[N + c]);
      for (int k = 0; k < N; ++k) e->comb[t][c][k] = logits[2 * N + c * N + k];
    }
    sinkhorn(e->comb[t]);
    for (int h = 0; h < H; ++h) {
      e->y[t][h] = 0;
      for (int c = 0; c < N; ++c) e->y[t][h] += e->pre[t][c] * v->x[t][c][h];
    }
  }
}

static int compare(const char *name, const float *have, const double *want, size_t count) {
  double worst = 0, size = 0;
  for (size_t i = 0; i < count; ++i) {
    worst = fmax(worst, isfinite(have[i]) ? fabs(have[i] - want[i]) : INFINITY);
    size = fmax(size, fabs(want[i]));
  }
  const int close = worst <= 2e-6 * size;
  printf("%-5s %6zu numbers, off by %.1e at most: %s\n", name, count, worst, close ? "ok" : "WRONG");
  return close;
}

static void stop_at(const char *what, int status) {
  if (status == MHC_OK) return;
  fprintf(stderr, "%s: status %d, %s\n", what, status, mhc_status_string(status));
  exit(1);
}

int main(void) {
  static struct values v;
  static struct expected e;
  for (float *p = &v.x[0][0][0]; p < &v.pre[0][0]; ++p) *p = next_number();
  compute(&v, &e);

  struct mhc_pre_args args = {
      .x = to_device(v.x, sizeof v.x),
      .mixes = to_device(v.mixes, sizeof v.mixes),
      .scale = to_device(v.scale, sizeof v.scale),
      .base = to_device(v.base, sizeof v.base),
      .pre = on_device(sizeof v.pre),
      .post = on_device(sizeof v.post),
      .comb = on_device(sizeof v.comb),
      .y = on_device(sizeof v.y),
      .tokens = TOKENS,
  };
  size_t bytes;
  stop_at("workspace", mhc_pre_workspace_bytes(TOKENS, &bytes));
  void *workspace = on_device(bytes);
  stop_at("launch", mhc_pre_launch(&args, workspace, bytes, NULL));
  to_host(v.pre, args.pre, sizeof v.pre);
  to_host(v.post, args.post, sizeof v.post);
  to_host(v.comb, args.comb, sizeof v.comb);
  to_host(v.y, args.y, sizeof v.y);

  int good = compare("pre", &v.pre[0][0], &e.pre[0][0], sizeof v.pre / sizeof(float));
  good &= compare("post", &v.post[0][0], &e.post[0][0], sizeof v.post / sizeof(float));
  good &= compare("comb", &v.comb[0][0][0], &e.comb[0][0][0], sizeof v.comb / sizeof(float));
  good &= compare("y", &v.y[0][0], &e.y[0][0], sizeof v.y / sizeof(float));

  args.tokens = -1;
  const int refused = mhc_pre_launch(&args, workspace, bytes, NULL);
  printf("-1 tokens: status %d, %s\n", refused, mhc_status_string(refused));
  return good && refused == MHC_NEGATIVE_TOKENS ? 0 : 1;
}
