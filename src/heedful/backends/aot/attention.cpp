// softmax(q kᵀ + bias) v for few queries over the keys and values of a cache, where they lie. What
// costs is reading those: slot by slot for all heads, each once, and no slot that no query sees.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>
#include <omp.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "vectors.h"

namespace {
constexpr int64_t kAhead = 4;  // slots that are asked for before they are needed, into L2
constexpr float kBlocked = -1e30f;  // a bias below says that nothing is to be seen

// A tensor of four dimensions, the last of them contiguous. A dimension of one is one of any size.
struct View {
  float* data;
  int64_t sizes[4], strides[4];

  AOTITorchError read(AtenTensorHandle tensor) {
    void* found;
    if (auto error = aoti_torch_get_data_ptr(tensor, &found)) return error;
    data = static_cast<float*>(found);
    for (int64_t i = 0; i < 4; i++) {
      if (auto error = aoti_torch_get_size(tensor, i, &sizes[i])) return error;
      if (auto error = aoti_torch_get_stride(tensor, i, &strides[i])) return error;
      if (sizes[i] == 1) strides[i] = 0;
    }
    return strides[3] > 1;
  }

  float* at(int64_t b, int64_t h, int64_t t) const {
    return data + b * strides[0] + h * strides[1] + t * strides[2];
  }
};

// The sum of products; `ahead` numbers on begins what will be read soon.
float dot(const float* a, const float* b, int64_t width, int64_t ahead) {
  Floats sums = {};
  int64_t e = 0;
  for (; e + kLanes <= width; e += kLanes) {
    __builtin_prefetch(b + e + ahead, 0, 2);
    sums += load(a + e) * load(b + e);
  }
  float sum = sum_of(sums);
  for (; e < width; e++) sum += a[e] * b[e];
  return sum;
}

// sums += weight · row.
void add(float weight, const float* row, float* sums, int64_t width, int64_t ahead) {
  int64_t e = 0;
  for (; e + kLanes <= width; e += kLanes) {
    __builtin_prefetch(row + e + ahead, 0, 2);
    store(sums + e, load(sums + e) + weight * load(row + e));
  }
  for (; e < width; e++) sums[e] += weight * row[e];
}

// Heads `first` to `last` of one text.
void attend(const View& query, const View& key, const View& value, const View& bias,
            const View& out, int64_t b, int64_t first, int64_t last) {
  const int64_t queries = query.sizes[2], slots = key.sizes[2], width = query.sizes[3];
  const int64_t heads = last - first, of_query = query.strides[1], of_bias = bias.strides[1];
  static thread_local std::vector<float> kept;
  kept.assign(queries * heads * slots, -INFINITY);
  float* const weights = kept.data();  // (queries, heads, slots)
  for (int64_t k = 0; k < slots; k++)
    for (int64_t t = 0; t < queries; t++) {
      const float *q = query.at(b, first, t), *row = key.at(b, first, k);
      const float* add = bias.at(b, first, t) + k;
      if (*add < kBlocked) continue;
      const int64_t step = key.strides[1], ahead = kAhead * key.strides[2];
      float* weight = weights + t * heads * slots + k;
      for (int64_t h = 0; h < heads; h++, q += of_query, row += step, add += of_bias)
        weight[h * slots] = dot(q, row, width, ahead) + *add;
    }
  for (int64_t i = 0; i < queries * heads; i++) {
    float *row = weights + i * slots, sum = 0;
    const float most = *std::max_element(row, row + slots);
    for (int64_t k = 0; k < slots; k++)
      if (row[k] > -INFINITY) sum += row[k] = std::exp(row[k] - most);
    const float scale = sum > 0 ? 1 / sum : 0;
    for (int64_t k = 0; k < slots; k++) row[k] *= scale;
    std::fill_n(out.at(b, first + i % heads, i / heads), width, 0.0f);
  }
  for (int64_t k = 0; k < slots; k++)
    for (int64_t t = 0; t < queries; t++) {
      if (bias.at(b, first, t)[k] < kBlocked) continue;
      const float *row = value.at(b, first, k), *weight = weights + t * heads * slots + k;
      const int64_t step = value.strides[1], ahead = kAhead * value.strides[2];
      float* sums = out.at(b, first, t);
      for (int64_t h = 0; h < heads; h++, row += step, sums += out.strides[1])
        add(weight[h * slots], row, sums, width, ahead);
    }
}
}  // namespace

// query (B, H, T, E), which is scaled, key and value (B, H, K, E), bias (#B, #H, #T, K), and the
// result (B, H, T, E), which lies as (B, T, H, E); all in float32.
extern "C" AOTITorchError aoti_torch_cpu_heedful_attention(AtenTensorHandle query,
                                                           AtenTensorHandle key,
                                                           AtenTensorHandle value,
                                                           AtenTensorHandle bias,
                                                           AtenTensorHandle* ret0) {
  View q, k, v, added, out;
  if (q.read(query) || k.read(key) || v.read(value) || added.read(bias)) return 1;
  const int64_t texts = q.sizes[0], heads = q.sizes[1], queries = q.sizes[2], width = q.sizes[3];
  const int64_t strides[] = {queries * heads * width, width, heads * width, 1};
  if (auto error = aoti_torch_empty_strided(4, q.sizes, strides, aoti_torch_dtype_float32(),
                                            aoti_torch_device_type_cpu(), 0, ret0))
    return error;
  if (out.read(*ret0)) return 1;
  const int64_t parts = std::min<int64_t>(texts == 1 ? omp_get_max_threads() : 1, heads);
#pragma omp parallel for schedule(dynamic) collapse(2)
  for (int64_t b = 0; b < texts; b++)
    for (int64_t part = 0; part < parts; part++)
      attend(q, k, v, added, out, b, part * heads / parts, (part + 1) * heads / parts);
  return 0;
}
