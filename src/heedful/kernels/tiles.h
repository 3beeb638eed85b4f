// Products of a few rows of floats with a block of columns, whose sums stay in registers.
#pragma once
#include <cstdint>
#include <type_traits>
#include <utility>

#include "vectors.h"

namespace {
constexpr int64_t kRows = 6;  // of a tile
constexpr int64_t kVectors = kRegisters / 8;  // of a row of a tile, whose sums stay in registers

// Sums (M, V vectors) of rows of x (M, K) and weights (K, V vectors); rows lie `x_step` and `w_step`
// apart.
template <int M, int V>
void tile(const float* weight, int64_t w_step, const float* x, int64_t x_step, int64_t width,
          float* sums, int64_t s_step) {
  Floats sum[M][V] = {};
#pragma GCC unroll 8
  for (int64_t k = 0; k < width; k++, weight += w_step)
    for (int m = 0; m < M; m++)
      for (int j = 0; j < V; j++) sum[m][j] += x[m * x_step + k] * load(weight + kLanes * j);
  for (int m = 0; m < M; m++)
    for (int j = 0; j < V; j++) store(sums + m * s_step + kLanes * j, sum[m][j]);
}

// `call` with the number of rows of a tile, from 1 to kRows, as a constant.
template <class Call>
void with_rows(int64_t count, Call call) {
  switch (count) {
    case 1: return call(std::integral_constant<int, 1>());
    case 2: return call(std::integral_constant<int, 2>());
    case 3: return call(std::integral_constant<int, 3>());
    case 4: return call(std::integral_constant<int, 4>());
    case 5: return call(std::integral_constant<int, 5>());
    default: return call(std::integral_constant<int, 6>());
  }
}

// Sums (M, columns) of rows of x (M, K) and weights (K, columns); columns is a multiple of kLanes.
template <int M>
void rows_product(const float* weight, int64_t w_step, const float* x, int64_t x_step,
                  int64_t width, int64_t columns, float* sums, int64_t s_step) {
  int64_t n = 0;
  for (; n + kVectors * kLanes <= columns; n += kVectors * kLanes)
    tile<M, kVectors>(weight + n, w_step, x, x_step, width, sums + n, s_step);
  switch ((columns - n) / kLanes) {
    case 1: return tile<M, 1>(weight + n, w_step, x, x_step, width, sums + n, s_step);
    case 2: return tile<M, 2>(weight + n, w_step, x, x_step, width, sums + n, s_step);
    case 3: return tile<M, 3>(weight + n, w_step, x, x_step, width, sums + n, s_step);
  }
}

// Exchanges lanes of two rows of a square: those of `a` whose number has the bit S, and those of
// `b` whose number lacks it.
template <int S, int... lane>
inline void exchange(Floats& a, Floats& b, std::integer_sequence<int, lane...>) {
  const Floats low = __builtin_shufflevector(a, b, (lane & S ? kLanes + lane - S : lane)...);
  b = __builtin_shufflevector(a, b, (lane & S ? kLanes + lane : lane + S)...);
  a = low;
}

// Transposes a square whose blocks of 2 S rows and columns lie where they belong.
template <int S>
inline void transpose_blocks(Floats* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++)
    if (!(i & S)) exchange<S>(rows[i], rows[i + S], std::make_integer_sequence<int, kLanes>());
  if constexpr (S > 1) transpose_blocks<S / 2>(rows);
}

// to (columns, rows) from (rows, columns), by squares of kLanes: both are read and written up to
// the next multiple of kLanes in each direction.
inline void transpose(const float* from, int64_t from_step, int64_t rows, int64_t columns,
                      float* to, int64_t to_step) {
  for (int64_t i = 0; i < rows; i += kLanes)
    for (int64_t j = 0; j < columns; j += kLanes) {
      Floats square[kLanes];
      for (int64_t k = 0; k < kLanes; k++) square[k] = load(from + (i + k) * from_step + j);
      transpose_blocks<kLanes / 2>(square);
      for (int64_t k = 0; k < kLanes; k++) store(to + (j + k) * to_step + i, square[k]);
    }
}
}  // namespace
