// Vectors of floats and functions of them, as wide as the registers of the processor that they are
// compiled for: GCC computes comparisons of wider ones lane by lane.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

namespace {
#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int64_t kRegisters = 32;
#else
constexpr int64_t kRegisters = 16;
#endif
using Floats = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
using Ints = int32_t __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
using Eight = float __attribute__((vector_size(32), may_alias));
using Four = float __attribute__((vector_size(16), may_alias));

// A multiple of kLanes.
inline int64_t round_up(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Memory of floats as whole cache lines: a vector that crosses two lines is loaded twice as slowly.
struct alignas(64) Line {
  float floats[16];
};

inline std::vector<Line> lines_of(int64_t floats) { return std::vector<Line>((floats + 15) / 16); }

inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }

inline Ints load(const int32_t* from) { return *reinterpret_cast<const Ints*>(from); }

inline void store(float* to, Floats values) { *reinterpret_cast<Floats*>(to) = values; }

inline Floats all(float value) { return value - Floats{}; }

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline Floats magnitude(Floats x) {
  return reinterpret_cast<Floats>(reinterpret_cast<Ints>(x) & 0x7fffffff);
}

// The whole numbers nearest to x, halves to even; |x| < 2^22. A float of size 2^23 has no fraction:
// adding 1.5 · 2^23 rounds x and leaves it in the lowest bits.
inline Ints nearest(Floats x) { return reinterpret_cast<Ints>(x + 12582912.0f) - 0x4b400000; }

// The lanes of x as one number, by `combine` of two halves until one lane is left.
template <class Combine>
inline float reduced(Four x, Combine combine) {
  return combine(combine(x[0], x[2]), combine(x[1], x[3]));
}

template <class Combine>
inline float reduced(Eight x, Combine combine) {
  const Four* halves = reinterpret_cast<const Four*>(&x);
  return reduced(combine(halves[0], halves[1]), combine);
}

#ifdef __AVX512F__
template <class Combine>
inline float reduced(Floats x, Combine combine) {
  const Eight* halves = reinterpret_cast<const Eight*>(&x);
  return reduced(combine(halves[0], halves[1]), combine);
}
#endif

inline float sum_of(Floats x) {
  return reduced(x, [](auto a, auto b) { return a + b; });
}

inline float largest_of(Floats x) {
  return reduced(x, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x with a relative error below 4e-7; e^-87 for x below -87, e^88 for x above 88. With
// n = round(x / ln 2) it is 2^n e^r, where |r| <= ln 2 / 2 and e^r is its Taylor polynomial.
inline Floats exp(Floats x) {
  x = x < -87.0f ? all(-87.0f) : x;
  x = x > 88.0f ? all(88.0f) : x;
  const Ints n = nearest(x * 1.44269504f);
  const Floats whole = __builtin_convertvector(n, Floats);
  const Floats r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;  // ln 2 in two parts
  Floats p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * reinterpret_cast<Floats>((n + 127) << 23);
}

enum Activation : int64_t { kRelu, kGelu, kGeluTanh, kSilu };  // as `kernels.ACTIVATIONS`

// GELU, x Φ(x) = max(x, 0) - |x| Φ(-|x|), with an error below 1e-6 |x|. Φ(-|x|) is half of
// erfc(z) = (a1 t + ... + a5 t^5) e^(-z²), z = |x| / √2, t = 1 / (1 + p z) (Abramowitz and Stegun,
// 7.1.26).
inline Floats gelu(Floats x) {
  const Floats size = magnitude(x), t = 1.0f / (1.0f + (0.3275911f * 0.70710678f) * size);
  Floats q = t * (0.5f * 1.061405429f) - 0.5f * 1.453152027f;
  q = q * t + 0.5f * 1.421413741f;
  q = q * t - 0.5f * 0.284496736f;
  q = q * t + 0.5f * 0.254829592f;
  return larger(x, Floats{}) - size * (q * t * exp(-0.5f * x * x));
}

// x σ(x).
inline Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

template <Activation A>
inline Floats activate(Floats x) {
  if constexpr (A == kRelu) return larger(x, Floats{});
  if constexpr (A == kGelu) return gelu(x);
  // x (1 + tanh u) / 2 = x σ(2u), u = √(2/π) (x + 0.044715 x³)
  if constexpr (A == kGeluTanh)
    return x / (1.0f + exp(-1.59576912f * (x + 0.044715f * x * x * x)));
  return silu(x);
}
}  // namespace
