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
  if (timeout_ms && *timeout_ms < 0) {
    throw std::invalid_argument("timeout_ms is " + std::to_string(*timeout_ms) +
                                "; it must not be negative");
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
        ": no batch could ever come out");
  }
}

void BatchingQueue::enqueue(Nest<Array> nest, bool owned, const std::atomic<bool>* cancelled) {
  const int64_t columns = count_columns(nest, static_cast<size_t>(options_.batch_dim));
  const auto has_room = [&] {
    return !options_.maximum_queue_size || columns_ < *options_.maximum_queue_size;
  };
  const auto ended = [&] { return closed_ || (cancelled != nullptr && *cancelled); };
  bool refused, room;
  {
    std::unique_lock lock(mutex_);
    emptied_.wait(lock, [&] { return ended() || has_room(); });
    refused = ended();
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
    std::unique_lock lock(mutex_);
    if (!wait_for_batch(lock)) return std::nullopt;
    items = take();
    more = columns_ > 0;  // too few too: somebody must wait for their timeout
  }
  emptied_.notify_one();
  if (more) filled_.notify_one();

  // Outside the lock: copies take long, and what frees a Python array may wait for the GIL.
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

// Returns false once closed. Requires mutex_.
bool BatchingQueue::wait_for_batch(std::unique_lock<std::mutex>& lock) {
  const auto ready = [&] { return closed_ || columns_ >= options_.minimum_batch_size; };
  if (!options_.timeout_ms) {
    filled_.wait(lock, ready);
    return !closed_;
  }
  const Milliseconds timeout(*options_.timeout_ms);
  while (!ready()) {
    if (items_.empty()) {
      filled_.wait(lock);
    } else if (Clock::now() >= items_.front().arrival + timeout) {
      break;
    } else {
      filled_.wait_until(lock, items_.front().arrival + timeout);
    }
  }
  return !closed_;
}

// Takes up to maximum_batch_size columns; the `columns` of what it returns are those of the part.
// Requires mutex_.
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
  std::vector<std::function<void()>> callbacks;
  {
    std::lock_guard lock(mutex_);
    if (closed_) throw std::runtime_error("the queue is closed already");
    closed_ = true;
    dropped.swap(items_);
    columns_ = 0;
    callbacks.swap(callbacks_);
  }
  filled_.notify_all();
  emptied_.notify_all();
  for (const auto& callback : callbacks) callback();
}

bool BatchingQueue::is_closed() const {
  std::lock_guard lock(mutex_);
  return closed_;
}

int64_t BatchingQueue::size() const {
  std::lock_guard lock(mutex_);
  return columns_;
}

void BatchingQueue::on_close(std::function<void()> callback) {
  {
    std::lock_guard lock(mutex_);
    if (!closed_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

void BatchingQueue::wake() {
  std::unique_lock(mutex_).unlock();  // so that nobody is between looking and waiting
  filled_.notify_all();
  emptied_.notify_all();
}

}  // namespace torchbeast
