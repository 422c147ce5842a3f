// SPDX-License-Identifier: Apache-2.0
// Stacked frames on the wire (wire.h).
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "steps.h"
#include "wire.h"

namespace torchbeast {
namespace {

// Frames [N, C, 2], K of them a stack.
constexpr int64_t kN = 3;
constexpr int64_t kC = 2;
constexpr int64_t kK = 4;
constexpr size_t kFrame = kC * 2;
constexpr size_t kStack = kK * kFrame;

rpcenv::Step stacked_step(const std::vector<std::string>& stacks, const std::string& is_full) {
  rpcenv::Step step = make_step(kN, 0);
  std::string newest;
  std::string full;
  int64_t num_full = 0;
  for (size_t i = 0; i < kN; ++i) {
    newest += stacks[i].substr(kStack - kFrame);
    if (is_full[i] != 0) {
      full += stacks[i];
      ++num_full;
    }
  }
  *step.mutable_observation()->mutable_array() = message(rpcenv::UINT8, {kN, kC, 2}, newest);
  step.set_is_full(is_full);
  if (num_full > 0) *step.mutable_full() = message(rpcenv::UINT8, {num_full, kK * kC, 2}, full);
  return step;
}

TEST(stacks_are_restored_to_the_last_bit_also_across_ends_of_episodes) {
  std::minstd_rand random(1);
  const auto random_frame = [&] {
    std::string frame;
    for (size_t k = 0; k < kFrame; ++k) frame.push_back(static_cast<char>(random()));
    return frame;
  };
  const auto pool = new_pool();
  const Array rows = make_array(DType::kUInt8, {100, kN, kK * kC, 2}, *pool);
  std::vector<std::string> stacks(kN);
  for (int64_t t = 0; t < 100; ++t) {
    std::string is_full;
    for (std::string& stack : stacks) {
      const bool reset = t == 0 || random() % 5 == 0;
      is_full.push_back(reset ? '\1' : '\0');
      if (reset) {
        stack.clear();
        for (int64_t k = 0; k < kK; ++k) stack += random_frame();
      } else {
        stack = stack.substr(kFrame) + random_frame();
      }
    }
    const rpcenv::Step step = stacked_step(stacks, is_full);
    if (t == 0) CHECK((stacked_shape(step, kN, kK) == Shape{kN, kK * kC, 2}));
    const ArrayView newest = decode(step.observation().array());
    const Array previous = rows.row(t == 0 ? 0 : t - 1);
    const Array target = rows.row(t);
    restack(step, newest, kK, t == 0 ? nullptr : &previous, target);
    for (size_t i = 0; i < kN; ++i) {
      CHECK(std::memcmp(target.data.get() + i * kStack, stacks[i].data(), kStack) == 0);
    }
  }
}

TEST(stacks_with_anything_wrong_are_refused) {
  const auto pool = new_pool();
  const Array target = make_array(DType::kUInt8, {1, kN, kK * kC, 2}, *pool);
  const Array previous = make_array(DType::kUInt8, {1, kN, kK * kC, 2}, *pool);
  const std::vector<std::string> stacks(kN, std::string(kStack, 'x'));
  const auto refused = [&](const std::string& is_full, const Array* before,
                           const std::function<void(rpcenv::Step*)>& spoil) {
    rpcenv::Step step = stacked_step(stacks, is_full);
    spoil(&step);
    CHECK_THROWS(WireError,
                 (restack(step, decode(step.observation().array()), kK, before, target), 0));
  };
  const std::string all(kN, '\1');
  const std::string some("\1\0\1", 3);
  refused(some, nullptr, [](rpcenv::Step*) {});  // nothing to stack the newest on
  refused(some, &previous, [](rpcenv::Step* step) { step->set_is_full("\1"); });
  refused(some, &previous, [](rpcenv::Step* step) { step->clear_is_full(); });
  refused(some, &previous, [](rpcenv::Step* step) { step->set_is_full("\1\2\1"); });
  refused(some, &previous, [](rpcenv::Step* step) { step->clear_full(); });
  refused(some, &previous, [&](rpcenv::Step* step) { step->set_is_full(all); });
  refused(all, nullptr, [](rpcenv::Step* step) { step->mutable_full()->set_shape(1, kC); });
  refused(all, nullptr, [](rpcenv::Step* step) { step->mutable_full()->set_dtype(rpcenv::INT8); });
  refused(all, nullptr, [](rpcenv::Step* step) {
    step->mutable_observation()->mutable_array()->set_dtype(rpcenv::INT8);
  });
  refused(all, nullptr, [](rpcenv::Step* step) {
    step->mutable_observation()->mutable_array()->set_shape(1, 1);
    step->mutable_observation()->mutable_array()->set_shape(2, 4);
  });
}

TEST(a_first_row_of_stacks_with_anything_wrong_is_refused) {
  const std::vector<std::string> stacks(kN, std::string(kStack, 'x'));
  const rpcenv::Step valid = stacked_step(stacks, std::string(kN, '\1'));
  CHECK((stacked_shape(valid, kN, kK) == Shape{kN, kK * kC, 2}));
  CHECK_THROWS(WireError, stacked_shape(valid, kN, kK + 1));
  CHECK_THROWS(WireError, stacked_shape(valid, kN, std::numeric_limits<uint32_t>::max()));
  CHECK_THROWS(WireError, stacked_shape(valid, kN + 1, kK));
  const auto refused = [&](const std::function<void(rpcenv::Step*)>& spoil) {
    rpcenv::Step step = valid;
    spoil(&step);
    CHECK_THROWS(WireError, stacked_shape(step, kN, kK));
  };
  refused([](rpcenv::Step* step) { step->clear_full(); });
  refused([](rpcenv::Step* step) { step->clear_observation(); });
  refused([](rpcenv::Step* step) {
    step->clear_observation();
    step->mutable_observation()->add_items();
  });
  refused([](rpcenv::Step* step) {
    *step->mutable_observation()->mutable_array() = message(rpcenv::UINT8, {kN}, "abc");
  });
}

}  // namespace
}  // namespace torchbeast
