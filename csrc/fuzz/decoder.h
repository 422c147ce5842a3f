// SPDX-License-Identifier: Apache-2.0
// The learner's end of a hostile stream; libFuzzer or driver.cc calls it with bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace torchbeast {

struct Counts {
  uint64_t good = 0;                         // messages that became rows
  uint64_t malformed = 0;                    // messages that were refused
  uint64_t rollouts = 0;                     // rollouts that were finished
  std::map<std::string, uint64_t> refusals;  // by the beginning of the error
};

const Counts& counts();

}  // namespace torchbeast

extern "C" {
// To be called once, at first. The counts are printed at exit.
int LLVMFuzzerInitialize(int* argc, char*** argv);

// Reads `data`, a packed stream, as an actor reads a server's messages. Aborts where a
// good message does not become its row, or a message takes more memory than its length justifies.
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed);
}
