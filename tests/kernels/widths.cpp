// Prints the number of lanes of a vector, then whether the functions of vectors and tiles agree with
// loops over single numbers.
#include <cmath>
#include <cstdio>
#include <vector>

#include "elements.h"
#include "products.h"

namespace {
// Numbers from -1 to 1 without a pattern.
std::vector<float> numbers(int64_t count) {
  std::vector<float> found(count);
  uint32_t state = 1;
  for (float& x : found) {
    state = state * 1664525u + 1013904223u;
    x = float(state >> 8) / (1 << 23) - 1;
  }
  return found;
}

bool near(double a, double b) { return std::fabs(a - b) <= 1e-5 * (1 + std::fabs(b)); }

bool reduces() {
  const auto x = numbers(kLanes);
  float sum = 0, most = -2;
  for (float one : x) sum += one, most = std::max(most, one);
  return near(sum_of(load(x.data())), sum) && largest_of(load(x.data())) == most;
}

bool exponentials() {
  const auto x = numbers(kLanes);
  std::vector<float> y(kLanes);
  store(y.data(), exp(load(x.data()) * 80.0f));
  for (int64_t i = 0; i < kLanes; i++)
    if (!near(std::log(y[i]), x[i] * 80.0f)) return false;
  return true;
}

bool multiplies(int64_t rows, int64_t inner, int64_t columns) {
  const auto x = numbers(rows * inner), w = numbers(inner * columns);
  std::vector<float> sums(rows * columns);
  with_rows(rows, [&](auto fixed) {
    rows_product<decltype(fixed)::value>(w.data(), columns, x.data(), inner, inner, columns,
                                         sums.data(), columns);
  });
  for (int64_t m = 0; m < rows; m++)
    for (int64_t n = 0; n < columns; n++) {
      double sum = 0;
      for (int64_t k = 0; k < inner; k++) sum += double(x[m * inner + k]) * w[k * columns + n];
      if (!near(sums[m * columns + n], sum)) return false;
    }
  return true;
}

// Whole numbers of both ends of their ranges: sums of products must not overflow.
bool multiplies_bytes(int64_t rows, int64_t inner) {
  std::vector<Byte> x(rows * inner);
  std::vector<int8_t> w(inner * kOutputs);
  for (int64_t i = 0; i < rows * inner; i++)
    x[i] = Byte(kZero + (i % 7 ? 127 - i % 5 : i % 3 - 127));
  for (size_t i = 0; i < w.size(); i++) w[i] = int8_t(i % 11 ? 127 - i % 3 : -127);
  std::vector<int32_t> sums(rows * kOutputs);
  with_rows(rows, [&](auto fixed) {
    tile<decltype(fixed)::value>(w.data(), x.data(), inner, sums.data());
  });
  for (int64_t m = 0; m < rows; m++)
    for (int64_t n = 0; n < kOutputs; n++) {
      int32_t sum = 0;
      for (int64_t k = 0; k < inner; k++)
        sum += int32_t(x[m * inner + k]) * w[(k / 4 * kOutputs + n) * 4 + k % 4];
      if (sums[m * kOutputs + n] != sum) return false;
    }
  return true;
}

bool quantizes(int64_t width) {
  const auto x = numbers(width);
  std::vector<Byte> bytes(width);
  const float scale = quantize(x.data(), width, bytes.data());
  for (int64_t k = 0; k < width; k++)
    if (std::fabs((bytes[k] - kZero) * scale - x[k]) > 0.501f * scale) return false;
  return true;
}

bool transposes(int64_t rows, int64_t columns) {
  const auto x = numbers(rows * columns);
  std::vector<float> y(rows * columns);
  transpose(x.data(), columns, rows, columns, y.data(), rows);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++)
      if (y[j * rows + i] != x[i * columns + j]) return false;
  return true;
}

bool converts() {
  const auto x = numbers(kLanes);
  Bfloat16 stored[kLanes];
  store(stored, load(x.data()));
  for (int64_t i = 0; i < kLanes; i++)
    if (std::fabs(load(stored)[i] - x[i]) > std::fabs(x[i]) / 256) return false;
  return true;
}
}  // namespace

int main() {
  bool ok = reduces() && exponentials() && converts() && lines_of(17).size() == 2;
  for (int64_t rows = 1; rows <= kRows; rows++) {
    for (int64_t vectors = 1; vectors <= 9; vectors++)
      ok = ok && multiplies(rows, 5, vectors * kLanes);
    ok = ok && multiplies_bytes(rows, 4) && multiplies_bytes(rows, 1024);
  }
  ok = ok && quantizes(3) && quantizes(77);
  ok = ok && transposes(kLanes, kLanes) && transposes(3 * kLanes, 2 * kLanes);
  std::printf("%d %s\n", int(kLanes), ok ? "agrees" : "differs");
}
