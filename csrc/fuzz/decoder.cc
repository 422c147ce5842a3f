// SPDX-License-Identifier: Apache-2.0
#include "decoder.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <vector>

#include "agreement.h"
#include "array.h"
#include "nest.h"
#include "rollout.h"
#include "rpcenv.pb.h"
#include "streams.h"
#include "wire.h"

#if __has_include(<google/protobuf/stubs/logging.h>)
#include <google/protobuf/stubs/logging.h>
#define LOGS_CAN_BE_SILENCED
#endif

#ifdef __SANITIZE_ADDRESS__
#define COUNTS_BYTES
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define COUNTS_BYTES
#endif
#endif
#ifdef COUNTS_BYTES
// As in sanitizer/allocator_interface.h, which gcc's packages may leave out.
extern "C" {
int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void*, size_t),
                                              void (*on_free)(const volatile void*));
size_t __sanitizer_get_allocated_size(const volatile void* pointer);
}
#endif

namespace torchbeast {

namespace {

using Arrays = Nest<Array>;
using Views = Nest<ArrayView>;

// Limits of the memory that a message may take. Parsing takes a multiple of its length: an empty
// item is two bytes in a message and 56 + 8 in memory. kSmall is for what does not depend on it.
constexpr int64_t kParsedTimes = 80;
constexpr int64_t kSmall = 512 << 10;
// Where a message ends too early, protobuf may have made room for a string as long as it promised,
// up to this (kSafeStringSize in its sources).
constexpr int64_t kPromised = 50'000'000;
constexpr size_t kMaxRefusal = 3'000;  // bytes of a message about a handshake

Counts all_counts;

#define REQUIRE(condition)                                                           \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                  \
    }                                                                                \
  } while (false)

// Bytes on the heap, counted where the address sanitizer reports them.
int64_t num_bytes = 0;
int64_t max_num_bytes = 0;
double max_parsed_times = 0;

#ifdef COUNTS_BYTES
void count_malloc(const volatile void*, size_t size) {
  num_bytes += static_cast<int64_t>(size);
  max_num_bytes = std::max(max_num_bytes, num_bytes);
}

void count_free(const volatile void* pointer) {
  num_bytes -= static_cast<int64_t>(__sanitizer_get_allocated_size(pointer));
}
#endif

// Aborts at its end if more than `limit` bytes were taken during its life.
class Limit {
 public:
  Limit(const char* what, int64_t limit) : what_(what), limit_(limit), before_(num_bytes) {
    max_num_bytes = num_bytes;
  }
  ~Limit() {
    if (taken() <= limit_) return;
    std::fprintf(stderr, "%s took %lld bytes, over its limit of %lld\n", what_,
                 static_cast<long long>(taken()), static_cast<long long>(limit_));
    std::abort();
  }
  int64_t taken() const { return max_num_bytes - before_; }
  void raise(int64_t bytes) { limit_ += bytes; }

 private:
  const char* const what_;
  int64_t limit_;
  const int64_t before_;
};

// The first words of an error, with # for numbers.
std::string kind_of(const std::string& error, int num_words = 5) {
  std::istringstream words(error);
  std::string kind, word;
  for (int i = 0; i < num_words && words >> word && word.find('[') == std::string::npos; ++i) {
    if (std::isdigit(word.back()) != 0) word = "#";
    kind += (i > 0 ? " " : "") + word;
  }
  return kind;
}

void refuse(const std::string& error) {
  ++all_counts.malformed;
  ++all_counts.refusals[kind_of(error)];
}

bool same(const ArrayView& a, const ArrayView& b) {
  return a.dtype == b.dtype && a.shape == b.shape &&
         std::memcmp(a.data, b.data, a.num_bytes()) == 0;
}

bool same(const Views& a, const Views& b) {
  const std::vector<ArrayView> as = a.flatten();
  const std::vector<ArrayView> bs = b.flatten();
  return a.same_structure(b) &&
         std::equal(as.begin(), as.end(), bs.begin(), bs.end(),
                    [](const ArrayView& x, const ArrayView& y) { return same(x, y); });
}

void check_round_trip(const rpcenv::Nest& message) {
  const Views nest = decode(message);
  rpcenv::Nest again;
  encode(nest, &again);
  REQUIRE(same(decode(again), nest));
}

// The whole stacks of a stream's frames, restored in the simplest way.
class Stacks {
 public:
  std::string add(const rpcenv::Step& step, size_t num_envs) {
    const std::string& newest = step.observation().array().data();
    const std::string& full = step.full().data();
    const size_t frame = newest.size() / num_envs;
    const auto num_full =
        static_cast<size_t>(std::count(step.is_full().begin(), step.is_full().end(), '\1'));
    if (stacks_.empty()) stacks_.resize(num_envs);
    size_t next = 0;
    for (size_t i = 0; i < num_envs; ++i) {
      if (step.is_full()[i] != 0) {
        const size_t stack = full.size() / num_full;
        stacks_[i] = full.substr(stack * next++, stack);
      } else {
        stacks_[i] = stacks_[i].substr(frame) + newest.substr(frame * i, frame);
      }
    }
    std::string all;
    for (const std::string& stack : stacks_) all += stack;
    return all;
  }

 private:
  std::vector<std::string> stacks_;
};

// Check that `row`, [1, N, ...], holds the data of the message.
void check_row(const Arrays::Dict& row, const rpcenv::Step& step, const std::string* stacks) {
  const auto bytes = [](const Array& array) {
    return std::string(reinterpret_cast<const char*>(array.data.get()), array.num_bytes());
  };
  REQUIRE(row.size() == 11);
  REQUIRE(bytes(row.at("reward").leaf()) == step.reward());
  REQUIRE(bytes(row.at("done").leaf()) == step.done());
  REQUIRE(bytes(row.at("truncated").leaf()) == step.truncated());
  REQUIRE(bytes(row.at("terminated").leaf()) == step.terminated());
  REQUIRE(bytes(row.at("episode_return").leaf()) == step.episode_return());
  REQUIRE(bytes(row.at("episode_step").leaf()) == step.episode_step());
  REQUIRE(bytes(row.at("game_done").leaf()) == step.game_done());
  REQUIRE(bytes(row.at("game_return").leaf()) == step.game_return());
  REQUIRE(bytes(row.at("game_step").leaf()) == step.game_step());
  const std::string& last_action =
      step.has_last_action_array() ? step.last_action_array().data() : step.last_action();
  REQUIRE(bytes(row.at("last_action").leaf()) == last_action);
  if (stacks != nullptr) {
    REQUIRE(bytes(row.at("frame").leaf()) == *stacks);
    return;
  }
  const Views frame = decode(step.observation()).map([](const ArrayView& array) {
    ArrayView with_time = array;
    with_time.shape.insert(with_time.shape.begin(), 1);
    return with_time;
  });
  REQUIRE(same(row.at("frame").map([](const Array& array) { return array.view(); }), frame));
}

// Of a handshake alone a learner says what it refuses, in a line that is not long.
void check_handshake(const rpcenv::Handshake& handshake) {
  try {
    Agreement({kSpaces, std::nullopt, kEnv}).check_handshake("peer", handshake);
  } catch (const RefusedError& error) {
    REQUIRE(std::string(error.what()).size() < kMaxRefusal);
    ++all_counts.refusals[kind_of(error.what(), 3)];
  }
}

void take(const rpcenv::Step& step, int64_t t, const Stream& stream,
          const std::shared_ptr<MemoryPool>& pool, std::optional<Rollout>* rollout) {
  if (!*rollout) {
    rollout->emplace(stream.unroll_length, stream.dict_outputs, step, pool);
    return;
  }
  Array action = make_array(DType::kInt64, {1, (*rollout)->num_envs()}, *pool);
  std::memset(action.data.get(), 0, action.num_bytes());
  (*rollout)->set_agent_outputs(t, Arrays::Tuple{action});
  (*rollout)->set_env_outputs(t, step);
}

// One stream, from its first message to the first that is refused.
void play(const Stream& stream) {
  const auto pool = std::make_shared<MemoryPool>();
  rpcenv::Step step;  // reused for all messages, as in EnvStream
  std::optional<Rollout> rollout;
  std::optional<Stacks> stacks;
  std::string stacked;
  Arrays finished;
  int64_t t = 0;
  int64_t size = 0;  // of all messages
  for (const std::string& message : stream.messages) {
    size += static_cast<int64_t>(message.size());
    {
      Limit limit("Parsing", kParsedTimes * size + kSmall);
      if (!step.ParseFromString(message)) {
        limit.raise(kPromised);
        return refuse("not a Step");
      }
      if (message.size() > 1000) {
        max_parsed_times = std::max(max_parsed_times, static_cast<double>(limit.taken()) /
                                                          static_cast<double>(message.size()));
      }
    }
    const Limit limit("A row", 4 * (stream.unroll_length + 4) * size + kSmall);
    const bool is_first = !rollout;
    if (is_first) check_handshake(step.handshake());
    try {
      take(step, t, stream, pool, &rollout);
    } catch (const WireError& error) {
      refuse(error.what());
      try {  // the observation by itself may be good
        check_round_trip(step.observation());
      } catch (const WireError&) {
      }
      return;
    }
    ++all_counts.good;
    check_round_trip(step.observation());
    if (is_first && step.handshake().stack_size() > 0) stacks.emplace();
    if (stacks) stacked = stacks->add(step, static_cast<size_t>(rollout->num_envs()));
    const std::string* frame = stacks ? &stacked : nullptr;
    if (stream.dict_outputs) check_row(rollout->env_outputs(t).dict(), step, frame);
    if (t++ == stream.unroll_length) {
      finished = rollout->finish();
      rollout->begin();
      ++all_counts.rollouts;
      if (stream.dict_outputs) check_row(rollout->env_outputs(0).dict(), step, frame);
      t = 1;
    }
  }
}

void print_counts() {
  std::fprintf(stderr, "%llu messages became rows, of which %llu rollouts were finished\n",
               static_cast<unsigned long long>(all_counts.good),
               static_cast<unsigned long long>(all_counts.rollouts));
  std::fprintf(stderr, "%llu malformed messages were refused:\n",
               static_cast<unsigned long long>(all_counts.malformed));
  for (const auto& [kind, count] : all_counts.refusals) {
    std::fprintf(stderr, "%10llu  %s ...\n", static_cast<unsigned long long>(count), kind.c_str());
  }
  if (max_parsed_times > 0) {
    std::fprintf(stderr, "parsed messages took at most %.0f times their length\n",
                 max_parsed_times);
  }
}

}  // namespace

const Counts& counts() { return all_counts; }

}  // namespace torchbeast

int LLVMFuzzerInitialize(int*, char***) {
#ifdef LOGS_CAN_BE_SILENCED
  google::protobuf::SetLogHandler(nullptr);  // it logs each key that is not UTF-8
#endif
#ifdef COUNTS_BYTES
  __sanitizer_install_malloc_and_free_hooks(torchbeast::count_malloc, torchbeast::count_free);
#endif
  std::atexit(torchbeast::print_counts);
  return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  torchbeast::play(torchbeast::unpack(data, size));
  return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  torchbeast::Random random(seed);
  torchbeast::Stream stream = torchbeast::unpack(data, size);
  torchbeast::spoil(&stream, random);
  std::string packed = torchbeast::pack(stream);
  while (packed.size() > max_size && !stream.messages.empty()) {
    stream.messages.pop_back();
    packed = torchbeast::pack(stream);
  }
  std::copy(packed.begin(), packed.end(), data);
  return packed.size();
}
