// softmax(s q kᵀ) v within each text of a packed batch: texts lie one after the other, and nothing
// is padded. One head of one text is computed at a time: its keys, transposed, and its values fit
// in the caches.
#include <cmath>
#include <vector>

#include "products.h"
#include "python_lock.h"
#include "tensors.h"

namespace {
// Tokens (N, H, E), the last dimension contiguous.
struct Tokens {
  float* data;
  int64_t sizes[3], strides[3];

  AOTITorchError read(AtenTensorHandle tensor) {
    if (auto error = ::data(tensor, data)) return error;
    for (int64_t i = 0; i < 3; i++) {
      if (auto error = aoti_torch_get_size(tensor, i, &sizes[i])) return error;
      if (auto error = aoti_torch_get_stride(tensor, i, &strides[i])) return error;
    }
    return sizes[2] > 1 && strides[2] != 1;
  }

  float* at(int64_t token, int64_t head) const {
    return data + token * strides[0] + head * strides[1];
  }
};

// e^(scale · (score - largest)) in place of scores first to last of a row, zeros in the others up to
// `columns`; returns their sum.
float exponentials(float* row, int64_t first, int64_t last, int64_t columns, float scale) {
  std::fill(row, row + first, -INFINITY);
  std::fill(row + last, row + columns, -INFINITY);
  Floats most = all(-INFINITY), sum = {};
  for (int64_t k = 0; k < columns; k += kLanes) most = larger(most, load(row + k));
  const Floats largest = all(largest_of(most));
  for (int64_t k = 0; k < columns; k += kLanes) {
    const Floats weights = exp((load(row + k) - largest) * scale);  // hidden: e^-87
    sum += weights;
    store(row + k, weights);
  }
  return sum_of(sum);
}

// One head of one text.
struct Head {
  const Tokens &query, &key, &value, &out;
  int64_t first, length;  // tokens
  int64_t number, kv_number;
  float scale;
  int64_t window;  // keys less than this many positions away are visible

  void attend() const {
    static thread_local std::vector<float> kept;
    const int64_t width = query.sizes[2], columns = round_up(length), wide = round_up(width);
    kept.assign(columns * (width + wide + kRows) + kRows * wide, 0.0f);
    float* const keys = kept.data();             // (width, columns)
    float* const values = keys + width * columns;  // (columns, wide)
    float* const scores = values + columns * wide;  // (kRows, columns)
    float* const sums = scores + kRows * columns;  // (kRows, wide)
    for (int64_t k = 0; k < length; k++) {
      const float* from = key.at(first + k, kv_number);
      for (int64_t e = 0; e < width; e++) keys[e * columns + k] = from[e];
      std::copy_n(value.at(first + k, kv_number), width, values + k * wide);
    }
    for (int64_t t = 0; t < length; t += kRows) {
      const int64_t some = std::min(kRows, length - t);
      // Keys that some of these queries see, from a multiple of kLanes on.
      const int64_t from = std::max<int64_t>(0, t - window + 1) / kLanes * kLanes;
      const int64_t to = round_up(std::min(length, t + some - 1 + window));
      const float* q = query.at(first + t, number);
      with_rows(some, [&](auto fixed) {
        rows_product<decltype(fixed)::value>(keys + from, columns, q, query.strides[0], width,
                                             to - from, scores, columns);
      });
      float inverse[kRows];
      for (int64_t i = 0; i < some; i++) {
        const int64_t low = std::max<int64_t>(0, t + i - window + 1);
        const int64_t high = std::min(length, t + i + window);
        inverse[i] = 1 / exponentials(scores + i * columns, low - from, high - from, to - from, scale);
      }
      with_rows(some, [&](auto fixed) {
        rows_product<decltype(fixed)::value>(values + from * wide, wide, scores, columns,
                                             std::min(length, to) - from, wide, sums, wide);
      });
      for (int64_t i = 0; i < some; i++) {
        float* row = out.at(first + t + i, number);
        for (int64_t e = 0; e < width; e++) row[e] = sums[i * wide + e] * inverse[i];
      }
    }
  }
};
}  // namespace

// query (N, H, E), key and value (N, G, E), G of which each serves H / G adjacent query heads,
// starts (B + 1) of the texts and the number of all tokens, and the result (N, H, E), contiguous.
// window: as in `Head`, 0: all keys of the text are visible.
extern "C" AOTITorchError aoti_torch_cpu_heedful_text_attention(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle starts,
    double scale, int64_t window, AtenTensorHandle* ret0) {
  Tokens q, k, v, out;
  int64_t count;
  const int64_t* begins;
  if (q.read(query) || k.read(key) || v.read(value) || data(starts, begins)) return 1;
  if (auto error = aoti_torch_get_size(starts, 0, &count)) return error;
  const int64_t strides[] = {q.sizes[1] * q.sizes[2], q.sizes[2], 1};
  if (auto error = aoti_torch_empty_strided(3, q.sizes, strides, aoti_torch_dtype_float32(),
                                            aoti_torch_device_type_cpu(), 0, ret0))
    return error;
  if (out.read(*ret0)) return 1;
  const WithoutPythonLock unlocked;
  const int64_t heads = q.sizes[1], repeats = heads / k.sizes[1];
#pragma omp parallel for schedule(dynamic) collapse(2)
  for (int64_t b = 0; b < count - 1; b++)
    for (int64_t h = 0; h < heads; h++) {
      const int64_t length = begins[b + 1] - begins[b];
      const int64_t reach = window ? std::min(window, length) : length;
      Head{q, k, v, out, begins[b], length, h, h / repeats, float(scale), reach}.attend();
    }
  return 0;
}
