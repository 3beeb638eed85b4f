// Products of bytes with a block of columns, whose sums stay in registers, and the conversion of
// rows to bytes.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "tiles.h"

namespace {
constexpr int64_t kOutputs = 64;  // of a tile
constexpr int64_t kBlock = 8 * kRows;   // rows that pass through a layer together
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
using Byte = int8_t;
constexpr int kZero = 0;
#else
using Byte = uint8_t;
constexpr int kZero = 128;  // the byte of 0
#endif

// Sums (M, kOutputs) of rows of x (M, K), bytes from kZero - 127 to kZero + 127, and weights with
// four inputs of an output side by side: (K / 4, kOutputs, 4).
template <int M>
void tile(const int8_t* weight, const Byte* x, int64_t width, int32_t* sums) {
#if defined(__AVX512VNNI__)
  __m512i sum[M][4];
  for (int m = 0; m < M; m++)
    for (int j = 0; j < 4; j++) sum[m][j] = _mm512_setzero_si512();
#pragma GCC unroll 8  // 24 products per jump have half the rate (Zen 5)
  for (int64_t k = 0; k < width; k += 4, weight += 4 * kOutputs) {
    __m512i w[4];
    for (int j = 0; j < 4; j++) w[j] = _mm512_loadu_si512(weight + 64 * j);
    for (int m = 0; m < M; m++) {
      int32_t four;
      std::memcpy(&four, x + m * width + k, 4);
      const __m512i same = _mm512_set1_epi32(four);
      for (int j = 0; j < 4; j++) sum[m][j] = _mm512_dpbusd_epi32(sum[m][j], same, w[j]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int j = 0; j < 4; j++) _mm512_storeu_si512(sums + m * kOutputs + 16 * j, sum[m][j]);
#elif defined(__AVX2__)
  constexpr int kSome = M < 2 ? M : 2;  // rows, whose sums of 32 outputs fit in registers
  if constexpr (M > kSome)
    tile<M - kSome>(weight, x + kSome * width, width, sums + kSome * kOutputs);
  const __m256i one = _mm256_set1_epi16(1);
  for (int64_t first = 0; first < kOutputs; first += 32) {
    const int8_t* from = weight + 4 * first;
    __m256i sum[kSome][4];
    for (int m = 0; m < kSome; m++)
      for (int j = 0; j < 4; j++) sum[m][j] = _mm256_setzero_si256();
#pragma GCC unroll 2
    for (int64_t k = 0; k < width; k += 4, from += 4 * kOutputs) {
      __m256i w[4];
      for (int j = 0; j < 4; j++)
        w[j] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32 * j));
      for (int m = 0; m < kSome; m++) {
        int32_t four;
        std::memcpy(&four, x + m * width + k, 4);
        const __m256i same = _mm256_set1_epi32(four), size = _mm256_abs_epi8(same);
        // |x| · w sign(x): products of an unsigned and a signed byte, in pairs of at most 2 · 127².
        for (int j = 0; j < 4; j++) {
          const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(w[j], same));
          sum[m][j] = _mm256_add_epi32(sum[m][j], _mm256_madd_epi16(pairs, one));
        }
      }
    }
    for (int m = 0; m < kSome; m++)
      for (int j = 0; j < 4; j++) {
        auto* to = reinterpret_cast<__m256i*>(sums + m * kOutputs + first + 8 * j);
        _mm256_storeu_si256(to, sum[m][j]);
      }
  }
#else
  std::memset(sums, 0, sizeof(int32_t) * M * kOutputs);
  for (int64_t k = 0; k < width; k += 4, weight += 4 * kOutputs)
    for (int m = 0; m < M; m++) {
      const Byte* four = x + m * width + k;
#pragma omp simd
      for (int64_t j = 0; j < kOutputs; j++)
        for (int i = 0; i < 4; i++)
          sums[m * kOutputs + j] += int32_t(four[i]) * int32_t(weight[4 * j + i]);
    }
#endif
}

// A linear layer in int8 (`kernels.PackedInt8Linear`): weight (blocks, K / 4, kOutputs, 4); scale,
// shift and bias (N), where shift is 128 times the sum of an output's weights.
struct Int8Layer {
  const int8_t* weight;
  const float* scale;
  const int32_t* shift;
  const float* bias;
  int64_t inputs, outputs;

  // Outputs first to first + kOutputs of y (M, N), for bytes x (M, K) with a scale for each row:
  // y = (sum - shift) · scale of x · scale + bias; without the shift where kZero is 0.
  void block(int64_t first, const Byte* x, const float* x_scale, int64_t rows, float* y,
             int64_t y_step) const {
    const int64_t count = std::min(kOutputs, outputs - first);
    int32_t sums[kRows * kOutputs];
    for (int64_t m = 0; m < rows; m += kRows) {
      const int64_t some = std::min(kRows, rows - m);
      with_rows(some, [&](auto fixed) {
        tile<decltype(fixed)::value>(weight + first * inputs, x + m * inputs, inputs, sums);
      });
      for (int64_t i = 0; i < some; i++)
        finish(first, count, sums + i * kOutputs, x_scale[m + i], y + (m + i) * y_step + first);
    }
  }

  // y of one row, from its sums for outputs first to first + count.
  void finish(int64_t first, int64_t count, const int32_t* sums, float x_scale, float* y) const {
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) {
      Ints sum = load(sums + j);
      if constexpr (kZero != 0) sum -= load(shift + first + j);
      const Floats product = __builtin_convertvector(sum, Floats) * x_scale;
      store(y + j, product * load(scale + first + j) + load(bias + first + j));
    }
    for (; j < count; j++) {
      const int32_t sum = kZero ? sums[j] - shift[first + j] : sums[j];
      y[j] = float(sum) * x_scale * scale[first + j] + bias[first + j];
    }
  }
};

// Bytes kZero + round(x / scale), and the scale, of one row whose largest magnitude is `most`.
inline float to_bytes(const float* x, int64_t width, float most, Byte* bytes) {
  using Bytes = Byte __attribute__((vector_size(kLanes * sizeof(Byte)), aligned(1), may_alias));
  const float scale = most > 0 ? most / 127 : 1, inverse = 1 / scale;
  int64_t k = 0;
  for (; k + kLanes <= width; k += kLanes)
    *reinterpret_cast<Bytes*>(bytes + k) =
        __builtin_convertvector(nearest(load(x + k) * inverse) + kZero, Bytes);
  for (; k < width; k++) bytes[k] = Byte(int32_t(std::nearbyint(x[k] * inverse)) + kZero);
  return scale;
}

// The same, of any row.
inline float quantize(const float* x, int64_t width, Byte* bytes) {
  Floats sizes = {};
  int64_t k = 0;
  for (; k + kLanes <= width; k += kLanes) sizes = larger(sizes, magnitude(load(x + k)));
  float most = largest_of(sizes);
  for (; k < width; k++) most = std::max(most, std::fabs(x[k]));
  return to_bytes(x, width, most, bytes);
}
}  // namespace
