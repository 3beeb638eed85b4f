// Dropout alone, and with the residual connection and the norm that follow it.
#include <cmath>
#include <vector>

#include "elements.h"
#include "mask.h"

namespace {
constexpr int64_t kPart = 1 << 14;  // elements of a thread at a time

// call(null pointer of the type, i, n) for each vector of n elements at index i, of `count` elements.
template <class Call>
void for_elements(int64_t type, int64_t count, int64_t threads, Call call) {
  with_type(type, [&](auto* null) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t first = 0; first < count; first += kPart)
      for_vectors(std::min(kPart, count - first),
                  [&](int64_t j, int64_t n) { call(null, first + j, n); });
  });
}
}  // namespace

// out = x · mask · scale, of `count` elements.
extern "C" void heedful_dropout(int64_t type, const void* x, const int16_t* keep, double scale,
                                void* out, int64_t count, int64_t threads) {
  const Mask mask{keep, float(scale)};
  for_elements(type, count, threads, [&](auto* null, int64_t i, int64_t n) {
    using T = std::remove_pointer_t<decltype(null)>;
    put(static_cast<T*>(out) + i, mask.drop<T>(part(static_cast<const T*>(x) + i, n), i, n), n);
  });
}

// out = max(x, 0) · mask · scale, of `count` elements. NaN stays NaN.
extern "C" void heedful_relu_dropped(int64_t type, const void* x, const int16_t* keep, double scale,
                                     void* out, int64_t count, int64_t threads) {
  const Mask mask{keep, float(scale)};
  for_elements(type, count, threads, [&](auto* null, int64_t i, int64_t n) {
    using T = std::remove_pointer_t<decltype(null)>;
    const Floats value = part(static_cast<const T*>(x) + i, n);
    put(static_cast<T*>(out) + i, mask.drop<T>(value < 0.0f ? Floats{} : value, i, n), n);
  });
}

// The gradient of `heedful_relu_dropped`: kept elements above 0 are those whose `out` is above 0.
extern "C" void heedful_relu_dropped_backward(int64_t type, const void* out_grad, const void* out,
                                              double scale, void* x_grad, int64_t count,
                                              int64_t threads) {
  for_elements(type, count, threads, [&](auto* null, int64_t i, int64_t n) {
    using T = std::remove_pointer_t<decltype(null)>;
    const Floats grad = part(static_cast<const T*>(out_grad) + i, n) * float(scale);
    const Floats value = part(static_cast<const T*>(out) + i, n);
    put(static_cast<T*>(x_grad) + i, value <= 0.0f ? Floats{} : grad, n);
  });
}

// sum = x + dropout(y), of `count` elements; y has the type, x and sum are float32.
extern "C" void heedful_add_dropped(int64_t type, const float* x, const void* y,
                                    const int16_t* keep, double scale, float* sum, int64_t count,
                                    int64_t threads) {
  const Mask mask{keep, float(scale)};
  for_elements(type, count, threads, [&](auto* null, int64_t i, int64_t n) {
    using T = std::remove_pointer_t<decltype(null)>;
    const Floats added = part(static_cast<const T*>(y) + i, n);
    put(sum + i, part(x + i, n) + mask.drop<T>(added, i, n), n);
  });
}

// out = (sum - mean) / √(variance + eps) · weight + bias by row, sum = x + dropout(y), (N, D).
// statistics (N, 2): the mean and 1 / √(variance + eps).
extern "C" void heedful_add_norm(int64_t type, const float* x, const void* y, const int16_t* keep,
                                 double scale, const float* weight, const float* bias, double eps,
                                 float* sum, float* statistics, float* out, int64_t rows,
                                 int64_t width, int64_t threads) {
  const Mask mask{keep, float(scale)};
  with_type(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const T* added = static_cast<const T*>(y);
#pragma omp parallel for schedule(dynamic, 16) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
      const int64_t first = row * width;
      float* s = sum + first;
      Floats sums = {}, squares = {};
      for_vectors(width, [&](int64_t j, int64_t n) {
        const int64_t i = first + j;
        const Floats value = part(x + i, n) + mask.drop<T>(part(added + i, n), i, n);
        put(s + j, value, n);
        sums += value;  // zeros in other lanes
      });
      const float mean = sum_of(sums) / width;
      for_vectors(width, [&](int64_t j, int64_t n) {
        const Floats difference = part(s + j, n, mean) - mean;
        squares += difference * difference;
      });
      const float inverse = float(1 / std::sqrt(double(sum_of(squares)) / width + eps));
      statistics[2 * row] = mean;
      statistics[2 * row + 1] = inverse;
      for_vectors(width, [&](int64_t j, int64_t n) {
        const Floats normed = (part(s + j, n) - mean) * inverse;
        put(out + first + j, normed * part(weight + j, n) + part(bias + j, n), n);
      });
    }
  });
}

// Gradients of `heedful_add_norm`: x_grad (N, D) float32, y_grad (N, D) of the type, and
// parameter_grads (threads, 2, D), of weight and bias by the rows of each thread.
extern "C" void heedful_add_norm_backward(int64_t type, const float* out_grad, const float* sum,
                                          const float* statistics, const float* weight,
                                          const int16_t* keep, double scale,
                                          float* x_grad, void* y_grad, float* parameter_grads,
                                          int64_t rows, int64_t width, int64_t threads) {
  const Mask mask{keep, float(scale)};
  with_type(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    T* added_grad = static_cast<T*>(y_grad);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t thread = 0; thread < threads; thread++) {
      float* weight_grad = parameter_grads + thread * 2 * width;
      float* bias_grad = weight_grad + width;
      std::fill(weight_grad, weight_grad + 2 * width, 0.0f);
      const int64_t last = rows * (thread + 1) / threads;
      for (int64_t row = rows * thread / threads; row < last; row++) {
        const float mean = statistics[2 * row], inverse = statistics[2 * row + 1];
        const float *g = out_grad + row * width, *s = sum + row * width;
        Floats sums = {}, products = {};
        for_vectors(width, [&](int64_t j, int64_t n) {
          const Floats normed = (part(s + j, n, mean) - mean) * inverse, grad = part(g + j, n);
          const Floats scaled = grad * part(weight + j, n);
          sums += scaled;
          products += scaled * normed;
          put(weight_grad + j, part(weight_grad + j, n) + grad * normed, n);
          put(bias_grad + j, part(bias_grad + j, n) + grad, n);
        });
        const float of_mean = sum_of(sums) / width, of_normed = sum_of(products) / width;
        for_vectors(width, [&](int64_t j, int64_t n) {
          const int64_t i = row * width + j;
          const Floats normed = (part(s + j, n) - mean) * inverse;
          const Floats scaled = part(g + j, n) * part(weight + j, n);
          const Floats grad = (scaled - of_mean - normed * of_normed) * inverse;
          put(x_grad + i, grad, n);
          // Rounded first, as the gradient of a tensor of this type.
          put(added_grad + i, mask.drop<T>(rounded(grad, added_grad), i, n), n);
        });
      }
    }
  });
}
