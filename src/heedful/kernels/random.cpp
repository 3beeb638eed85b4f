// Masks of dropout from random bits: eight generators SFC64 side by side.
#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {
constexpr int64_t kStreams = 8, kLevels = 4 * kStreams;  // 16-bit numbers of a step of all streams
using Words = uint64_t __attribute__((vector_size(8 * kStreams), aligned(8), may_alias));
using Levels = int16_t __attribute__((vector_size(2 * kLevels), aligned(2), may_alias));

// Stream k is SFC64 (Doty-Humphrey 2010, PractRand) with the seed (seed, k, 0); the first 18
// numbers are left out, as in PractRand.
struct Streams {
  Words a, b = {0, 1, 2, 3, 4, 5, 6, 7}, c = {}, count = Words{} + 1;

  explicit Streams(uint64_t seed) : a(Words{} + seed) {
    for (int i = 0; i < 18; i++) next();
  }

  Words next() {
    const Words result = a + b + count;
    count += 1;
    a = b ^ (b >> 11);
    b = c + (c << 3);
    c = (c << 24 | c >> 40) + result;
    return result;
  }
};
}  // namespace

// keep: 1 where a 16-bit number is at least `first_kept`, else 0. Each stream has a part of it, of
// equal sizes in 64-bit numbers.
extern "C" void heedful_keep_mask(int64_t seed, int64_t first_kept, int16_t* keep, int64_t count,
                                  int64_t) {
  Streams streams(seed);
  const Levels least = Levels{} + int16_t(first_kept);
  const int64_t size = (count + kLevels - 1) / kLevels;
  for (int64_t step = 0; step < size; step++) {
    const Words words = streams.next();
    const Levels kept = (reinterpret_cast<const Levels&>(words) >= least) & 1;
    for (int64_t k = 0; k < kStreams; k++) {
      const int64_t first = 4 * (k * size + step), some = std::min<int64_t>(4, count - first);
      const int16_t* four = reinterpret_cast<const int16_t*>(&kept) + 4 * k;
      if (some == 4)
        std::memcpy(keep + first, four, 8);
      else if (some > 0)
        std::copy_n(four, some, keep + first);
    }
  }
}
