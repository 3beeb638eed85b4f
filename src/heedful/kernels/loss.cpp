// Cross entropy of rows of logits with its gradient. A row is read from memory once: its
// exponentials stay in the cache of the core.
#include <cmath>
#include <vector>

#include "elements.h"

namespace {
struct Row {
  double loss, nll;
  bool is_correct;
};

// Args: logits (V); grad: (V) or null; buffer: (V).
template <class T>
Row row_loss(const T* logits, int64_t target, int64_t vocab, float smoothing, T* grad,
             float* buffer) {
  Floats most = all(-INFINITY), total = {}, sums = {};
  for_vectors(vocab, [&](int64_t i, int64_t n) {
    const Floats x = part(logits + i, n, -INFINITY);
    put(buffer + i, x, n);
    most = larger(most, x);
    total += n == kLanes ? x : part(logits + i, n);
  });
  const float largest = largest_of(most);
  for_vectors(vocab, [&](int64_t i, int64_t n) {
    const Floats shifted = part(buffer + i, n, -INFINITY) - largest;
    const Floats e = shifted < -87.0f ? Floats{} : exp(shifted);
    put(buffer + i, e, n);
    sums += e;
  });
  const float sum = sum_of(sums);
  const double log_sum = double(largest) + std::log(double(sum));
  const float own = load(logits + target, 1, 0)[0];
  Row row{0, log_sum - own, own == largest};
  for (int64_t i = 0; row.is_correct && i < target; i++)
    row.is_correct = load(logits + i, 1, 0)[0] != largest;  // the first of several is chosen
  row.loss = (1 - double(smoothing)) * row.nll;
  if (smoothing > 0) row.loss += smoothing * (log_sum - double(sum_of(total)) / vocab);
  if (!grad) return row;
  const float inverse = 1 / sum, uniform = smoothing / vocab;
  const float at_target = buffer[target] * inverse - uniform - (1 - smoothing);
  for_vectors(vocab, [&](int64_t i, int64_t n) {
    put(grad + i, part(buffer + i, n) * inverse - uniform, n);
  });
  store(grad + target, all(at_target), 1);
  return row;
}
}  // namespace

// logits (N, V), targets (N); grad: (N, V), d loss / d logits, or null. sums (3): loss, negative
// log-likelihood and the number of targets with the highest logit. False if a target is not from 0
// to V - 1: then nothing is computed.
extern "C" bool heedful_cross_entropy(int64_t type, const void* logits, const int64_t* targets,
                                      int64_t rows, int64_t vocab, double smoothing, void* grad,
                                      double* sums, int64_t threads) {
  const auto is_class = [&](int64_t target) { return 0 <= target && target < vocab; };
  if (!std::all_of(targets, targets + rows, is_class)) return false;
  std::vector<Row> found(rows);
  with_type(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
#pragma omp parallel num_threads(threads)
    {
      std::vector<Line> buffer = lines_of(vocab);
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < rows; i++)
        found[i] = row_loss(static_cast<const T*>(logits) + i * vocab, targets[i], vocab,
                            float(smoothing), grad ? static_cast<T*>(grad) + i * vocab : nullptr,
                            buffer.data()->floats);
    }
  });
  std::fill(sums, sums + 3, 0.0);
  for (const Row& row : found) {  // in this order with any number of threads
    sums[0] += row.loss;
    sums[1] += row.nll;
    sums[2] += row.is_correct;
  }
  return true;
}
