// y = x Wᵀ + b for few rows x, where what costs is reading W: it lies in the order of its reading.
// In int8 each row of x becomes unsigned bytes by a scale of its own, so that products and sums are
// whole numbers, which processors with VNNI work out 64 at a time. Compiled on the machine that it
// runs on, and called from compiled graphs through torch's C interface.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace {
constexpr int64_t kOutputs = 64, kRows = 6;  // of a tile, whose sums stay in registers
using Floats = float __attribute__((vector_size(64), aligned(4), may_alias));

// Sums (M, kOutputs) of rows of x (M, K) and one block of weights, (K, kOutputs).
template <int M>
void tile(const float* weight, const float* x, int64_t width, float* sums) {
  Floats sum[M][4] = {};
  for (int64_t k = 0; k < width; k++, weight += kOutputs) {
    const Floats* w = reinterpret_cast<const Floats*>(weight);
    for (int m = 0; m < M; m++)
      for (int j = 0; j < 4; j++) sum[m][j] += x[m * width + k] * w[j];
  }
  for (int m = 0; m < M; m++)
    for (int j = 0; j < 4; j++) reinterpret_cast<Floats*>(sums + m * kOutputs)[j] = sum[m][j];
}

// The same of bytes, four inputs of an output side by side: (K / 4, kOutputs, 4).
template <int M>
void tile(const int8_t* weight, const uint8_t* x, int64_t width, int32_t* sums) {
#ifdef __AVX512VNNI__
  __m512i sum[M][4];
  for (int m = 0; m < M; m++)
    for (int j = 0; j < 4; j++) sum[m][j] = _mm512_setzero_si512();
  for (int64_t k = 0; k < width; k += 4, weight += 4 * kOutputs) {
    __m512i w[4];
    for (int j = 0; j < 4; j++) w[j] = _mm512_loadu_si512(weight + 64 * j);
    for (int m = 0; m < M; m++) {
      int32_t four;
      std::memcpy(&four, x + m * width + k, 4);
      const __m512i all = _mm512_set1_epi32(four);
      for (int j = 0; j < 4; j++) sum[m][j] = _mm512_dpbusd_epi32(sum[m][j], all, w[j]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int j = 0; j < 4; j++) _mm512_storeu_si512(sums + m * kOutputs + 16 * j, sum[m][j]);
#else
  std::memset(sums, 0, sizeof(int32_t) * M * kOutputs);
  for (int64_t k = 0; k < width; k += 4, weight += 4 * kOutputs)
    for (int m = 0; m < M; m++) {
      const uint8_t* four = x + m * width + k;
      for (int64_t j = 0; j < kOutputs; j++)
        for (int i = 0; i < 4; i++)
          sums[m * kOutputs + j] += int32_t(four[i]) * int32_t(weight[4 * j + i]);
    }
#endif
}

template <class W, class X, class S>
void some_rows(int64_t count, const W* weight, const X* x, int64_t width, S* sums) {
  switch (count) {
    case 1: return tile<1>(weight, x, width, sums);
    case 2: return tile<2>(weight, x, width, sums);
    case 3: return tile<3>(weight, x, width, sums);
    case 4: return tile<4>(weight, x, width, sums);
    case 5: return tile<5>(weight, x, width, sums);
    default: return tile<6>(weight, x, width, sums);
  }
}

// All of y, by `finish(row, output, sum)` of each sum.
template <class W, class X, class S, class Finish>
void product(const W* weight, const X* x, float* y, const int64_t (&sizes)[3], S, Finish finish) {
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < sizes[2]; first += kOutputs) {
    const int64_t count = std::min(kOutputs, sizes[2] - first);
    S sums[kRows * kOutputs];
    for (int64_t m = 0; m < sizes[0]; m += kRows) {
      const int64_t some = std::min(kRows, sizes[0] - m);
      some_rows(some, weight + first * sizes[1], x + m * sizes[1], sizes[1], sums);
      for (int64_t i = 0; i < some; i++)
#pragma omp simd
        for (int64_t j = 0; j < count; j++)
          y[(m + i) * sizes[2] + first + j] = finish(m + i, first + j, sums[i * kOutputs + j]);
    }
  }
}

// Bytes 128 + round(x / scale), and the scale, of one row.
float quantize(const float* x, int64_t width, uint8_t* bytes) {
  float most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t k = 0; k < width; k++) most = std::max(most, std::fabs(x[k]));
  const float scale = most > 0 ? most / 127 : 1, inverse = 1 / scale;
#pragma omp simd
  for (int64_t k = 0; k < width; k++)
    bytes[k] = uint8_t(int32_t(std::nearbyint(x[k] * inverse)) + 128);
  return scale;
}

template <class T>
AOTITorchError data(AtenTensorHandle tensor, T*& pointer) {
  void* found;
  const auto error = aoti_torch_get_data_ptr(tensor, &found);
  pointer = static_cast<T*>(found);
  return error;
}

// Sizes M, K and N, and a new y (M, N).
AOTITorchError prepare(AtenTensorHandle x, AtenTensorHandle bias, int64_t (&sizes)[3],
                       AtenTensorHandle* y) {
  if (auto error = aoti_torch_get_size(x, 0, &sizes[0])) return error;
  if (auto error = aoti_torch_get_size(x, 1, &sizes[1])) return error;
  if (auto error = aoti_torch_get_size(bias, 0, &sizes[2])) return error;
  const int64_t shape[] = {sizes[0], sizes[2]}, strides[] = {sizes[2], 1};
  return aoti_torch_empty_strided(2, shape, strides, aoti_torch_dtype_float32(),
                                  aoti_torch_device_type_cpu(), 0, y);
}
}  // namespace

// x (M, K), weight (blocks, K, 64), bias (N) and y (M, N), all in float32.
extern "C" AOTITorchError aoti_torch_cpu_heedful_float32_linear(AtenTensorHandle x,
                                                                AtenTensorHandle weight,
                                                                AtenTensorHandle bias,
                                                                AtenTensorHandle* ret0) {
  int64_t sizes[3];
  const float *given, *w, *add;
  float* y;
  if (auto error = prepare(x, bias, sizes, ret0)) return error;
  if (data(x, given) || data(weight, w) || data(bias, add) || data(*ret0, y)) return 1;
  product(w, given, y, sizes, 0.0f, [=](int64_t, int64_t n, float sum) { return sum + add[n]; });
  return 0;
}

// x and y as above; weight (blocks, K / 4, 64, 4); scale, shift and bias (N), where shift is 128
// times the sum of an output's weights. y = (sum - shift) · scale of x · scale + bias.
extern "C" AOTITorchError aoti_torch_cpu_heedful_int8_linear(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale, AtenTensorHandle shift,
    AtenTensorHandle bias, AtenTensorHandle* ret0) {
  int64_t sizes[3];
  const float *given, *of_output, *add;
  const int8_t* w;
  const int32_t* minus;
  float* y;
  if (auto error = prepare(x, bias, sizes, ret0)) return error;
  if (data(x, given) || data(weight, w) || data(scale, of_output) || data(shift, minus) ||
      data(bias, add) || data(*ret0, y))
    return 1;
  static thread_local std::vector<uint8_t> bytes;
  static thread_local std::vector<float> scales;
  bytes.resize(sizes[0] * sizes[1]);
  scales.resize(sizes[0]);
  for (int64_t m = 0; m < sizes[0]; m++)
    scales[m] = quantize(given + m * sizes[1], sizes[1], &bytes[m * sizes[1]]);
  const uint8_t* read = bytes.data();
  const float* of_row = scales.data();
  product(w, read, y, sizes, int32_t(0), [=](int64_t m, int64_t n, int32_t sum) {
    return float(sum - minus[n]) * (of_row[m] * of_output[n]) + add[n];
  });
  return 0;
}
