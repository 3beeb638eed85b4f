// Elements of tensors, float32 or bfloat16, as vectors of floats.
#pragma once
#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace {
using Float32 = float;
struct Bfloat16 {
  uint16_t bits;  // the upper half of a float
};
using Unsigned = uint32_t __attribute__((vector_size(4 * kLanes), may_alias));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

enum ElementType : int64_t { kFloat32, kBfloat16 };  // as `library.ELEMENT_TYPES`

inline Floats load(const Bfloat16* from) {
  const Halves bits = *reinterpret_cast<const Halves*>(from);
  return reinterpret_cast<Floats>(__builtin_convertvector(bits, Unsigned) << 16);
}

// Rounds to the nearest, halves to even; NaN stays NaN.
inline void store(Bfloat16* to, Floats values) {
  const Unsigned bits = reinterpret_cast<Unsigned>(values);
  const Unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Unsigned result = values == values ? rounded : Unsigned{} + 0x7fc0u;
  *reinterpret_cast<Halves*>(to) = __builtin_convertvector(result, Halves);
}

inline Floats rounded(Floats values, const Float32*) { return values; }

// The values as they are after they were stored.
inline Floats rounded(Floats values, const Bfloat16*) {
  Bfloat16 stored[kLanes];
  store(stored, values);
  return load(stored);
}

// The first `count` elements, at most kLanes, and `fill` in the other lanes.
template <class T>
Floats load(const T* from, int64_t count, float fill) {
  T some[kLanes] = {};
  std::copy_n(from, count, some);
  Floats values = load(some);
  for (int64_t i = count; i < kLanes; i++) values[i] = fill;
  return values;
}

template <class T>
void store(T* to, Floats values, int64_t count) {
  T some[kLanes];
  store(some, values);
  std::copy_n(some, count, to);
}

// call(i, n) for each vector of n elements at i, all of kLanes but perhaps the last one.
template <class Call>
inline void for_vectors(int64_t count, Call call) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) call(i, kLanes);
  if (i < count) call(i, count - i);
}

// `load` or `store` of n elements.
template <class T>
inline Floats part(const T* from, int64_t n, float fill = 0) {
  return n == kLanes ? load(from) : load(from, n, fill);
}

template <class T>
inline void put(T* to, Floats values, int64_t n) {
  n == kLanes ? store(to, values) : store(to, values, n);
}

// call(pointer) with a null pointer to elements of the type.
template <class Call>
inline void with_type(int64_t type, Call call) {
  type == kBfloat16 ? call(static_cast<Bfloat16*>(nullptr)) : call(static_cast<Float32*>(nullptr));
}
}  // namespace
