// SPDX-License-Identifier: Apache-2.0
// A driver in place of libFuzzer, which only clang has:
//
//   fuzz [malformed messages, 20000] [number of the first stream, 0]
//
// Plays streams, each made from its number alone, until that many messages were refused.
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "decoder.h"
#include "streams.h"

using torchbeast::counts;
using torchbeast::Random;
using torchbeast::Stream;

namespace {

// With fewer messages than this, some kinds of refusal may not occur.
constexpr uint64_t kEnough = 20'000;
constexpr size_t kMaxBytes = 16 << 20;

// Every kind of refusal of a message; the ten fields of a row are represented by some.
constexpr const char* kRefusals[] = {
    "not a Step",
    "a nest is more than",
    "a nest is an array",
    "a dict has # keys",
    "a dict has the key",
    "a nest has more than",
    "a row of # environments",
    "an array has the unknown",
    "an array's shape has the",
    "an array's shape is too",
    "an array has too many",
    "an array's data are #",
    "an array is bool, but",
    "reward is # bytes, but",
    "reward has numbers that are",
    "episode_step is negative",
    "an array has numbers that",
    "last_action is not # in",
    "last_action is # bytes, but",
    "the last action is an",
    "done is bool, but holds",
    "a row has no observation",
    "the observation has an array",
    "the observation is empty",
    "frames are stacked, but the",
    "frames are stacked, but are",
    "a stack of # frames",
    "is_full is # bytes for",
    "is_full is bool, but holds",
    "the first row has stacks",
    "the whole stacks are",
    "the newest frames are",
    "the structure of frame has",
    "frame was",
    "last_action was",
    "refused: peer has",
    "refused: peer plays",
};

const char* program;
unsigned long long number;  // of the stream
Random dice;                // makes and spoils the stream

void tell_where(int signal) {
  std::fprintf(stderr, "Failed in stream %llu; to repeat it: %s 1 %llu\n", number, program, number);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void read(const Stream& stream) {
  size_t size = 0;
  for (const std::string& message : stream.messages) size += message.size();
  if (size > kMaxBytes) return;  // one in a million: the stream itself needs all memory allowed
  const std::string packed = torchbeast::pack(stream);
  // In memory that ends where the bytes do, so that the address sanitizer sees reads beyond.
  const std::vector<uint8_t> bytes(packed.begin(), packed.end());
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
}

void play() {
  dice.seed(number);
  Stream stream = torchbeast::good_stream(dice, static_cast<int64_t>(1 + dice() % 4));
  if (number % 16 == 0) {
    const uint64_t good = counts().good;
    read(stream);
    if (counts().good == good + stream.messages.size()) return;
    std::fprintf(stderr, "A good message was refused.\n");
    std::abort();
  }
  do {
    torchbeast::spoil(&stream, dice);
  } while (dice() % 2 == 0);
  read(stream);
}

}  // namespace

size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size) {
  const size_t at = size == 0 ? 0 : dice() % size;
  switch (dice() % 4) {
    case 0:  // cut off
      return at;
    case 1:  // cut out
      if (size == 0) return 0;
      std::copy(data + at + 1, data + size, data + at);
      return size - 1;
    case 2:  // put in
      if (size == max_size) return size;
      std::copy_backward(data + at, data + size, data + size + 1);
      data[at] = static_cast<uint8_t>(dice());
      return size + 1;
    default:
      if (size > 0) data[at] = static_cast<uint8_t>(dice());
      return size;
  }
}

int main(int argc, char** argv) {
  program = argv[0];
  const uint64_t wanted = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : kEnough;
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  LLVMFuzzerInitialize(&argc, &argv);
  std::signal(SIGABRT, tell_where);  // sanitizers abort, too, with abort_on_error=1
  for (number = first; counts().malformed < wanted; ++number) play();
  std::fprintf(stderr, "%llu streams\n", number - first);
  if (wanted < kEnough) return 0;
  int status = 0;
  for (const char* refusal : kRefusals) {
    if (counts().refusals.count(refusal) > 0) continue;
    std::fprintf(stderr, "Nothing was refused with '%s': has its text changed?\n", refusal);
    status = 1;
  }
  return status;
}
