// Attention of short sequences in training: softmax(scale · QKᵀ + bias) M V and its gradients, with
// the mask M of dropout. One head is computed at a time; its queries, keys, values and scores stay
// in the cache of the core, and the backward pass computes the weights again. Products are in
// float32.
#include <cmath>
#include <type_traits>
#include <vector>

#include "elements.h"
#include "mask.h"
#include "tiles.h"

namespace {
// The arguments of both kernels, in the order of `training.AttentionArguments`. Heads have rows of
// `width` elements, which are gathered from matrices by their indices. A row that the index of the
// other direction does not lead back to is padding: it is read, but nothing is written for it.
struct Attention {
  int64_t type, items, queries, keys, width, threads;  // items: heads of keys of all texts
  double scale, keep_scale;
  const void *projected, *source;  // rows of queries; rows of keys and values
  const int64_t *query, *key, *value;  // (items, queries or keys), rows of these matrices
  const int64_t *heads, *heads_grad;  // rows of queries for the rows of `out`, and back
  // The inverse of query, and of key and value: rows of the queries, the keys and the values of all
  // items, in this order.
  const int64_t *query_grad, *source_grad;
  const float* bias;  // (items, queries, keys) by its strides; null: none
  int64_t bias_batch, bias_head, bias_query, bias_key;  // strides
  int64_t heads_of_text;  // of keys
  const int16_t* keep;  // (items, queries, keys), of dropout; null: none
  void* out;  // (rows of heads, width)
  const void* out_grad;
  void *projected_grad, *key_value_grad;
};

template <class T>
struct Head {
  const Attention& a;
  const int64_t item;
  const int64_t wide = round_up(a.width), columns = round_up(a.keys), steps = round_up(a.queries);

  const T* row(const void* matrix, int64_t index) const {
    return static_cast<const T*>(matrix) + index * a.width;
  }

  T* row(void* matrix, int64_t index) const { return static_cast<T*>(matrix) + index * a.width; }

  // Row t of the item: as floats, times a factor, zeros up to `wide`.
  void read(const T* from, float factor, float* to) const {
    for_vectors(a.width, [&](int64_t e, int64_t n) { store(to + e, part(from + e, n) * factor); });
  }

  // out (M, columns of b) = x (M, K) · b (K, columns of b); `step`s lie between rows.
  static void multiply(const float* x, int64_t x_step, const float* b, int64_t b_step, int64_t M,
                       int64_t K, int64_t columns, float* out, int64_t out_step) {
    for (int64_t m = 0; m < M; m += kRows)
      with_rows(std::min(kRows, M - m), [&](auto fixed) {
        rows_product<decltype(fixed)::value>(b, b_step, x + m * x_step, x_step, K, columns,
                                             out + m * out_step, out_step);
      });
  }

  // Fetches rows of a matrix for the next head into the cache.
  void fetch(const void* matrix, const int64_t* indices, int64_t count) const {
    for (int64_t i = 0; i < count && item + 1 < a.items; i++)
      for (int64_t e = 0; e < a.width; e += 64 / sizeof(T))
        __builtin_prefetch(row(matrix, indices[(item + 1) * count + i]) + e);
  }

  // Reads queries (steps, wide), times the scale, keys (columns, wide) and transposed keys; scores
  // becomes the weights (steps, columns), zeros in the last columns. factors: (steps), overwritten.
  void weights(float* q, float* k, float* k_turned, float* scores, float* factors) const {
    fetch(a.projected, a.query, a.queries);
    fetch(a.source, a.key, a.keys);
    fetch(a.source, a.value, a.keys);
    for (int64_t t = 0; t < a.queries; t++)
      read(row(a.projected, a.query[item * a.queries + t]), float(a.scale), q + t * wide);
    for (int64_t t = 0; t < a.keys; t++)
      read(row(a.source, a.key[item * a.keys + t]), 1, k + t * wide);
    transpose(k, wide, a.keys, wide, k_turned, columns);
    multiply(q, wide, k_turned, columns, a.queries, a.width, columns, scores, columns);
    const float* bias = a.bias;
    if (bias) bias += item / a.heads_of_text * a.bias_batch + item % a.heads_of_text * a.bias_head;
    // Loops of few steps, so that the processor computes several rows at once.
    for (int64_t t = 0; t < a.queries; t++) {
      float* s = scores + t * columns;
      if (bias && a.bias_key == 1)
        for_vectors(a.keys, [&](int64_t i, int64_t n) {
          store(s + i, load(s + i) + part(bias + t * a.bias_query + i, n));
        });
      else if (bias)
        for (int64_t i = 0; i < a.keys; i++) s[i] += bias[t * a.bias_query + i * a.bias_key];
      std::fill(s + a.keys, s + columns, -INFINITY);
    }
    for (int64_t t = 0; t < a.queries; t++) {
      Floats most = all(-INFINITY);
      for (int64_t i = t * columns; i < (t + 1) * columns; i += kLanes)
        most = larger(most, load(scores + i));
      factors[t] = largest_of(most);
    }
    for (int64_t t = 0; t < a.queries; t++)
      for (int64_t i = t * columns; i < (t + 1) * columns; i += kLanes) {
        const Floats shifted = load(scores + i) - factors[t];
        store(scores + i, shifted < -87.0f ? Floats{} : exp(shifted));
      }
    for (int64_t t = 0; t < a.queries; t++) factors[t] = 1 / sum(scores + t * columns);
    for (int64_t t = 0; t < a.queries; t++)
      for (int64_t i = t * columns; i < (t + 1) * columns; i += kLanes)
        store(scores + i, load(scores + i) * factors[t]);
  }

  float sum(const float* row) const {
    Floats sums = {};
    for (int64_t i = 0; i < columns; i += kLanes) sums += load(row + i);
    return sum_of(sums);
  }

  // to = x after dropout of weights, for (queries, columns).
  void drop(const float* x, float* to) const {
    const Mask mask{a.keep, float(a.keep_scale)};
    for (int64_t t = 0; t < a.queries; t++)
      for_vectors(a.keys, [&](int64_t i, int64_t n) {
        const int64_t at = t * columns + i;
        store(to + at, mask.drop<Float32>(load(x + at), (item * a.queries + t) * a.keys + i, n));
      });
  }

  void values(float* v) const {
    for (int64_t t = 0; t < a.keys; t++)
      read(row(a.source, a.value[item * a.keys + t]), 1, v + t * wide);
  }

  void write(const float* from, T* to) const {
    for_vectors(a.width, [&](int64_t e, int64_t n) { put(to + e, load(from + e), n); });
  }

  // Floats of memory for a head.
  int64_t size() const {
    return 3 * (steps + columns) * wide + 2 * wide * columns + (3 * columns + 1) * steps;
  }

  void forward(float* memory) const {
    float* q = memory;  // (steps, wide), as those of queries below
    float* k = q + steps * wide;  // (columns, wide), as those of keys
    float* v = k + columns * wide;
    float* k_turned = v + columns * wide;  // (wide, columns)
    float* scores = k_turned + wide * columns;  // (steps, columns)
    weights(q, k, k_turned, scores, scores + steps * columns);
    values(v);
    if (a.keep) drop(scores, scores);
    multiply(scores, columns, v, wide, a.queries, a.keys, wide, q, wide);
    for (int64_t t = 0; t < a.queries; t++) {
      const int64_t from = item * a.queries + t, to = a.heads_grad[from];
      if (a.heads[to] == from) write(q + t * wide, row(a.out, to));
    }
  }

  void backward(float* memory) const {
    float* q = memory;
    float* grad = q + steps * wide;  // of the outputs
    float* q_grad = grad + steps * wide;
    float* k = q_grad + steps * wide;
    float* v = k + columns * wide;
    float* rows = v + columns * wide;  // of gradients of keys or values
    float* k_turned = rows + columns * wide;
    float* v_turned = k_turned + wide * columns;
    float* p = v_turned + wide * columns;  // weights
    float* p_grad = p + steps * columns;
    float* turned = p_grad + steps * columns;  // (columns, steps)
    float* factors = turned + steps * columns;  // (steps)
    weights(q, k, k_turned, p, factors);
    values(v);
    transpose(v, wide, a.keys, wide, v_turned, columns);
    fetch(a.out_grad, a.heads_grad, a.queries);
    for (int64_t t = 0; t < a.queries; t++) {
      const int64_t to = item * a.queries + t, from = a.heads_grad[to];
      if (a.heads[from] == to)
        read(row(a.out_grad, from), 1, grad + t * wide);
      else
        std::fill_n(grad + t * wide, wide, 0.0f);
    }
    // Values: (P M)ᵀ times the gradient.
    drop(p, p_grad);
    transpose(p_grad, columns, a.queries, columns, turned, steps);
    multiply(turned, steps, grad, wide, a.keys, a.queries, wide, rows, wide);
    write_source(rows, a.value, a.items * (a.queries + a.keys));
    // Scores: P (D - Σ P D) with D = M (gradient · Vᵀ).
    multiply(grad, wide, v_turned, columns, a.queries, a.width, columns, p_grad, columns);
    drop(p_grad, p_grad);
    for (int64_t t = 0; t < a.queries; t++) {
      Floats sums = {};
      for (int64_t i = t * columns; i < (t + 1) * columns; i += kLanes)
        sums += load(p + i) * load(p_grad + i);
      factors[t] = sum_of(sums);
    }
    for (int64_t t = 0; t < a.queries; t++)
      for (int64_t i = t * columns; i < (t + 1) * columns; i += kLanes)
        store(p_grad + i, load(p + i) * (load(p_grad + i) - factors[t]));
    multiply(p_grad, columns, k, wide, a.queries, a.keys, wide, q_grad, wide);
    for (int64_t t = 0; t < a.queries; t++) {
      const int64_t from = item * a.queries + t, to = a.query[from];
      if (a.query_grad[to] != from) continue;
      for (int64_t e = 0; e < a.width; e++) q_grad[t * wide + e] *= float(a.scale);
      write(q_grad + t * wide, row(a.projected_grad, to));
    }
    transpose(p_grad, columns, a.queries, columns, turned, steps);
    multiply(turned, steps, q, wide, a.keys, a.queries, wide, rows, wide);
    write_source(rows, a.key, a.items * a.queries);
  }

  // Gradients of keys or values, whose rows of the joint gradient begin at `start`.
  void write_source(const float* rows, const int64_t* indices, int64_t start) const {
    for (int64_t i = 0; i < a.keys; i++) {
      const int64_t from = item * a.keys + i, to = indices[from];
      if (a.source_grad[to] == start + from) write(rows + i * wide, row(a.key_value_grad, to));
    }
  }
};

template <bool is_forward>
void run(const Attention& a) {
  with_type(a.type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
#pragma omp parallel num_threads(a.threads)
    {
      std::vector<Line> lines(Head<T>{a, 0}.size() / kLanes);
      float* memory = lines.data()->floats;
#pragma omp for schedule(static)
      for (int64_t item = 0; item < a.items; item++) {
        const Head<T> head{a, item};
        is_forward ? head.forward(memory) : head.backward(memory);
      }
    }
  });
}
}  // namespace

extern "C" void heedful_attention_forward(const Attention* a) { run<true>(*a); }

extern "C" void heedful_attention_backward(const Attention* a) { run<false>(*a); }
