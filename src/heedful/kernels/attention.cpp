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
// The arguments of both kernels, in the order of `attention._Arguments`. The tokens of all texts are
// rows of one matrix, those of text b from starts[b] to before starts[b + 1]; a token has elements
// of its heads side by side, `step` elements after those of the token before. Queries of `repeats`
// heads share a head of keys. Rows of no text are read by nobody, and nothing is written for them.
struct Attention {
  int64_t type, texts, groups, repeats, width, threads;  // groups: heads of keys
  int64_t queries, keys;  // of the padded texts, whose tokens bias and keep are made for
  double scale, keep_scale;
  const void *query, *key, *value;
  int64_t query_step, key_step, value_step;
  const int64_t *query_starts, *key_starts;  // (texts + 1)
  const int64_t *query_columns, *key_columns;  // (texts), where a padded text begins
  const float* bias;  // (texts, groups, repeats · queries, keys) by its strides; null: none
  int64_t bias_batch, bias_head, bias_query, bias_key;  // strides
  const int16_t* keep;  // (texts, groups, repeats · queries, keys), of dropout; null: none
  void* out;  // (rows, heads, width), as its gradient
  const void* out_grad;
  void *query_grad, *key_grad, *value_grad;  // (rows, heads, width)
};

// The queries of a text that share a head of keys, from head to head.
template <class T>
struct Head {
  const Attention& a;
  const int64_t text, group;
  const int64_t first_query = a.query_starts[text], first_key = a.key_starts[text];
  const int64_t tokens = a.query_starts[text + 1] - first_query;
  const int64_t keys = a.key_starts[text + 1] - first_key, queries = a.repeats * tokens;
  const int64_t wide = round_up(a.width), columns = round_up(keys), steps = round_up(queries);

  Head(const Attention& a, int64_t item) : a(a), text(item / a.groups), group(item % a.groups) {}

  // The elements of query t, or of key i, in a matrix of all heads whose tokens lie `step` apart.
  int64_t of_query(int64_t t, int64_t step) const {
    const int64_t head = group * a.repeats + t / tokens;
    return (first_query + t % tokens) * step + head * a.width;
  }

  int64_t of_key(int64_t i, int64_t step) const {
    return (first_key + i) * step + group * a.width;
  }

  // The row of query t in bias and keep.
  int64_t padded(int64_t t) const {
    return t / tokens * a.queries + a.query_columns[text] + t % tokens;
  }

  static const T* at(const void* matrix, int64_t i) { return static_cast<const T*>(matrix) + i; }

  static T* at(void* matrix, int64_t i) { return static_cast<T*>(matrix) + i; }

  // A row as floats, times a factor, zeros up to `wide`.
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

  void fetch(const T* row) const {
    for (int64_t e = 0; e < a.width; e += 64 / sizeof(T)) __builtin_prefetch(row + e);
  }

  // Fetches queries, keys and values into the cache, which the next computation reads.
  void fetch_inputs() const {
    for (int64_t t = 0; t < queries; t++) fetch(at(a.query, of_query(t, a.query_step)));
    for (int64_t i = 0; i < keys; i++) {
      fetch(at(a.key, of_key(i, a.key_step)));
      fetch(at(a.value, of_key(i, a.value_step)));
    }
  }

  void fetch_gradients() const {
    for (int64_t t = 0; t < queries; t++) fetch(at(a.out_grad, of_query(t, heads_step())));
  }

  int64_t heads_step() const { return a.groups * a.repeats * a.width; }

  // Reads queries (steps, wide), times the scale, keys (columns, wide) and transposed keys; scores
  // becomes the weights (steps, columns), zeros in the last columns. factors: (steps), overwritten.
  void weights(float* q, float* k, float* k_turned, float* scores, float* factors) const {
    for (int64_t t = 0; t < queries; t++)
      read(at(a.query, of_query(t, a.query_step)), float(a.scale), q + t * wide);
    for (int64_t i = 0; i < keys; i++) read(at(a.key, of_key(i, a.key_step)), 1, k + i * wide);
    std::fill_n(k + keys * wide, (columns - keys) * wide, 0.0f);
    transpose(k, wide, keys, wide, k_turned, columns);
    multiply(q, wide, k_turned, columns, queries, a.width, columns, scores, columns);
    const float* biases = a.bias;
    if (biases)
      biases += text * a.bias_batch + group * a.bias_head + a.key_columns[text] * a.bias_key;
    // Loops of few steps, so that the processor computes several rows at once.
    for (int64_t t = 0; t < queries; t++) {
      float* s = scores + t * columns;
      const float* bias = biases + (biases ? padded(t) * a.bias_query : 0);
      if (bias && a.bias_key == 1)
        for_vectors(keys, [&](int64_t i, int64_t n) {
          store(s + i, load(s + i) + part(bias + i, n));
        });
      else if (bias)
        for (int64_t i = 0; i < keys; i++) s[i] += bias[i * a.bias_key];
      std::fill(s + keys, s + columns, -INFINITY);
    }
    for (int64_t t = 0; t < queries; t++) {
      Floats most = all(-INFINITY);
      for (int64_t i = t * columns; i < (t + 1) * columns; i += kLanes)
        most = larger(most, load(scores + i));
      factors[t] = largest_of(most);
    }
    for (int64_t t = 0; t < queries; t++)
      for (int64_t i = t * columns; i < (t + 1) * columns; i += kLanes) {
        const Floats shifted = load(scores + i) - factors[t];
        store(scores + i, shifted < -87.0f ? Floats{} : exp(shifted));
      }
    for (int64_t t = 0; t < queries; t++) factors[t] = 1 / sum(scores + t * columns);
    for (int64_t t = 0; t < queries; t++)
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
    const int64_t rows = (text * a.groups + group) * a.repeats * a.queries;
    for (int64_t t = 0; t < queries; t++) {
      const int64_t first = (rows + padded(t)) * a.keys + a.key_columns[text];
      for_vectors(keys, [&](int64_t i, int64_t n) {
        const float* from = x + t * columns + i;
        store(to + t * columns + i, mask.drop<Float32>(load(from), first + i, n));
      });
    }
  }

  void values(float* v) const {
    for (int64_t i = 0; i < keys; i++) read(at(a.value, of_key(i, a.value_step)), 1, v + i * wide);
    std::fill_n(v + keys * wide, (columns - keys) * wide, 0.0f);
  }

  void write(const float* from, T* to) const {
    for_vectors(a.width, [&](int64_t e, int64_t n) { put(to + e, load(from + e), n); });
  }

  // Floats of memory for the longest text.
  static int64_t size(const Attention& a) {
    const int64_t steps = round_up(a.repeats * a.queries), columns = round_up(a.keys);
    const int64_t wide = round_up(a.width);
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
    multiply(scores, columns, v, wide, queries, keys, wide, q, wide);
    for (int64_t t = 0; t < queries; t++) write(q + t * wide, at(a.out, of_query(t, heads_step())));
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
    transpose(v, wide, keys, wide, v_turned, columns);
    for (int64_t t = 0; t < queries; t++)
      read(at(a.out_grad, of_query(t, heads_step())), 1, grad + t * wide);
    // Values: (P M)ᵀ times the gradient.
    drop(p, p_grad);
    transpose(p_grad, columns, queries, columns, turned, steps);
    multiply(turned, steps, grad, wide, keys, queries, wide, rows, wide);
    write_keys(rows, a.value_grad);
    // Scores: P (D - Σ P D) with D = M (gradient · Vᵀ).
    multiply(grad, wide, v_turned, columns, queries, a.width, columns, p_grad, columns);
    drop(p_grad, p_grad);
    for (int64_t t = 0; t < queries; t++) {
      Floats sums = {};
      for (int64_t i = t * columns; i < (t + 1) * columns; i += kLanes)
        sums += load(p + i) * load(p_grad + i);
      factors[t] = sum_of(sums);
    }
    for (int64_t t = 0; t < queries; t++)
      for (int64_t i = t * columns; i < (t + 1) * columns; i += kLanes)
        store(p_grad + i, load(p + i) * (load(p_grad + i) - factors[t]));
    multiply(p_grad, columns, k, wide, queries, keys, wide, q_grad, wide);
    for (int64_t t = 0; t < queries; t++) {
      for (int64_t e = 0; e < a.width; e++) q_grad[t * wide + e] *= float(a.scale);
      write(q_grad + t * wide, at(a.query_grad, of_query(t, heads_step())));
    }
    transpose(p_grad, columns, queries, columns, turned, steps);
    multiply(turned, steps, q, wide, keys, queries, wide, rows, wide);
    write_keys(rows, a.key_grad);
  }

  // Gradients of keys or values.
  void write_keys(const float* rows, void* to) const {
    const int64_t step = a.groups * a.width;
    for (int64_t i = 0; i < keys; i++) write(rows + i * wide, at(to, of_key(i, step)));
  }
};

template <bool is_forward>
void run(const Attention& a) {
  with_type(a.type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
#pragma omp parallel num_threads(a.threads)
    {
      std::vector<Line> lines = lines_of(Head<T>::size(a));
      float* memory = lines.data()->floats;
#pragma omp for schedule(dynamic)
      for (int64_t item = 0; item < a.texts * a.groups; item++) {
        if (item + 1 < a.texts * a.groups) {
          const Head<T> next{a, item + 1};
          next.fetch_inputs();
          if (!is_forward) next.fetch_gradients();
        }
        const Head<T> head{a, item};
        is_forward ? head.forward(memory) : head.backward(memory);
      }
    }
  });
}
}  // namespace

extern "C" void heedful_attention_forward(const Attention* a) { run<true>(*a); }

extern "C" void heedful_attention_backward(const Attention* a) { run<false>(*a); }
