// Which instruction sets this build has and this processor runs.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace headrace {

struct InstructionSet {
  const char* name;  // as compilers spell it after -march=
  const KernelTable* table;
};

// Usable here, narrowest first.
const std::vector<InstructionSet>& usable_instruction_sets();

}  // namespace headrace
