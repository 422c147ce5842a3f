// SPDX-License-Identifier: Apache-2.0
// Streams of messages as a server may send them: good ones and spoiled ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace torchbeast {

using Random = std::mt19937_64;

// In the handshakes of good streams.
inline constexpr const char* kEnv = "Catch";
inline constexpr const char* kSpaces =
    R"({"action": {"dtype": "int64", "n": 3, "start": 0, "type": "Discrete"}, "frame_skip": 1, )"
    R"("observation": {"dtype": "uint8", "high": 1, "low": 0, "shape": [1, 10, 5], "type": "Box"}})";

// Fuzzers change bytes: packed, a stream is a byte of options, then each message behind its length.
// Any bytes can be unpacked.
struct Stream {
  int64_t unroll_length = 1;
  bool dict_outputs = true;
  std::vector<std::string> messages;  // serialized Steps, perhaps spoiled
};

Stream unpack(const uint8_t* data, size_t size);
std::string pack(const Stream& stream);

// A valid stream, unless num_envs is 0: a handshake, and rows whose observations are any nest or
// stacks of frames.
Stream good_stream(Random& random, int64_t num_envs);

// Change one thing: a field of a message, a message, the bytes of one.
void spoil(Stream* stream, Random& random);

}  // namespace torchbeast

// libFuzzer's, or our driver's: changes `data` at random and returns its new size.
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);
