// SPDX-License-Identifier: Apache-2.0
#include "rollout.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "steps.h"
#include "wire.h"

namespace torchbeast {
namespace {

using Arrays = Nest<Array>;

constexpr int64_t kUnrollLength = 3;  // T
constexpr int64_t kNumEnvs = 2;       // N

template <class T>
std::string twice(T value) {
  return repeated(kNumEnvs, value);
}

// Row `t` of all time: its number is everywhere.
rpcenv::Step step_of(int64_t t) { return make_step(kNumEnvs, t); }

// The agent's answer that leads to row t.
Arrays agent_outputs(int64_t t) {
  return Arrays::Tuple{int64_array({1, kNumEnvs}, {t, t}),
                       int64_array({1, kNumEnvs, 1}, {10 * t, 10 * t})};
}

Arrays fill(Rollout& rollout, int first_row) {
  for (int t = 1; t <= kUnrollLength; ++t) {
    rollout.set_agent_outputs(t, agent_outputs(first_row + t));
    rollout.set_env_outputs(t, step_of(first_row + t));
  }
  Arrays finished = rollout.finish();
  rollout.begin();
  return finished;
}

Values rows(int64_t first, int64_t factor = 1) {
  Values values;
  for (int64_t t = first; t <= first + kUnrollLength; ++t) {
    values.insert(values.end(), kNumEnvs, factor * t);
  }
  return values;
}

TEST(rollouts_overlap_by_one_row) {
  Rollout rollout(kUnrollLength, true, step_of(0), new_pool());
  CHECK(rollout.num_envs() == kNumEnvs);
  for (int first_row = 0; first_row < 9; first_row += kUnrollLength) {
    const Arrays finished = fill(rollout, first_row);
    const auto& env_outputs = finished.tuple().at(0).dict();
    const auto& agent = finished.tuple().at(1).tuple();
    CHECK((env_outputs.at("frame").leaf().shape == Shape{kUnrollLength + 1, kNumEnvs}));
    CHECK((agent.at(1).leaf().shape == Shape{kUnrollLength + 1, kNumEnvs, 1}));
    CHECK(values_of(env_outputs.at("frame").leaf()) == rows(first_row));
    CHECK(values_of(env_outputs.at("last_action").leaf()) == rows(first_row));
    CHECK(values_of(agent.at(0).leaf()) == rows(first_row));  // zeros in the very first row
    CHECK(values_of(agent.at(1).leaf()) == rows(first_row, 10));
  }
}

TEST(rows_tell_the_actor_where_one_is_given) {
  Rollout rollout(kUnrollLength, true, step_of(0), new_pool(), 7);
  for (int repeat = 0; repeat < 2; ++repeat) {
    const Arrays finished = fill(rollout, repeat * kUnrollLength);
    const Array& actor = finished.tuple()[0].dict().at("actor").leaf();
    CHECK((actor.shape == Shape{kUnrollLength + 1, kNumEnvs}));
    const auto* values = reinterpret_cast<const int32_t*>(actor.data.get());
    CHECK(std::all_of(values, values + (kUnrollLength + 1) * kNumEnvs,
                      [](int32_t value) { return value == 7; }));
  }
}

TEST(env_outputs_are_a_dict_of_all_keys_or_torchbeasts_tuple) {
  Rollout dict(kUnrollLength, true, step_of(0), new_pool());
  CHECK(dict.env_outputs(0).dict().size() == 11);
  Rollout tuple(kUnrollLength, false, step_of(7), new_pool());
  const Arrays outputs = tuple.env_outputs(0);
  CHECK(outputs.tuple().size() == 5);
  const DType dtypes[] = {DType::kInt64, DType::kFloat32, DType::kBool, DType::kInt32,
                          DType::kFloat32};
  for (size_t i = 0; i < 5; ++i) {
    CHECK(outputs.tuple()[i].leaf().dtype == dtypes[i]);
    CHECK((outputs.tuple()[i].leaf().shape == Shape{1, kNumEnvs}));
  }
  CHECK((values_of(outputs.front()) == Values{7, 7}));
}

TEST(what_is_handed_out_is_not_written_again) {
  const auto pool = new_pool();
  Rollout rollout(kUnrollLength, true, step_of(0), pool);
  const Arrays first = fill(rollout, 0);
  const Arrays second = fill(rollout, kUnrollLength);
  CHECK(values_of(first.tuple().at(0).dict().at("frame").leaf()) == rows(0));
  CHECK(values_of(first.tuple().at(1).tuple().at(0).leaf()) == rows(0));
  CHECK(values_of(second.tuple().at(0).dict().at("frame").leaf()) == rows(kUnrollLength));
}

TEST(while_a_finished_rollout_waits_only_one_row_more_is_held) {
  std::atomic<size_t> num_bytes{0};
  const auto pool = std::make_shared<MemoryPool>([&](size_t size) {
    num_bytes += size;
    return MemoryPool::Block(new std::byte[size], [](std::byte* block) { delete[] block; });
  });
  constexpr int64_t kLong = 1000;
  Rollout rollout(kLong, true, step_of(0), pool);
  rollout.set_agent_outputs(1, agent_outputs(1));
  const size_t one_rollout = num_bytes;
  Arrays finished = rollout.finish();
  CHECK(num_bytes < one_rollout + one_rollout / 10);
  finished = Arrays();
  rollout.begin();  // in the memory of the first
  CHECK(num_bytes < one_rollout + one_rollout / 10);
}

TEST(a_row_unlike_the_first_is_refused) {
  Rollout rollout(kUnrollLength, true, step_of(0), new_pool());
  const auto refused = [&](const std::function<void(rpcenv::Nest*)>& spoil) {
    rpcenv::Step step = step_of(1);
    spoil(step.mutable_observation());
    CHECK_THROWS(WireError, (rollout.set_env_outputs(1, step), 0));
  };
  refused([](rpcenv::Nest* nest) { nest->mutable_array()->set_dtype(rpcenv::FLOAT64); });
  refused([](rpcenv::Nest* nest) { nest->mutable_array()->add_shape(1); });
  refused([](rpcenv::Nest* nest) {
    const rpcenv::Array array = nest->array();
    nest->Clear();
    *nest->add_items()->mutable_array() = array;
  });
  refused([](rpcenv::Nest* nest) { nest->mutable_array()->mutable_data()->push_back('a'); });
  rollout.set_env_outputs(1, step_of(1));
}

// The environments' last actions are `echoed`, after row `row` in which they were `sent`.
bool is_taken(const Values& echoed, const Arrays& sent, const rpcenv::Step& row = step_of(0)) {
  Rollout rollout(kUnrollLength, true, row, new_pool());
  rpcenv::Step step = step_of(1);
  step.set_last_action(echoed.data(), echoed.size() * sizeof(int64_t));
  try {
    rollout.set_env_outputs(1, step, &sent);
  } catch (const WireError&) {
    return false;
  }
  return true;
}

TEST(the_last_action_is_what_was_sent_or_the_one_before_an_end) {
  const Arrays sent = int64_array({1, kNumEnvs}, {1, 2});
  CHECK(is_taken({1, 2}, sent));
  for (const Values& values : {Values{1, 1}, Values{2, 1}, Values{0, 0}, Values{1, -9}}) {
    CHECK(!is_taken(values, sent));
  }
  for (const bool truncated : {false, true}) {
    rpcenv::Step end = step_of(0);
    (truncated ? end.mutable_truncated() : end.mutable_terminated())->back() = '\1';
    CHECK(is_taken({1, 0}, sent, end));
    CHECK(!is_taken({1, 2}, sent, end));
  }
  const int32_t numbers[kNumEnvs] = {-1, 2};
  Array narrow = make_array(DType::kInt32, {1, kNumEnvs}, *new_pool());
  std::memcpy(narrow.data.get(), numbers, sizeof(numbers));
  CHECK(is_taken({-1, 2}, narrow) && !is_taken({-1, 3}, narrow));
  CHECK(is_taken({7, 7}, Arrays::Tuple{sent}));  // with which it cannot be compared
  CHECK(is_taken({7, 7}, int64_array({1, kNumEnvs, 1}, {1, 2})));
}

TEST(last_actions_of_floats_are_compared_bit_by_bit) {
  const auto refuses = [](const std::string& echoed, const Arrays& sent) {
    rpcenv::Step step = step_of(0);
    rpcenv::Array* last_action = step.mutable_last_action_array();
    *last_action = message(rpcenv::FLOAT32, {kNumEnvs}, twice(0.0f));
    Rollout rollout(kUnrollLength, true, step, new_pool());
    last_action->set_data(echoed);
    try {
      rollout.set_env_outputs(1, step, &sent);
    } catch (const WireError&) {
      return true;
    }
    return false;
  };
  Array sent = make_array(DType::kFloat32, {1, kNumEnvs}, *new_pool());
  std::memcpy(sent.data.get(), twice(0.5f).data(), sent.num_bytes());
  CHECK(!refuses(twice(0.5f), sent) && refuses(twice(0.25f), sent));
  // Of another precision, they could differ in the last bit.
  CHECK(!refuses(twice(0.5f), make_array(DType::kFloat64, {1, kNumEnvs}, *new_pool())));
}

TEST(the_very_first_last_action_is_0) {
  rpcenv::Step step = step_of(0);
  step.set_last_action(twice<int64_t>(1));
  CHECK_THROWS(WireError, Rollout(kUnrollLength, true, step, new_pool()));
  Rollout(kUnrollLength, false, step, new_pool());  // where nobody sees it
}

TEST(rows_are_as_their_spaces_say) {
  const auto with = [](const Arrays& frame) {
    rpcenv::Step first = step_of(1);
    first.set_last_action(twice<int64_t>(0));
    Rollout rollout(kUnrollLength, true, first, new_pool(), 7,
                    {{"frame", frame}, {"last_action", int64_array({0}, {})}});
    rollout.set_env_outputs(1, step_of(2));
  };
  with(int64_array({0}, {}));
  with(int64_array({2}, {1, 2}));
  for (const Values& range : {Values{1, 1}, Values{2, 2}, Values{3, 9}}) {
    CHECK_THROWS(WireError, (with(int64_array({2}, range)), 0));
  }
  const Array floats{DType::kFloat64, {0}, int64_array({1}, {0}).data};
  for (const Arrays& frame : {Arrays(floats), Arrays(int64_array({0, 1}, {})), Arrays(),
                              Arrays(Arrays::Dict{{"a", int64_array({0}, {})}})}) {
    CHECK_THROWS(WireError, (with(frame), 0));
  }
}

TEST(each_part_of_an_observation_has_limits_of_its_own) {
  rpcenv::Step step = step_of(0);
  rpcenv::Array* frame = step.mutable_observation()->mutable_array();
  frame->add_shape(2);
  const auto start = [&](const Values& values) {
    frame->set_data(values.data(), values.size() * sizeof(int64_t));
    Rollout(kUnrollLength, true, step, new_pool(), 7,
            {{"frame", int64_array({2, 2}, {0, 3, 1, 5})}});
  };
  start({0, 3, 1, 5});
  for (const Values& values : {Values{0, 3, 2, 5}, Values{0, 3, 1, 6}, Values{0, 2, 1, 5}}) {
    CHECK_THROWS(WireError, (start(values), 0));
  }
}

TEST(agent_outputs_have_one_row_and_a_column_an_environment) {
  for (const Shape& shape : {Shape{}, Shape{2}, Shape{2, 2}, Shape{1, 3}, Shape{1, 1}, Shape{1}}) {
    Rollout rollout(kUnrollLength, true, step_of(0), new_pool());
    const Array array = make_array(DType::kInt64, shape, *new_pool());
    CHECK_THROWS(std::invalid_argument, (rollout.set_agent_outputs(1, array), 0));
  }
}

TEST(agent_outputs_unlike_the_first_ones_are_refused) {
  Rollout rollout(kUnrollLength, true, step_of(0), new_pool());
  rollout.set_agent_outputs(1, agent_outputs(1));
  const Array action = int64_array({1, kNumEnvs}, {1, 1});
  const Array floats{DType::kFloat64, {1, kNumEnvs, 1}, action.data};
  for (const Arrays& outputs :
       {Arrays(action), Arrays(Arrays::Tuple{action}), Arrays(Arrays::Tuple{action, action}),
        Arrays(Arrays::Tuple{action, floats}),
        Arrays(Arrays::Tuple{int64_array({2, kNumEnvs}, {1, 1, 1, 1}),
                             int64_array({1, kNumEnvs, 1}, {1, 1})}),
        Arrays(Arrays::Tuple{action, int64_array({1, kNumEnvs, 2}, {1, 2, 3, 4})})}) {
    CHECK_THROWS(std::invalid_argument, (rollout.set_agent_outputs(2, outputs), 0));
  }
  rollout.set_agent_outputs(2, agent_outputs(2));
}

TEST(stacked_frames_are_whole_in_every_row) {
  const auto stacked = [](int t) {  // [N, 1] of [N, 2] stacks (t - 1, t), all sent whole in row 0
    rpcenv::Step step = step_of(t);
    step.mutable_handshake()->set_stack_size(2);
    rpcenv::Array* newest = step.mutable_observation()->mutable_array();
    newest->add_shape(1);
    step.set_is_full(std::string(kNumEnvs, t == 0 ? '\1' : '\0'));
    if (t == 0) {
      const int64_t values[] = {-1, 0, -1, 0};
      *step.mutable_full() =
          message(rpcenv::INT64, {kNumEnvs, 2},
                  std::string(reinterpret_cast<const char*>(values), sizeof(values)));
    }
    return step;
  };
  Rollout rollout(kUnrollLength, true, stacked(0), new_pool());
  for (int first_row = 0; first_row < 9; first_row += kUnrollLength) {
    for (int t = 1; t <= kUnrollLength; ++t) {
      rollout.set_agent_outputs(t, agent_outputs(t));
      rollout.set_env_outputs(t, stacked(first_row + t));
    }
    const Arrays finished = rollout.finish();
    rollout.begin();
    const Array& frame = finished.tuple().at(0).dict().at("frame").leaf();
    CHECK((frame.shape == Shape{kUnrollLength + 1, kNumEnvs, 2}));
    Values expected;
    for (int64_t t = first_row; t <= first_row + kUnrollLength; ++t) {
      for (int64_t i = 0; i < kNumEnvs; ++i) expected.insert(expected.end(), {t - 1, t});
    }
    CHECK(values_of(frame) == expected);
  }
}

}  // namespace
}  // namespace torchbeast
