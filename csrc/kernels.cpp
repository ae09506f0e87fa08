// The host kernels: one plain loop each, vectorised by the compiler.
//
// Compiled once per instruction set with HEADRACE_ISA naming the namespace. The same operations
// in the same order on every element give the same bits everywhere: only + - * / and sqrt, which
// IEEE 754 rounds correctly, no contraction into fused multiply-adds (-ffp-contract=off), no
// reassociation. src/headrace/kernels/reference.py is the definition of those bits.
//
// No C++ standard header may be included here (see kernels.h), and every function stays inside
// this file's unnamed namespace.
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define HEADRACE_INLINE static inline __attribute__((always_inline))

namespace headrace {
namespace HEADRACE_ISA {
namespace {

// Elements between two rounds of prefetching; the loop over a full tile has a constant count.
constexpr int64_t kTile = 128;
// How far ahead of the loop the prefetches reach, and into which cache (2: the second level; the
// first is small and busy). The hardware prefetchers stop at page ends, and five streams through
// 4 KiB pages end often. Measured with 16 threads of a Xeon: 147 GB/s, without prefetching 127,
// reaching 2048 ahead 144, tiles of 512 at most 129; with 2 threads of a Zen 4: 53, without 53.
constexpr int64_t kAhead = 512;
constexpr int kPrefetchLevel = 2;
constexpr int64_t kCacheLine = 64;

constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kExponent = 0x7f800000;  // all zero in zeros and subnormals
constexpr int32_t kFirstInfiniteHi = 0x7f7f8000;  // rounds away to 0x7f80, infinity

HEADRACE_INLINE int32_t bits_of(float value) {
  int32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

HEADRACE_INLINE float value_of(int32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

HEADRACE_INLINE int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

HEADRACE_INLINE float gradient_of(uint16_t bits) {
  return value_of(static_cast<int32_t>(static_cast<uint32_t>(bits) << 16));
}
HEADRACE_INLINE float gradient_of(float value) { return value; }

HEADRACE_INLINE float joined(uint16_t hi, int16_t lo) {
  return value_of(static_cast<int32_t>((static_cast<uint32_t>(hi) << 16) +
                                       static_cast<uint32_t>(static_cast<int32_t>(lo))));
}

// Moments below the smallest normal number are stored as +0: they are far below anything that
// eps lets through, and arithmetic on subnormals costs a hundred cycles an element on many
// processors (rows of an embedding whose token is not seen decay to there in 800 steps).
HEADRACE_INLINE float flushed(float moment) {
  const int32_t bits = bits_of(moment);
  return value_of((bits & kExponent) == 0 ? 0 : bits);
}

// The bias-corrected direction of the step.
HEADRACE_INLINE float direction(float exp_avg, float exp_avg_sq, const Coefficients& c) {
  return exp_avg / (__builtin_sqrtf(exp_avg_sq) * c.inverse_correction2 + c.eps);
}

struct Element {
  float weight, exp_avg, exp_avg_sq;
};

template <int operation>
HEADRACE_INLINE Element applied(Element before, float raw_grad, const Coefficients& c);

// AdamW (Loshchilov & Hutter, arXiv:1711.05101). The step and the decay are added before either
// meets the weight, so that the master is rounded once.
template <>
inline __attribute__((always_inline)) Element applied<kUpdate>(Element e, float raw_grad,
                                                               const Coefficients& c) {
  const float grad = raw_grad * c.grad_scale;
  Element r;
  r.exp_avg = flushed(e.exp_avg + c.one_minus_beta1 * (grad - e.exp_avg));
  r.exp_avg_sq = flushed(c.beta2 * e.exp_avg_sq + (c.one_minus_beta2 * grad) * grad);
  r.weight = e.weight -
             (c.step_size * direction(r.exp_avg, r.exp_avg_sq, c) + c.decay * e.weight);
  return r;
}

// The state before an update, from the state after it and the same gradient.
template <>
inline __attribute__((always_inline)) Element applied<kInvert>(Element e, float raw_grad,
                                                               const Coefficients& c) {
  const float grad = raw_grad * c.grad_scale;
  Element r;
  r.weight = e.weight + (c.step_size * direction(e.exp_avg, e.exp_avg_sq, c) +
                         c.decay * e.weight) * c.inverse_keep;
  r.exp_avg = flushed((e.exp_avg - c.one_minus_beta1 * grad) / c.beta1);
  const float second = (e.exp_avg_sq - (c.one_minus_beta2 * grad) * grad) / c.beta2;
  r.exp_avg_sq = flushed(second < 0.0f ? 0.0f : second);
  return r;
}

// The state as if the gradient had been scaled by `scale` instead of `applied_scale`.
template <>
inline __attribute__((always_inline)) Element applied<kCorrect>(Element e, float raw_grad,
                                                                const Coefficients& c) {
  const float early = direction(e.exp_avg, e.exp_avg_sq, c);
  Element r;
  r.exp_avg = flushed(e.exp_avg + c.first_delta * raw_grad);
  const float second = e.exp_avg_sq + (c.second_delta * raw_grad) * raw_grad;
  const float floor = (c.second_floor * raw_grad) * raw_grad;  // its exact lower bound
  r.exp_avg_sq = flushed(second < floor ? floor : second);
  r.weight = e.weight + c.step_size * (early - direction(r.exp_avg, r.exp_avg_sq, c));
  return r;
}

template <int operation, bool is_split, typename Gradient, int store>
HEADRACE_INLINE void apply_run(const Buffers& buffers, const Gradient* grads,
                               const Coefficients& c, int64_t begin, int64_t num,
                               Limits& largest) {
  uint16_t* __restrict hi = is_split ? buffers.hi + begin : nullptr;
  int16_t* __restrict lo = is_split ? buffers.lo + begin : nullptr;
  float* __restrict weight = is_split ? nullptr : buffers.weight + begin;
  float* __restrict exp_avg = buffers.exp_avg + begin;
  float* __restrict exp_avg_sq = buffers.exp_avg_sq + begin;
  const Gradient* __restrict grad = grads + begin;
  Limits seen = largest;  // a copy that the stores below cannot alias
  for (int64_t i = 0; i < num; ++i) {
    Element e;
    e.weight = store == kMoments ? 0.0f : is_split ? joined(hi[i], lo[i]) : weight[i];
    e.exp_avg = exp_avg[i];
    e.exp_avg_sq = exp_avg_sq[i];
    const Element r = applied<operation>(e, gradient_of(grad[i]), c);
    const int32_t weight_bits = bits_of(r.weight);
    // As integers, so that NaNs are the largest magnitudes of all.
    if (store != kMoments) {
      seen.weight = larger(seen.weight, weight_bits & kMagnitude);
    }
    seen.exp_avg = larger(seen.exp_avg, bits_of(r.exp_avg) & kMagnitude);
    seen.exp_avg_sq = larger(seen.exp_avg_sq, bits_of(r.exp_avg_sq) & kMagnitude);
    if (store == kEverything || store == kMoments) {
      exp_avg[i] = r.exp_avg;
      exp_avg_sq[i] = r.exp_avg_sq;
    }
    if (store == kEverything || store == kWeights) {
      if (is_split) {
        // Half away from zero: the remainder is then exactly the low half as a signed number.
        hi[i] = static_cast<uint16_t>((static_cast<uint32_t>(weight_bits) + 0x8000u) >> 16);
        lo[i] = static_cast<int16_t>(static_cast<uint16_t>(weight_bits));
      } else {
        weight[i] = r.weight;
      }
    }
  }
  largest = seen;
}

template <typename T>
HEADRACE_INLINE void prefetch_tile(const T* base) {
  const char* first = reinterpret_cast<const char*>(base);
  for (int64_t offset = 0; offset < kTile * static_cast<int64_t>(sizeof(T));
       offset += kCacheLine) {
    __builtin_prefetch(first + offset, 0, kPrefetchLevel);
  }
}

template <int operation, bool is_split, typename Gradient, int store>
bool apply_range(const Buffers& buffers, const Coefficients& coefficients, const Limits& limits,
                 int64_t begin, int64_t end) {
  const Coefficients c = coefficients;
  const Gradient* grad = static_cast<const Gradient*>(buffers.grad);
  Limits largest{0, 0, 0};
  int64_t i = begin;
  for (; i + kTile <= end; i += kTile) {
    if (i + kAhead + kTile <= end) {
      const int64_t next = i + kAhead;
      if (store != kMoments && is_split) {
        prefetch_tile(buffers.hi + next);
        prefetch_tile(buffers.lo + next);
      } else if (store != kMoments) {
        prefetch_tile(buffers.weight + next);
      }
      prefetch_tile(buffers.exp_avg + next);
      prefetch_tile(buffers.exp_avg_sq + next);
      prefetch_tile(grad + next);
    }
    apply_run<operation, is_split, Gradient, store>(buffers, grad, c, i, kTile, largest);
  }
  apply_run<operation, is_split, Gradient, store>(buffers, grad, c, i, end - i, largest);
  return largest.weight > limits.weight || largest.exp_avg > limits.exp_avg ||
         largest.exp_avg_sq > limits.exp_avg_sq;
}

int32_t largest_bfloat16(const uint16_t* grad, int64_t begin, int64_t end) {
  int16_t largest = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int16_t magnitude = static_cast<int16_t>(grad[i] & 0x7fff);
    largest = magnitude > largest ? magnitude : largest;
  }
  return static_cast<int32_t>(largest) << 16;
}

int32_t largest_float32(const float* grad, int64_t begin, int64_t end) {
  int32_t largest = 0;
  for (int64_t i = begin; i < end; ++i) {
    largest = larger(largest, bits_of(grad[i]) & kMagnitude);
  }
  return largest;
}

bool split(const float* value, uint16_t* hi, int16_t* lo, int64_t begin, int64_t end,
           bool store) {
  if (!store) {
    return largest_float32(value, begin, end) < kFirstInfiniteHi;
  }
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t bits = static_cast<uint32_t>(bits_of(value[i]));
    hi[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    lo[i] = static_cast<int16_t>(static_cast<uint16_t>(bits));
  }
  return true;
}

void join(const uint16_t* hi, const int16_t* lo, float* out, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    out[i] = joined(hi[i], lo[i]);
  }
}

// Stores that bypass the caches: the target's lines are not read first.
void copy_streaming(float* target, const float* source, int64_t begin, int64_t end) {
  int64_t i = begin;
#if defined(__x86_64__)
  // Streaming stores need aligned targets.
  for (; i < end && reinterpret_cast<uintptr_t>(target + i) % kCacheLine != 0; ++i) {
    target[i] = source[i];
  }
#if defined(__AVX512F__)
  for (; i + 16 <= end; i += 16) {
    _mm512_stream_ps(target + i, _mm512_loadu_ps(source + i));
  }
#elif defined(__AVX__)
  for (; i + 8 <= end; i += 8) {
    _mm256_stream_ps(target + i, _mm256_loadu_ps(source + i));
  }
#else
  for (; i + 4 <= end; i += 4) {
    _mm_stream_ps(target + i, _mm_loadu_ps(source + i));
  }
#endif
  _mm_sfence();
#endif
  for (; i < end; ++i) {
    target[i] = source[i];
  }
}

void negate(float* values, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    values[i] = -values[i];
  }
}

}  // namespace

#define HEADRACE_KERNEL(operation, is_split, Gradient, store) \
  apply_range<operation, is_split, Gradient, store>
#define HEADRACE_STORES(operation, is_split, Gradient)                                           \
  {                                                                                              \
    HEADRACE_KERNEL(operation, is_split, Gradient, kNothing),                                    \
        HEADRACE_KERNEL(operation, is_split, Gradient, kEverything),                             \
        operation == kUpdate ? HEADRACE_KERNEL(kUpdate, is_split, Gradient, kWeights) : nullptr, \
        operation == kUpdate ? HEADRACE_KERNEL(kUpdate, is_split, Gradient, kMoments) : nullptr  \
  }
#define HEADRACE_OPERATION(operation)                                                            \
  {                                                                                              \
    {HEADRACE_STORES(operation, false, float), HEADRACE_STORES(operation, false, uint16_t)},     \
        {HEADRACE_STORES(operation, true, float), HEADRACE_STORES(operation, true, uint16_t)}    \
  }

extern const KernelTable table = {
    {HEADRACE_OPERATION(kUpdate), HEADRACE_OPERATION(kInvert), HEADRACE_OPERATION(kCorrect)},
    largest_bfloat16,
    largest_float32,
    split,
    join,
    copy_streaming,
    negate,
};

}  // namespace HEADRACE_ISA
}  // namespace headrace
