#include "dispatch.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <initializer_list>
#endif

namespace headrace {

#if defined(__x86_64__)
namespace {

bool has(uint32_t reg, std::initializer_list<int> bits) {
  for (int bit : bits) {
    if ((reg >> bit & 1) == 0) {
      return false;
    }
  }
  return true;
}

// The micro-architecture level (x86-64 psABI, section 3.1.1) of processor and system together:
// the system must also save the wide registers, which XCR0 tells.
int level() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) {
    return 1;
  }
  // SSE3, SSSE3, FMA, CX16, SSE4.1, SSE4.2, MOVBE, POPCNT, OSXSAVE, AVX, F16C
  if (!has(c, {0, 9, 12, 13, 19, 20, 22, 23, 27, 28, 29})) {
    return 1;
  }
  uint32_t xcr0, xcr0_high;
  __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(xcr0_high) : "c"(0));
  if (!has(xcr0, {1, 2})) {  // SSE and AVX registers
    return 1;
  }
  uint32_t a81, b81, c81, d81;
  if (!__get_cpuid(0x80000001, &a81, &b81, &c81, &d81) || !has(c81, {0, 5})) {  // LAHF, LZCNT
    return 1;
  }
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !has(b, {3, 5, 8})) {  // BMI1, AVX2, BMI2
    return 1;
  }
  // Opmask and upper AVX-512 registers; AVX-512 F, DQ, CD, BW, VL
  if (!has(xcr0, {5, 6, 7}) || !has(b, {16, 17, 28, 30, 31})) {
    return 3;
  }
  return 4;
}

}  // namespace

const std::vector<InstructionSet>& usable_instruction_sets() {
  // Asked once: in a virtual machine every cpuid instruction is a trip to the hypervisor.
  static const std::vector<InstructionSet> usable = [] {
    std::vector<InstructionSet> sets{{"x86-64", &isa_v1::table}};
    const int highest = level();
    if (highest >= 3) {
      sets.push_back({"x86-64-v3", &isa_v3::table});
    }
    if (highest >= 4) {
      sets.push_back({"x86-64-v4", &isa_v4::table});
    }
    return sets;
  }();
  return usable;
}

#else

const std::vector<InstructionSet>& usable_instruction_sets() {
  static const std::vector<InstructionSet> usable{{"generic", &isa_generic::table}};
  return usable;
}

#endif

}  // namespace headrace
