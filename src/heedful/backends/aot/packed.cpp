// y = x Wᵀ + b with weights that lie in the order of their reading. In int8 each row of x becomes
// bytes by a scale of its own, so that products and sums are whole numbers, which
// processors with VNNI compute 64 at a time. Compiled on the machine that it runs on, and called
// from compiled graphs through torch's C interface.
#include <vector>

#include "products.h"
#include "python_lock.h"
#include "tensors.h"

// x (M, K), weight (blocks, K, 64), bias (N) and y (M, N), all in float32.
extern "C" AOTITorchError aoti_torch_cpu_heedful_float32_linear(AtenTensorHandle x,
                                                                AtenTensorHandle weight,
                                                                AtenTensorHandle bias,
                                                                AtenTensorHandle* ret0) {
  int64_t rows, inputs, outputs;
  const float *given, *w, *add;
  float* y;
  if (aoti_torch_get_size(x, 0, &rows) || aoti_torch_get_size(x, 1, &inputs) ||
      aoti_torch_get_size(bias, 0, &outputs))
    return 1;
  if (auto error = new_matrix(rows, outputs, ret0)) return error;
  if (data(x, given) || data(weight, w) || data(bias, add) || data(*ret0, y)) return 1;
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < outputs; first += kOutputs) {
    const int64_t count = std::min(kOutputs, outputs - first);
    float sums[kRows * kOutputs];
    for (int64_t m = 0; m < rows; m += kRows) {
      const int64_t some = std::min(kRows, rows - m);
      with_rows(some, [&](auto fixed) {
        rows_product<decltype(fixed)::value>(w + first * inputs, kOutputs, given + m * inputs,
                                             inputs, inputs, kOutputs, sums, kOutputs);
      });
      for (int64_t i = 0; i < some; i++)
#pragma omp simd
        for (int64_t j = 0; j < count; j++)
          y[(m + i) * outputs + first + j] = sums[i * kOutputs + j] + add[first + j];
    }
  }
  return 0;
}

// x and y as above; an `Int8Layer`. Python's lock is released meanwhile if `releases_lock` is not 0.
extern "C" AOTITorchError aoti_torch_cpu_heedful_int8_linear(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale, AtenTensorHandle shift,
    AtenTensorHandle bias, int64_t releases_lock, AtenTensorHandle* ret0) {
  int64_t rows;
  Int8Layer layer;
  const float* given;
  float* y;
  if (aoti_torch_get_size(x, 0, &rows) || read(weight, scale, shift, bias, layer)) return 1;
  if (auto error = new_matrix(rows, layer.outputs, ret0)) return error;
  if (data(x, given) || data(*ret0, y)) return 1;
  const WithoutPythonLock unlocked(releases_lock != 0);
  static thread_local std::vector<Byte> kept_bytes;
  static thread_local std::vector<float> kept_scales;
  kept_bytes.resize(rows * layer.inputs);
  kept_scales.resize(rows);
  Byte* const bytes = kept_bytes.data();  // of this thread, for all of its team
  float* const scales = kept_scales.data();
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t m = 0; m < rows; m++)
      scales[m] = quantize(given + m * layer.inputs, layer.inputs, bytes + m * layer.inputs);
#pragma omp for schedule(static) collapse(2)
    for (int64_t m = 0; m < rows; m += kBlock)
      for (int64_t first = 0; first < layer.outputs; first += kOutputs)
        layer.block(first, bytes + m * layer.inputs, scales + m, std::min(kBlock, rows - m),
                    y + m * layer.outputs, layer.outputs);
  }
  return 0;
}
