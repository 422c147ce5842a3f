// SPDX-License-Identifier: Apache-2.0
#include "dynamic_batcher.h"

#include <optional>
#include <stdexcept>

#include "check.h"

namespace torchbeast {
namespace {

using Arrays = Nest<Array>;

std::shared_ptr<DynamicBatcher> make(int64_t minimum, int64_t maximum,
                                     std::optional<int64_t> timeout_ms = std::nullopt) {
  return std::make_shared<DynamicBatcher>(DynamicBatcher::Options{1, minimum, maximum, timeout_ms},
                                          new_pool());
}

Arrays doubled(const Arrays& inputs) {
  return inputs.map([](const Array& array) {
    Values values = values_of(array);
    for (int64_t& value : values) value *= 2;
    return int64_array(array.shape, values);
  });
}

// A caller that waits for columns of its own.
class Caller {
 public:
  Caller(std::shared_ptr<DynamicBatcher> batcher, Values values)
      : thread_([this, batcher, values] {
          outputs_ = values_of(batcher->compute(columns(values)).front());
        }) {}

  Values join() {
    thread_.join();
    return outputs_;
  }
  bool is_blocked() const { return thread_.is_blocked(); }

 private:
  Values outputs_;
  Thread thread_;
};

// Returns once the call is pending, so that calls come in order.
std::unique_ptr<Caller> call(const std::shared_ptr<DynamicBatcher>& batcher, const Values& values) {
  const int64_t size = batcher->size();
  auto caller = std::make_unique<Caller>(batcher, values);
  wait_until([&] { return batcher->size() == size + static_cast<int64_t>(values.size()); });
  return caller;
}

TEST(options_that_make_no_sense_are_refused) {
  CHECK_THROWS(std::invalid_argument, make(0, 1));
  CHECK_THROWS(std::invalid_argument, make(3, 2));
  CHECK_THROWS(std::invalid_argument, make(1, 2, -1));
  CHECK_THROWS(std::invalid_argument, DynamicBatcher({-1, 1, 1, std::nullopt}, new_pool()).size());
}

TEST(inputs_without_columns_to_count_are_refused) {
  const auto batcher = make(1, 2);
  CHECK_THROWS(std::invalid_argument, batcher->compute(Arrays()));
  CHECK_THROWS(std::invalid_argument, batcher->compute(int64_array({2}, {1, 2})));
  CHECK_THROWS(std::invalid_argument, batcher->compute(columns({})));
  CHECK(batcher->size() == 0);
}

TEST(each_caller_gets_its_own_columns) {
  const auto batcher = make(6, 8);
  auto a = call(batcher, {1, 2, 3});
  auto b = call(batcher, {4});
  auto c = call(batcher, {5, 6});
  const auto batch = batcher->next();
  CHECK(batcher->size() == 0);
  CHECK((values_of(batch->inputs().front()) == Values{1, 2, 3, 4, 5, 6}));
  batch->set_outputs(doubled(batch->inputs()));
  CHECK((a->join() == Values{2, 4, 6}));
  CHECK((b->join() == Values{8}));
  CHECK((c->join() == Values{10, 12}));
}

TEST(calls_are_never_parted) {
  const auto batcher = make(1, 5);
  auto a = call(batcher, {1, 2, 3});
  auto b = call(batcher, {4, 5, 6});
  auto c = call(batcher, {7, 8});
  auto batch = batcher->next();
  CHECK((values_of(batch->inputs().front()) == Values{1, 2, 3}));
  batch->set_outputs(doubled(batch->inputs()));
  CHECK(batcher->size() == 5);
  batch = batcher->next();
  CHECK((values_of(batch->inputs().front()) == Values{4, 5, 6, 7, 8}));
  batch->set_outputs(doubled(batch->inputs()));
  CHECK((a->join() == Values{2, 4, 6}));
  CHECK((b->join() == Values{8, 10, 12}));
  CHECK((c->join() == Values{14, 16}));
}

TEST(a_call_of_more_columns_than_the_maximum_is_a_batch_of_its_own) {
  const auto batcher = make(1, 2);
  auto a = call(batcher, {1});
  auto b = call(batcher, {2, 3, 4});
  auto c = call(batcher, {5});
  for (const Values& values : {Values{1}, Values{2, 3, 4}, Values{5}}) {
    const auto batch = batcher->next();
    CHECK(values_of(batch->inputs().front()) == values);
    batch->set_outputs(doubled(batch->inputs()));
  }
  CHECK((a->join() == Values{2}));
  CHECK((b->join() == Values{4, 6, 8}));
  CHECK((c->join() == Values{10}));
}

TEST(outputs_may_have_another_structure_and_an_empty_state) {
  const auto batcher = make(1, 5);
  Thread caller([&] {
    const Arrays outputs = batcher->compute(Arrays::Tuple{columns({1, 2}), Arrays::Tuple{}});
    CHECK((values_of(outputs.tuple().at(0).dict().at("x").leaf()) == Values{1, 2}));
    CHECK(outputs.tuple().at(1).is_tuple() && outputs.tuple().at(1).empty());
  });
  const auto batch = batcher->next();
  CHECK(batch->inputs().tuple().at(1).empty());
  batch->set_outputs(
      Arrays::Tuple{Arrays::Dict{{"x", batch->inputs().tuple().at(0)}}, Arrays::Tuple{}});
  caller.join();
}

TEST(what_a_caller_gets_is_nobody_elses_memory) {
  const auto batcher = make(2, 2);
  Arrays first, second;
  Thread a([&] { first = batcher->compute(columns({1})); });
  Thread b([&] { second = batcher->compute(columns({1})); });
  const auto batch = batcher->next();
  const Arrays outputs = doubled(batch->inputs());
  batch->set_outputs(outputs);
  a.join();
  b.join();
  std::memset(first.front().data.get(), 0, 8);
  std::memset(outputs.front().data.get(), 0, 16);
  CHECK((values_of(second.front()) == Values{2}));
}

TEST(next_waits_for_the_minimum) {
  const auto batcher = make(3, 8);
  auto a = call(batcher, {1, 2});
  Thread server([&] {
    const auto batch = batcher->next();
    batch->set_outputs(doubled(batch->inputs()));
  });
  CHECK(server.is_blocked());
  auto b = std::make_unique<Caller>(batcher, Values{3});
  CHECK((a->join() == Values{2, 4}));
  CHECK((b->join() == Values{6}));
}

TEST(a_smaller_batch_comes_a_timeout_after_the_last_call) {
  constexpr std::chrono::milliseconds kTimeout(300);
  const auto batcher = make(5, 8, kTimeout.count());
  auto a = call(batcher, {1});
  CHECK(a->is_blocked());  // some time goes by
  const auto before = std::chrono::steady_clock::now();
  auto b = call(batcher, {2});
  const auto batch = batcher->next();
  CHECK(std::chrono::steady_clock::now() - before >= kTimeout);
  CHECK((values_of(batch->inputs().front()) == Values{1, 2}));
  batch->set_outputs(batch->inputs());
  CHECK((a->join() == Values{1}));
  CHECK((b->join() == Values{2}));
}

TEST(calls_that_another_server_leaves_below_the_minimum_time_out_too) {
  const auto batcher = make(3, 4, 10);
  std::atomic<int> served{0};
  std::atomic<bool> all_served{false};
  Threads servers;
  start(&servers, 2, [&](size_t) {
    const auto batch = batcher->next();
    ++served;
    // The first one is busy until the other has its batch too.
    wait_until([&] { return served == 2 || all_served; });
    batch->set_outputs(doubled(batch->inputs()));
  });
  CHECK(servers[0]->is_blocked() && servers[1]->is_blocked());
  auto a = std::make_unique<Caller>(batcher, Values{1, 2, 3});
  auto b = std::make_unique<Caller>(batcher, Values{4, 5});
  wait_until([&] { return served == 2; });
  all_served = true;
  join(&servers);
  CHECK((a->join() == Values{2, 4, 6}));
  CHECK((b->join() == Values{8, 10}));
}

TEST(outputs_that_do_not_fit_are_refused_and_may_be_set_again) {
  const auto batcher = make(1, 2);
  auto caller = call(batcher, {1, 2});
  const auto batch = batcher->next();
  CHECK_THROWS(std::invalid_argument, (batch->set_outputs(columns({1})), 0));
  CHECK_THROWS(std::invalid_argument, (batch->set_outputs(columns({1, 2, 3})), 0));
  CHECK_THROWS(std::invalid_argument, (batch->set_outputs(int64_array({2}, {1, 2})), 0));
  CHECK_THROWS(std::invalid_argument, (batch->set_outputs(Arrays()), 0));
  CHECK(caller->is_blocked());
  batch->set_outputs(columns({3, 4}));
  CHECK((caller->join() == Values{3, 4}));
}

TEST(a_batch_that_is_dropped_fails_its_callers_and_no_others) {
  const auto batcher = make(1, 2);
  auto a = call(batcher, {1});
  auto b = call(batcher, {2});
  batcher->next().reset();
  CHECK_THROWS(AsyncError, a->join());
  CHECK_THROWS(AsyncError, b->join());
  auto c = call(batcher, {3});
  const auto batch = batcher->next();
  batch->set_outputs(batch->inputs());
  CHECK((c->join() == Values{3}));
}

TEST(inputs_that_do_not_fit_together_fail_their_callers_and_the_batcher_goes_on) {
  const auto batcher = make(2, 2);
  Thread server([&] {
    const auto batch = batcher->next();
    batch->set_outputs(batch->inputs());
  });
  Thread a([&] { CHECK_THROWS(std::invalid_argument, batcher->compute(columns({1}))); });
  Thread b(
      [&] { CHECK_THROWS(std::invalid_argument, batcher->compute(Arrays::Tuple{columns({1})})); });
  a.join();
  b.join();
  Caller c(batcher, {3, 4});
  CHECK((c.join() == Values{3, 4}));
  server.join();
}

TEST(close_wakes_callers_that_wait_for_a_batch) {
  const auto batcher = make(5, 5);
  auto a = call(batcher, {1});
  auto b = call(batcher, {2});
  CHECK(a->is_blocked() && b->is_blocked());
  batcher->close();
  CHECK_THROWS(ClosedError, a->join());
  CHECK_THROWS(ClosedError, b->join());
  CHECK(batcher->size() == 0);
}

TEST(close_wakes_callers_whose_batch_is_taken_and_may_then_be_set_or_dropped) {
  for (const bool is_set : {false, true}) {
    const auto batcher = make(1, 5);
    auto a = call(batcher, {1});
    const auto batch = batcher->next();
    CHECK(a->is_blocked());
    batcher->close();
    CHECK_THROWS(ClosedError, a->join());
    if (is_set) batch->set_outputs(batch->inputs());
  }
}

TEST(close_wakes_next_with_and_without_a_timeout) {
  for (const std::optional<int64_t> timeout_ms :
       {std::optional<int64_t>(), std::optional<int64_t>(1'000'000)}) {
    const auto batcher = make(2, 2, timeout_ms);
    Threads servers;
    start(&servers, 3, [&](size_t) { CHECK(batcher->next() == nullptr); });
    auto caller = call(batcher, {1});
    CHECK(servers[0]->is_blocked());
    batcher->close();
    join(&servers);
    CHECK_THROWS(ClosedError, caller->join());
  }
}

TEST(wake_ends_the_call_that_is_cancelled_and_no_other) {
  const auto batcher = make(2, 2);
  std::atomic<bool> cancelled{false};
  Thread cancelled_call(
      [&] { CHECK_THROWS(ClosedError, batcher->compute(columns({1}), &cancelled)); });
  wait_until([&] { return batcher->size() == 1; });
  cancelled = true;
  batcher->wake();
  cancelled_call.join();
  CHECK(batcher->size() == 0);
  auto caller = call(batcher, {2});
  CHECK(caller->is_blocked());
  batcher->wake();
  CHECK(caller->is_blocked());
  auto other = call(batcher, {3});
  const auto batch = batcher->next();
  CHECK((values_of(batch->inputs().front()) == Values{2, 3}));
  batch->set_outputs(batch->inputs());
  CHECK((caller->join() == Values{2}));
  CHECK((other->join() == Values{3}));
}

TEST(a_batch_may_outlive_every_other_pointer_to_its_batcher) {
  auto batcher = make(1, 1);
  auto caller = call(batcher, {1});
  auto batch = batcher->next();
  batcher->close();
  CHECK_THROWS(ClosedError, caller->join());
  caller.reset();
  batcher.reset();
  batch->set_outputs(batch->inputs());
  batch.reset();
}

}  // namespace
}  // namespace torchbeast
