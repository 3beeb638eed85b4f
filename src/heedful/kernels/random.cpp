// Masks of dropout from random bits: eight generators SFC64 side by side.
#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {
constexpr int64_t kStreams = 8;
constexpr int64_t kGroup = 4;  // streams of a thread, in one vector
using Words = uint64_t __attribute__((vector_size(8 * kGroup), aligned(8), may_alias));
using Levels = int16_t __attribute__((vector_size(8 * kGroup), aligned(2), may_alias));

// Stream k is SFC64 (Doty-Humphrey 2010, PractRand) with the seed (seed, k, 0); the first 18
// numbers are left out, as in PractRand.
struct Streams {
  Words a, b, c = {}, count = Words{} + 1;

  Streams(uint64_t seed, uint64_t first) : a(Words{} + seed), b(Words{0, 1, 2, 3} + first) {
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
                                  int64_t threads) {
  const Levels least = Levels{} + int16_t(first_kept);
  const int64_t size = (count + 4 * kStreams - 1) / (4 * kStreams);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t group = 0; group < kStreams; group += kGroup) {
    Streams streams(seed, group);
    int16_t* parts[kGroup];
    for (int64_t k = 0; k < kGroup; k++) parts[k] = keep + 4 * (group + k) * size;
    const int64_t left = keep + count - parts[kGroup - 1];  // for the last stream of the group
    const int64_t whole = std::clamp<int64_t>(left / 4, 0, size);
    for (int64_t step = 0; step < size; step++) {
      const Words words = streams.next();
      const Levels kept = (reinterpret_cast<const Levels&>(words) >= least) & 1;
      for (int64_t k = 0; k < kGroup; k++) {
        const int16_t* four = reinterpret_cast<const int16_t*>(&kept) + 4 * k;
        int16_t* to = parts[k] + 4 * step;
        if (step < whole)
          std::memcpy(to, four, 8);
        else
          std::copy_n(four, std::clamp<int64_t>(keep + count - to, 0, 4), to);
      }
    }
  }
}
