// SPDX-License-Identifier: Apache-2.0
// The learner's end of a hostile stream: what libFuzzer, or our driver, calls with bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace torchbeast {

struct Counts {
  uint64_t good = 0;                         // messages that became rows
  uint64_t malformed = 0;                    // messages that were refused
  uint64_t rollouts = 0;                     // that were finished
  std::map<std::string, uint64_t> refusals;  // by the beginning of what was said
};

const Counts& counts();

}  // namespace torchbeast

extern "C" {
// To be called once, at first. In the end the counts are printed.
int LLVMFuzzerInitialize(int* argc, char*** argv);

// Reads `data`, a packed stream, as an actor reads a server's messages. Aborts where one that is
// good does not become the row that it says, or where memory is taken that its length does not
// justify.
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed);
}
