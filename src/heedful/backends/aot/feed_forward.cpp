// A whole feed-forward network in int8: (act(x W₁ᵀ + b₁)) W₂ᵀ + b₂, or gated, with the first half of
// the hidden units through the activation as gate of the second half. A block of rows passes
// through both products while its hidden units are in the cache.
#include <vector>

#include "products.h"
#include "python_lock.h"
#include "tensors.h"

namespace {
// The activation of a row of hidden units in place, and the largest magnitude of the result; units
// is a multiple of kLanes up to which both halves may be read and written.
template <Activation A>
float activate_row(float* hidden, int64_t units, bool is_gated) {
  Floats most = {};
  for (int64_t f = 0; f < units; f += kLanes) {
    Floats value = activate<A>(load(hidden + f));
    if (is_gated) value *= load(hidden + units + f);
    most = larger(most, magnitude(value));
    store(hidden + f, value);
  }
  return largest_of(most);
}

float activate_row(int64_t activation, float* hidden, int64_t units, bool is_gated) {
  switch (activation) {
    case kRelu: return activate_row<kRelu>(hidden, units, is_gated);
    case kGelu: return activate_row<kGelu>(hidden, units, is_gated);
    case kGeluTanh: return activate_row<kGeluTanh>(hidden, units, is_gated);
    default: return activate_row<kSilu>(hidden, units, is_gated);
  }
}
}  // namespace

// x (M, D) and y (M, D) in float32; two layers as in packed.cpp, `up` to F or 2 F units and `down`
// from F, a multiple of 16.
extern "C" AOTITorchError aoti_torch_cpu_heedful_int8_feed_forward(
    AtenTensorHandle x, AtenTensorHandle up_weight, AtenTensorHandle up_scale,
    AtenTensorHandle up_shift, AtenTensorHandle up_bias, AtenTensorHandle down_weight,
    AtenTensorHandle down_scale, AtenTensorHandle down_shift, AtenTensorHandle down_bias,
    int64_t activation, AtenTensorHandle* ret0) {
  int64_t rows;
  Int8Layer up, down;
  const float* given;
  float* y;
  if (aoti_torch_get_size(x, 0, &rows) || read(up_weight, up_scale, up_shift, up_bias, up) ||
      read(down_weight, down_scale, down_shift, down_bias, down))
    return 1;
  if (auto error = new_matrix(rows, down.outputs, ret0)) return error;
  if (data(x, given) || data(*ret0, y)) return 1;
  const WithoutPythonLock unlocked;
  const bool is_gated = up.outputs > down.inputs;
#pragma omp parallel
  {
    static thread_local std::vector<Byte> bytes, hidden_bytes;
    static thread_local std::vector<float> hidden;
    bytes.resize(kBlock * up.inputs);
    hidden_bytes.resize(kBlock * down.inputs);
    hidden.resize(kBlock * up.outputs);
    float scales[kBlock];
#pragma omp for schedule(dynamic)
    for (int64_t m = 0; m < rows; m += kBlock) {
      const int64_t some = std::min(kBlock, rows - m);
      for (int64_t i = 0; i < some; i++)
        scales[i] = quantize(given + (m + i) * up.inputs, up.inputs, &bytes[i * up.inputs]);
      for (int64_t first = 0; first < up.outputs; first += kOutputs)
        up.block(first, bytes.data(), scales, some, hidden.data(), up.outputs);
      for (int64_t i = 0; i < some; i++) {
        float* row = &hidden[i * up.outputs];
        const float most = activate_row(activation, row, down.inputs, is_gated);
        scales[i] = to_bytes(row, down.inputs, most, &hidden_bytes[i * down.inputs]);
      }
      for (int64_t first = 0; first < down.outputs; first += kOutputs)
        down.block(first, hidden_bytes.data(), scales, some, y + m * down.outputs, down.outputs);
    }
  }
  return 0;
}
