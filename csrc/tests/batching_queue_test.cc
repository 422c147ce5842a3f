// SPDX-License-Identifier: Apache-2.0
#include "batching_queue.h"

#include <atomic>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "check.h"

namespace torchbeast {
namespace {

using Arrays = Nest<Array>;
using Options = BatchingQueue::Options;

// Columns `begin` to `end` of [1, columns]: each holds its number.
Array range(int64_t begin, int64_t end) {
  Values values;
  for (int64_t i = begin; i < end; ++i) values.push_back(i);
  return columns(values);
}

Values next(BatchingQueue& queue) {
  const std::optional<Arrays> batch = queue.dequeue();
  CHECK(batch);
  return values_of(batch->front());
}

TEST(options_that_make_no_sense_are_refused) {
  const auto make = [](int64_t batch_dim, int64_t minimum, int64_t maximum,
                       std::optional<int64_t> timeout_ms, std::optional<int64_t> queue_size) {
    BatchingQueue({batch_dim, minimum, maximum, timeout_ms, queue_size}, new_pool());
    return true;
  };
  CHECK(make(0, 1, 1, 0, 1));
  CHECK_THROWS(std::invalid_argument, make(-1, 1, 1, std::nullopt, std::nullopt));
  CHECK_THROWS(std::invalid_argument, make(1, 0, 1, std::nullopt, std::nullopt));
  CHECK_THROWS(std::invalid_argument, make(1, 3, 2, std::nullopt, std::nullopt));
  CHECK_THROWS(std::invalid_argument, make(1, 1, 2, -1, std::nullopt));
  CHECK_THROWS(std::invalid_argument, make(1, 2, 2, std::nullopt, 1));
  CHECK_THROWS(std::invalid_argument, make(1, 1, 2, std::nullopt, 0));
}

TEST(a_nest_of_no_columns_adds_nothing) {
  BatchingQueue queue({}, new_pool());
  queue.enqueue(int64_array({1, 0}, {}));
  CHECK(queue.size() == 0);
  queue.enqueue(range(0, 1));
  CHECK((values_of(queue.dequeue()->front()) == Values{0}));
}

TEST(columns_come_in_order_in_batches_that_part_and_join_nests) {
  BatchingQueue queue({1, 4, 4, std::nullopt, std::nullopt}, new_pool());
  queue.enqueue(range(0, 3));
  queue.enqueue(range(3, 5));
  queue.enqueue(range(5, 12));
  CHECK(queue.size() == 12);
  CHECK((next(queue) == Values{0, 1, 2, 3}));
  CHECK(queue.size() == 8);
  CHECK((next(queue) == Values{4, 5, 6, 7}));
  CHECK((next(queue) == Values{8, 9, 10, 11}));
  CHECK(queue.size() == 0);
}

TEST(all_arrays_of_a_nest_are_parted_alike) {
  BatchingQueue queue({0, 2, 2, std::nullopt, std::nullopt}, new_pool());
  for (int64_t i = 0; i < 6; i += 3) {
    queue.enqueue(Arrays::Dict{{"a", int64_array({3}, {i, i + 1, i + 2})},
                               {"b", int64_array({3, 1}, {-i, -i - 1, -i - 2})}});
  }
  for (int64_t i = 0; i < 6; i += 2) {
    const std::optional<Arrays> batch = queue.dequeue();
    CHECK((values_of(batch->dict().at("a").leaf()) == Values{i, i + 1}));
    CHECK((values_of(batch->dict().at("b").leaf()) == Values{-i, -i - 1}));
    CHECK((batch->dict().at("b").leaf().shape == Shape{2, 1}));
  }
}

TEST(dequeue_waits_for_the_minimum) {
  BatchingQueue queue({1, 3, 8, std::nullopt, std::nullopt}, new_pool());
  queue.enqueue(range(0, 2));
  Values batch;
  Thread consumer([&] { batch = next(queue); });
  CHECK(consumer.is_blocked());
  queue.enqueue(range(2, 3));
  consumer.join();
  CHECK((batch == Values{0, 1, 2}));
}

TEST(after_the_timeout_a_batch_may_be_smaller) {
  BatchingQueue queue({1, 3, 8, 10, std::nullopt}, new_pool());
  Values batch;
  Thread consumer([&] { batch = next(queue); });
  CHECK(consumer.is_blocked());  // an empty batch never comes
  queue.enqueue(range(0, 2));
  consumer.join();
  CHECK((batch == Values{0, 1}));
}

TEST(what_another_consumer_leaves_below_the_minimum_times_out_too) {
  BatchingQueue queue({1, 3, 4, 10, std::nullopt}, new_pool());
  std::atomic<size_t> count{0};
  Threads consumers;
  start(&consumers, 2, [&](size_t) { count += next(queue).size(); });
  CHECK(consumers[0]->is_blocked() && consumers[1]->is_blocked());
  queue.enqueue(range(0, 6));  // 4 for one; the other must notice that 2 are left
  join(&consumers);
  CHECK(count == 6);
}

TEST(enqueue_waits_while_the_queue_is_full) {
  BatchingQueue queue({1, 1, 2, std::nullopt, 4}, new_pool());
  queue.enqueue(range(0, 4));
  Thread producer([&] { queue.enqueue(range(4, 5)); });
  CHECK(producer.is_blocked());
  CHECK(queue.size() == 4);
  CHECK((next(queue) == Values{0, 1}));
  producer.join();
  CHECK((next(queue) == Values{2, 3}));
  CHECK((next(queue) == Values{4}));
}

TEST(a_nest_larger_than_the_queue_gets_in_when_there_is_room) {
  BatchingQueue queue({1, 1, 8, std::nullopt, 2}, new_pool());
  queue.enqueue(range(0, 5));
  CHECK(queue.size() == 5);
  CHECK((next(queue) == Values{0, 1, 2, 3, 4}));
}

TEST(only_an_owned_nest_that_is_a_whole_batch_is_handed_over) {
  const auto enqueue_one = [](bool hand_over, bool owned, int64_t maximum) {
    BatchingQueue queue({1, 1, maximum, std::nullopt, std::nullopt}, new_pool(), hand_over);
    const Array array = range(0, 4);
    queue.enqueue(array, owned);
    return queue.dequeue()->front().data.get() == array.data.get();
  };
  CHECK(enqueue_one(true, true, 4));
  CHECK(!enqueue_one(true, false, 4));
  CHECK(!enqueue_one(false, true, 4));
  CHECK(!enqueue_one(true, true, 2));
}

TEST(the_last_part_of_an_owned_nest_is_copied) {
  BatchingQueue queue({1, 1, 2, std::nullopt, std::nullopt}, new_pool());
  const Array array = range(0, 3);
  queue.enqueue(array, true);
  CHECK((next(queue) == Values{0, 1}));
  const std::optional<Arrays> rest = queue.dequeue();
  CHECK((values_of(rest->front()) == Values{2}));
}

TEST(nests_that_do_not_fit_together_fail_in_dequeue_and_the_queue_goes_on) {
  BatchingQueue queue({1, 2, 2, std::nullopt, std::nullopt}, new_pool());
  queue.enqueue(range(0, 1));
  queue.enqueue(Arrays::Tuple{range(1, 2)});
  CHECK_THROWS(std::invalid_argument, queue.dequeue());
  queue.enqueue(range(2, 4));
  CHECK((next(queue) == Values{2, 3}));
}

TEST(close_wakes_enqueue) {
  BatchingQueue queue({1, 1, 1, std::nullopt, 1}, new_pool());
  queue.enqueue(range(0, 1));
  Threads producers;
  start(&producers, 3, [&](size_t) { CHECK_THROWS(ClosedError, (queue.enqueue(range(1, 2)), 0)); });
  CHECK(producers[0]->is_blocked());
  queue.close();
  join(&producers);
}

TEST(close_wakes_dequeue_with_and_without_a_timeout) {
  for (const std::optional<int64_t> timeout_ms :
       {std::optional<int64_t>(), std::optional<int64_t>(1'000'000)}) {
    for (const int64_t waiting : {0, 1}) {
      BatchingQueue queue({1, 2, 2, timeout_ms, std::nullopt}, new_pool());
      if (waiting > 0) queue.enqueue(range(0, waiting));
      Threads consumers;
      start(&consumers, 3, [&](size_t) { CHECK(!queue.dequeue()); });
      CHECK(consumers[0]->is_blocked());
      queue.close();
      join(&consumers);
    }
  }
}

TEST(a_closed_queue_takes_and_gives_nothing) {
  BatchingQueue queue({}, new_pool());
  queue.enqueue(range(0, 4));
  CHECK(!queue.is_closed());
  queue.close();
  CHECK(queue.is_closed());
  CHECK(queue.size() == 0);
  CHECK(!queue.dequeue());
  CHECK_THROWS(ClosedError, (queue.enqueue(range(0, 1)), 0));
  CHECK_THROWS(std::runtime_error, (queue.close(), 0));
}

TEST(wake_ends_the_enqueue_that_is_cancelled_and_no_other) {
  BatchingQueue queue({1, 1, 1, std::nullopt, 1}, new_pool());
  queue.enqueue(range(0, 1));
  std::atomic<bool> cancelled{false};
  const std::atomic<bool> not_cancelled{false};
  Thread first(
      [&] { CHECK_THROWS(ClosedError, (queue.enqueue(range(1, 2), false, &cancelled), 0)); });
  Thread second([&] { queue.enqueue(range(2, 3), false, &not_cancelled); });
  CHECK(first.is_blocked() && second.is_blocked());
  cancelled = true;
  queue.wake();
  first.join();
  CHECK(second.is_blocked());
  CHECK((next(queue) == Values{0}));
  second.join();
  CHECK((next(queue) == Values{2}));
}

TEST(all_producers_that_there_is_room_for_get_in) {
  BatchingQueue queue({1, 4, 4, std::nullopt, 4}, new_pool());
  queue.enqueue(range(0, 4));
  Threads producers;
  start(&producers, 4, [&](size_t) { queue.enqueue(range(0, 1)); });
  for (const auto& producer : producers) CHECK(producer->is_blocked());
  CHECK((next(queue) == Values{0, 1, 2, 3}));
  join(&producers);
  CHECK(queue.size() == 4);
}

TEST(a_producer_that_is_cancelled_leaves_its_turn_to_the_next) {
  BatchingQueue queue({1, 1, 1, std::nullopt, 1}, new_pool());
  queue.enqueue(range(0, 1));
  std::atomic<bool> cancelled{false};
  Thread first(
      [&] { CHECK_THROWS(ClosedError, (queue.enqueue(range(1, 2), false, &cancelled), 0)); });
  CHECK(first.is_blocked());
  Thread second([&] { queue.enqueue(range(2, 3)); });
  CHECK(second.is_blocked());
  cancelled = true;  // nothing wakes it before there is room in the queue
  CHECK((next(queue) == Values{0}));
  second.join();
  queue.wake();
  first.join();
  CHECK((next(queue) == Values{2}));
}

}  // namespace
}  // namespace torchbeast
