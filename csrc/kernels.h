// What the kernels share with the code that calls them: plain structs and function tables.
//
// Included by the kernel translation units, which are compiled once per instruction set, so
// nothing here may define an inline function: the linker keeps one copy of those, and it could
// be the one with the widest instructions.
#pragma once

#include <stdint.h>

namespace headrace {

// Every factor of a call, rounded to fp32 once by headrace/kernels/coefficients.py, which
// documents them. The order of the fields is the order of `Coefficients.packed`.
struct Coefficients {
  float grad_scale;           // multiplies every gradient element
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float eps;
  float inverse_correction2;  // 1 / sqrt(1 - beta2^step)
  float step_size;            // learning_rate / (1 - beta1^step)
  float decay;                // learning_rate * weight_decay
  float beta1;                // invert: exp_avg is divided by it
  float inverse_keep;         // invert: 1 / (1 - decay)
  float first_delta;          // correct: (1 - beta1) * (scale - applied_scale)
  float second_delta;         // correct: (1 - beta2) * (scale^2 - applied_scale^2)
  float second_floor;         // correct: (1 - beta2) * scale^2
};

// Largest magnitudes, as bit patterns of non-negative fp32 values, that results may have.
struct Limits {
  int32_t weight;
  int32_t exp_avg;
  int32_t exp_avg_sq;
};

// The flat arrays of one call. Element i of all of them belongs to parameter i; `hi` and `lo`
// are used when the master is split, `weight` when it is plain fp32; `grad` holds bf16 bits or
// fp32 values. No two of them overlap.
struct Buffers {
  uint16_t* hi;
  int16_t* lo;
  float* weight;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;
};

enum Operation : int { kUpdate = 0, kInvert = 1, kCorrect = 2, kNumOperations = 3 };

// What of the results is stored. `kWeights` and then `kMoments`, with the same gradient, leave
// what `kEverything` does: new moments depend on no weight. Only updates are stored in two parts.
enum Store : int { kNothing = 0, kEverything = 1, kWeights = 2, kMoments = 3, kNumStores = 4 };

// Applies an operation to the elements [begin, end), or only evaluates it (kNothing). Returns
// whether any result is beyond `limits`; a NaN counts as beyond. kMoments looks at no weight.
using RangeKernel = bool (*)(const Buffers&, const Coefficients&, const Limits&, int64_t begin,
                             int64_t end);

struct KernelTable {
  // [operation][master is split][gradient is bf16][store]; null where there is no such store.
  RangeKernel range[kNumOperations][2][2][kNumStores];
  // Largest magnitude of the elements, as the bits of a non-negative fp32 (NaN above infinity).
  int32_t (*largest_bfloat16)(const uint16_t* grad, int64_t begin, int64_t end);
  int32_t (*largest_float32)(const float* grad, int64_t begin, int64_t end);
  // False when an element's hi would not be finite; then nothing of the range is stored.
  bool (*split)(const float* value, uint16_t* hi, int16_t* lo, int64_t begin, int64_t end,
                bool store);
  void (*join)(const uint16_t* hi, const int16_t* lo, float* out, int64_t begin, int64_t end);
  // Streams for measuring what the memory can do.
  void (*copy_streaming)(float* target, const float* source, int64_t begin, int64_t end);
  void (*negate)(float* values, int64_t begin, int64_t end);
};

#if defined(__x86_64__)
namespace isa_v1 { extern const KernelTable table; }
namespace isa_v3 { extern const KernelTable table; }
namespace isa_v4 { extern const KernelTable table; }
#else
namespace isa_generic { extern const KernelTable table; }
#endif

}  // namespace headrace
