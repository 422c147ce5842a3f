// SPDX-License-Identifier: Apache-2.0
#include "batching_queue.h"

#include <algorithm>
#include <string>
#include <utility>

namespace torchbeast {

void check_batch_sizes(int64_t batch_dim, int64_t minimum_batch_size, int64_t maximum_batch_size,
                       std::optional<int64_t> timeout_ms) {
  if (batch_dim < 0) {
    throw std::invalid_argument("batch_dim is " + std::to_string(batch_dim) +
                                "; it must not be negative");
  }
  if (minimum_batch_size < 1) {
    throw std::invalid_argument("minimum_batch_size is " + std::to_string(minimum_batch_size) +
                                "; it must be at least 1");
  }
  if (maximum_batch_size < minimum_batch_size) {
    throw std::invalid_argument("maximum_batch_size is " + std::to_string(maximum_batch_size) +
                                ", below minimum_batch_size, which is " +
                                std::to_string(minimum_batch_size));
  }
  constexpr int64_t kMaxTimeoutMs = 1'000'000'000'000;  // more would overflow
  if (timeout_ms && (*timeout_ms < 0 || *timeout_ms > kMaxTimeoutMs)) {
    throw std::invalid_argument("timeout_ms is " + std::to_string(*timeout_ms) +
                                "; it must be from 0 to 1e12");
  }
}

BatchingQueue::BatchingQueue(Options options, std::shared_ptr<MemoryPool> pool, bool hand_over)
    : options_(options), pool_(std::move(pool)), hand_over_(hand_over) {
  check_batch_sizes(options_.batch_dim, options_.minimum_batch_size, options_.maximum_batch_size,
                    options_.timeout_ms);
  if (options_.maximum_queue_size && *options_.maximum_queue_size < options_.minimum_batch_size) {
    throw std::invalid_argument(
        "maximum_queue_size is " + std::to_string(*options_.maximum_queue_size) +
        ", below minimum_batch_size, which is " + std::to_string(options_.minimum_batch_size) +
        ": no batch could ever be full");
  }
}

void BatchingQueue::enqueue(Nest<Array> nest, bool owned, const std::atomic<bool>* cancelled) {
  const int64_t columns = count_columns(nest, static_cast<size_t>(options_.batch_dim));
  const auto is_cancelled = [&] { return cancelled != nullptr && *cancelled; };
  bool refused, room;
  {
    Lock lock(mutex_);
    while (!closed_ && !is_cancelled() && !has_room()) emptied_.wait(lock);
    refused = closed_ || is_cancelled();
    if (!refused && columns > 0) {
      items_.push_back({std::move(nest), columns, 0, owned, Clock::now()});
      columns_ += columns;
    }
    room = has_room();
  }
  // One producer at a time is woken, and wakes the next: with many streams, most would find the
  // queue full again.
  if (room) emptied_.notify_one();
  if (refused) throw ClosedError("the queue is closed");
  filled_.notify_one();
}

std::optional<Nest<Array>> BatchingQueue::dequeue() {
  std::vector<Item> items;
  bool more;
  {
    Lock lock(mutex_);
    if (!wait_for_batch(lock)) return std::nullopt;
    items = take();
    more = columns_ > 0;  // however few: some consumer must wait for their timeout
  }
  emptied_.notify_one();
  if (more) filled_.notify_one();

  // Outside the lock: copies take long, and freeing a Python array may wait for the GIL.
  const Item& first = items[0];
  if (hand_over_ && items.size() == 1 && first.owned && first.begin == 0 &&
      first.columns == count_columns(first.nest, static_cast<size_t>(options_.batch_dim))) {
    return std::move(items[0].nest);
  }
  std::vector<NestColumns> parts;
  for (Item& item : items) {
    parts.push_back({std::move(item.nest), item.begin, item.begin + item.columns});
  }
  return join_columns(parts, static_cast<size_t>(options_.batch_dim), *pool_);
}

bool BatchingQueue::has_room() const {
  return !options_.maximum_queue_size || columns_ < *options_.maximum_queue_size;
}

// Returns false once closed.
bool BatchingQueue::wait_for_batch(Lock& lock) {
  while (!closed_ && columns_ < options_.minimum_batch_size) {
    if (items_.empty() || !options_.timeout_ms) {
      filled_.wait(lock);
      continue;
    }
    const auto deadline = items_.front().arrival + Milliseconds(*options_.timeout_ms);
    if (Clock::now() >= deadline) break;
    filled_.wait_until(lock, deadline);
  }
  return !closed_;
}

// Takes up to maximum_batch_size columns: items whose `columns` counts those taken.
std::vector<BatchingQueue::Item> BatchingQueue::take() {
  std::vector<Item> parts;
  int64_t space = std::min(options_.maximum_batch_size, columns_);
  columns_ -= space;
  while (space > 0) {
    Item& item = items_.front();
    if (item.columns <= space) {
      space -= item.columns;
      parts.push_back(std::move(item));
      items_.pop_front();
    } else {
      parts.push_back({item.nest, space, item.begin, item.owned, item.arrival});
      item.begin += space;
      item.columns -= space;
      space = 0;
    }
  }
  return parts;
}

void BatchingQueue::close() {
  std::deque<Item> dropped;  // freed after the lock
  {
    Lock lock(mutex_);
    if (closed_) throw std::runtime_error("the queue is closed already");
    closed_ = true;
    dropped.swap(items_);
    columns_ = 0;
  }
  filled_.notify_all();
  emptied_.notify_all();
}

bool BatchingQueue::is_closed() const {
  Lock lock(mutex_);
  return closed_;
}

int64_t BatchingQueue::size() const {
  Lock lock(mutex_);
  return columns_;
}

void BatchingQueue::wake() {
  {
    Lock lock(mutex_);
  }  // now no thread is between its check and its wait
  filled_.notify_all();
  emptied_.notify_all();
}

}  // namespace torchbeast
