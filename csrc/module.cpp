// Python's door to the kernels: headrace.kernels._native.
//
// Takes arrays as they are (never a converted copy), lets the GIL go, shares the elements out
// over a pool in blocks. src/headrace/kernels/native.py checks lengths, overlap and ranges before
// calling; nothing else may call this module.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "dispatch.h"
#include "pool.h"

namespace nb = nanobind;

namespace headrace {
namespace {

template <typename T>
using Flat = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FlatGrad = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Packed = nb::ndarray<const float, nb::shape<sizeof(Coefficients) / sizeof(float)>,
                           nb::c_contig, nb::device::cpu>;

// Long enough that the hardware prefetchers settle, short enough that the last blocks of a
// 64 MiB chunk still spread over a hundred threads.
constexpr int64_t kBlock = int64_t{1} << 16;
constexpr int64_t kPage = 4096;

const KernelTable& table_named(const std::string& name) {
  for (const InstructionSet& set : usable_instruction_sets()) {
    if (name == set.name) {
      return *set.table;
    }
  }
  throw std::invalid_argument("instruction set '" + name + "' is not usable here");
}

// Calls body(begin, end) for blocks of [0, num), over the pool or, without one, right here.
template <typename Body>
void for_each_block(Pool* pool, int64_t num, int64_t block, Body body) {
  nb::gil_scoped_release release;
  struct Context {
    Body* body;
    int64_t num, block;
  } context{&body, num, block};
  const auto run_block = [](void* opaque, int64_t index) {
    const Context& c = *static_cast<Context*>(opaque);
    (*c.body)(index * c.block, std::min(c.num, (index + 1) * c.block));
  };
  const int64_t num_blocks = (num + block - 1) / block;
  if (pool != nullptr) {
    pool->run(num_blocks, run_block, &context);
  } else {
    Pool(1).run(num_blocks, run_block, &context);
  }
}

bool is_bfloat16(const FlatGrad& grad) {
  if (grad.dtype() == nb::dtype<uint16_t>()) {
    return true;
  }
  if (grad.dtype() == nb::dtype<float>()) {
    return false;
  }
  throw std::invalid_argument("gradients are uint16 (bf16 bits) or float32");
}

bool apply(const std::string& isa, int operation, int store, Buffers buffers,
           const FlatGrad& grad, const Packed& packed, std::array<int32_t, 3> limits,
           Pool* pool) {
  if (operation < 0 || operation >= kNumOperations) {
    throw std::invalid_argument("no such operation");
  }
  if (store < 0 || store >= kNumStores) {
    throw std::invalid_argument("no such store");
  }
  Coefficients coefficients;
  std::memcpy(&coefficients, packed.data(), sizeof coefficients);
  buffers.grad = grad.data();
  const bool is_split = buffers.hi != nullptr;
  const RangeKernel kernel =
      table_named(isa).range[operation][is_split][is_bfloat16(grad)][store];
  if (kernel == nullptr) {
    throw std::invalid_argument("only updates are stored in two parts");
  }
  const Limits bounds{limits[0], limits[1], limits[2]};
  std::atomic<bool> beyond{false};
  for_each_block(pool, static_cast<int64_t>(grad.size()), kBlock,
                 [&](int64_t begin, int64_t end) {
                   // A dry run is decided by the first result beyond the limits.
                   if (store == kNothing && beyond.load(std::memory_order_relaxed)) {
                     return;
                   }
                   if (kernel(buffers, coefficients, bounds, begin, end)) {
                     beyond.store(true, std::memory_order_relaxed);
                   }
                 });
  return beyond;
}

float largest(const std::string& isa, const FlatGrad& grad, Pool* pool) {
  const KernelTable& table = table_named(isa);
  const bool bfloat16 = is_bfloat16(grad);
  std::atomic<int32_t> bits{0};
  for_each_block(pool, static_cast<int64_t>(grad.size()), kBlock,
                 [&](int64_t begin, int64_t end) {
                   const int32_t found =
                       bfloat16 ? table.largest_bfloat16(
                                      static_cast<const uint16_t*>(grad.data()), begin, end)
                                : table.largest_float32(
                                      static_cast<const float*>(grad.data()), begin, end);
                   int32_t seen = bits.load(std::memory_order_relaxed);
                   while (found > seen && !bits.compare_exchange_weak(seen, found)) {
                   }
                 });
  const int32_t result = bits;
  float value;
  std::memcpy(&value, &result, sizeof value);
  return value;
}

bool split(const std::string& isa, Flat<const float> value, Flat<uint16_t> hi, Flat<int16_t> lo,
           bool store, Pool* pool) {
  const KernelTable& table = table_named(isa);
  std::atomic<bool> finite{true};
  for_each_block(pool, static_cast<int64_t>(value.size()), kBlock,
                 [&](int64_t begin, int64_t end) {
                   if (!table.split(value.data(), hi.data(), lo.data(), begin, end, store)) {
                     finite.store(false, std::memory_order_relaxed);
                   }
                 });
  return finite;
}

void join(const std::string& isa, Flat<const uint16_t> hi, Flat<const int16_t> lo,
          Flat<float> out, Pool* pool) {
  const KernelTable& table = table_named(isa);
  for_each_block(pool, static_cast<int64_t>(out.size()), kBlock,
                 [&](int64_t begin, int64_t end) {
                   table.join(hi.data(), lo.data(), out.data(), begin, end);
                 });
}

// Writes one byte of every page, so that the system backs the range with memory now.
void touch(Flat<uint8_t> bytes, Pool* pool) {
  for_each_block(pool, static_cast<int64_t>(bytes.size()), int64_t{64} << 20,
                 [&](int64_t begin, int64_t end) {
                   volatile uint8_t* data = bytes.data();
                   for (int64_t i = begin; i < end; i += kPage) {
                     data[i] = 0;
                   }
                 });
}

void copy_streaming(const std::string& isa, Flat<const float> source, Flat<float> target,
                    Pool* pool) {
  const KernelTable& table = table_named(isa);
  for_each_block(pool, static_cast<int64_t>(source.size()), kBlock,
                 [&](int64_t begin, int64_t end) {
                   table.copy_streaming(target.data(), source.data(), begin, end);
                 });
}

void negate(const std::string& isa, Flat<float> values, Pool* pool) {
  const KernelTable& table = table_named(isa);
  for_each_block(pool, static_cast<int64_t>(values.size()), kBlock,
                 [&](int64_t begin, int64_t end) { table.negate(values.data(), begin, end); });
}

}  // namespace
}  // namespace headrace

NB_MODULE(_native, m) {
  using namespace headrace;
  nb::set_leak_warnings(false);  // a pool that lives as long as the process is no leak

  nb::class_<Pool>(m, "Pool")
      .def(nb::init<int>(), nb::arg("num_threads"))
      .def_prop_ro("num_threads", &Pool::num_threads)
      .def("close", &Pool::close, nb::call_guard<nb::gil_scoped_release>());

  m.def("instruction_sets", [] {
    std::vector<std::string> names;
    for (const InstructionSet& set : usable_instruction_sets()) {
      names.emplace_back(set.name);
    }
    return names;
  });
  m.def(
      "apply_split",
      [](const std::string& isa, int operation, int store, Flat<uint16_t> hi, Flat<int16_t> lo,
         Flat<float> exp_avg, Flat<float> exp_avg_sq, FlatGrad grad, Packed packed,
         int32_t weight_limit, int32_t first_limit, int32_t second_limit, Pool* pool) {
        const Buffers buffers{hi.data(),      lo.data(),         nullptr,
                              exp_avg.data(), exp_avg_sq.data(), nullptr};
        return apply(isa, operation, store, buffers, grad, packed,
                     {weight_limit, first_limit, second_limit}, pool);
      },
      nb::arg("isa"), nb::arg("operation"), nb::arg("store"), nb::arg("hi").noconvert(),
      nb::arg("lo").noconvert(), nb::arg("exp_avg").noconvert(),
      nb::arg("exp_avg_sq").noconvert(), nb::arg("grad").noconvert(),
      nb::arg("packed").noconvert(), nb::arg("weight_limit"), nb::arg("first_limit"),
      nb::arg("second_limit"), nb::arg("pool").none());
  m.def(
      "apply_float32",
      [](const std::string& isa, int operation, int store, Flat<float> weight,
         Flat<float> exp_avg, Flat<float> exp_avg_sq, FlatGrad grad, Packed packed,
         int32_t weight_limit, int32_t first_limit, int32_t second_limit, Pool* pool) {
        const Buffers buffers{nullptr,        nullptr,           weight.data(),
                              exp_avg.data(), exp_avg_sq.data(), nullptr};
        return apply(isa, operation, store, buffers, grad, packed,
                     {weight_limit, first_limit, second_limit}, pool);
      },
      nb::arg("isa"), nb::arg("operation"), nb::arg("store"), nb::arg("weight").noconvert(),
      nb::arg("exp_avg").noconvert(), nb::arg("exp_avg_sq").noconvert(),
      nb::arg("grad").noconvert(), nb::arg("packed").noconvert(), nb::arg("weight_limit"),
      nb::arg("first_limit"), nb::arg("second_limit"), nb::arg("pool").none());
  m.def("largest", &largest, nb::arg("isa"), nb::arg("grad").noconvert(), nb::arg("pool").none());
  m.def("split", &split, nb::arg("isa"), nb::arg("value").noconvert(), nb::arg("hi").noconvert(),
        nb::arg("lo").noconvert(), nb::arg("store"), nb::arg("pool").none());
  m.def("join", &join, nb::arg("isa"), nb::arg("hi").noconvert(), nb::arg("lo").noconvert(),
        nb::arg("out").noconvert(), nb::arg("pool").none());
  m.def("touch", &touch, nb::arg("data").noconvert(), nb::arg("pool").none());
  m.def("copy_streaming", &copy_streaming, nb::arg("isa"), nb::arg("source").noconvert(),
        nb::arg("target").noconvert(), nb::arg("pool").none());
  m.def("negate", &negate, nb::arg("isa"), nb::arg("values").noconvert(), nb::arg("pool").none());
}
