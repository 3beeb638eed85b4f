// The mask of dropout.
#pragma once
#include <cstdint>

#include "elements.h"

namespace {
// Elements whose `keep` is not 0 are kept and scaled; null: all are, as they are.
struct Mask {
  const int16_t* keep;
  float scale;

  // The n elements `x` at index i after dropout, rounded to the type T.
  template <class T>
  Floats drop(Floats x, int64_t i, int64_t n) const {
    if (!keep) return x;
    using Shorts = int16_t __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
    Shorts some = {};
    if (n == kLanes)
      some = *reinterpret_cast<const Shorts*>(keep + i);
    else
      for (int64_t j = 0; j < n; j++) some[j] = keep[i + j];
    const T* type = nullptr;
    return __builtin_convertvector(some, Ints) != 0 ? rounded(x * scale, type) : Floats{};
  }
};
}  // namespace
