// SPDX-License-Identifier: Apache-2.0
#include "dynamic_batcher.h"

#include <algorithm>
#include <string>
#include <utility>

#include "batching_queue.h"

namespace torchbeast {

DynamicBatcher::DynamicBatcher(Options options, std::shared_ptr<MemoryPool> pool,
                               std::shared_ptr<MemoryPool> input_pool)
    : options_(options),
      pool_(std::move(pool)),
      input_pool_(input_pool ? std::move(input_pool) : pool_) {
  check_batch_sizes(options_.batch_dim, options_.minimum_batch_size, options_.maximum_batch_size,
                    options_.timeout_ms);
}

Nest<Array> DynamicBatcher::compute(Nest<Array> inputs, const std::atomic<bool>* cancelled) {
  const int64_t columns = count_columns(inputs, static_cast<size_t>(options_.batch_dim));
  if (columns == 0) throw std::invalid_argument("the inputs have no columns");
  auto call = std::make_shared<Call>();
  call->inputs = std::move(inputs);
  call->columns = columns;
  {
    Lock lock(mutex_);
    if (!closed_) {
      call->arrival = Clock::now();
      pending_.push_back(call);
      waiting_.insert(call);
      columns_ += columns;
      filled_.notify_one();
      while (!call->done && !closed_ && !(cancelled != nullptr && *cancelled)) {
        call->answered.wait(lock);
      }
      forget(call);
    }
    if (!call->done) throw ClosedError("the batcher is closed");
  }
  if (call->error) std::rethrow_exception(call->error);
  return std::move(call->outputs);
}

void DynamicBatcher::forget(const std::shared_ptr<Call>& call) {
  waiting_.erase(call);
  const auto found = std::find(pending_.begin(), pending_.end(), call);
  if (found != pending_.end()) {
    columns_ -= call->columns;
    pending_.erase(found);
  }
}

std::unique_ptr<Batch> DynamicBatcher::next() {
  while (true) {
    Calls calls;
    bool more;
    {
      Lock lock(mutex_);
      if (!wait_for_calls(lock)) return nullptr;
      calls = take();
      more = columns_ > 0;  // however few: some thread must wait for their timeout
    }
    if (more) filled_.notify_one();

    // Outside the lock: copies take long, and freeing a Python array may wait for the GIL.
    std::vector<NestColumns> parts;
    for (const auto& call : calls) {
      parts.push_back({std::move(call->inputs), 0, call->columns});
    }
    try {
      Nest<Array> inputs =
          join_columns(parts, static_cast<size_t>(options_.batch_dim), *input_pool_);
      return std::make_unique<Batch>(shared_from_this(), std::move(calls), std::move(inputs));
    } catch (const std::invalid_argument&) {
      fail(calls, std::current_exception());  // the callers' error, not this thread's
    } catch (const std::exception& error) {
      // Not the same object: a Python error can be raised in one thread alone.
      fail(calls, std::make_exception_ptr(std::runtime_error(error.what())));
      throw;
    }
  }
}

// Returns false once closed.
bool DynamicBatcher::wait_for_calls(Lock& lock) {
  while (!closed_ && columns_ < options_.minimum_batch_size) {
    if (pending_.empty() || !options_.timeout_ms) {
      filled_.wait(lock);
      continue;
    }
    const auto deadline = pending_.back()->arrival + Milliseconds(*options_.timeout_ms);
    if (Clock::now() >= deadline) break;
    filled_.wait_until(lock, deadline);
  }
  return !closed_;
}

// Takes as many whole calls as fit, and at least one.
DynamicBatcher::Calls DynamicBatcher::take() {
  Calls calls;
  int64_t space = options_.maximum_batch_size;
  while (!pending_.empty() && (calls.empty() || pending_.front()->columns <= space)) {
    space -= pending_.front()->columns;
    columns_ -= pending_.front()->columns;
    calls.push_back(std::move(pending_.front()));
    pending_.pop_front();
  }
  return calls;
}

void DynamicBatcher::answer(const Calls& calls, std::vector<Nest<Array>> outputs) {
  Lock lock(mutex_);
  for (size_t i = 0; i < calls.size(); ++i) {
    calls[i]->outputs = std::move(outputs[i]);
    calls[i]->done = true;
    calls[i]->answered.notify_one();
  }
}

void DynamicBatcher::fail(const Calls& calls, std::exception_ptr error) {
  Lock lock(mutex_);
  if (closed_) return;  // the callers get ClosedError
  for (const auto& call : calls) {
    call->error = error;
    call->done = true;
    call->answered.notify_one();
  }
}

void DynamicBatcher::close() {
  {
    Lock lock(mutex_);
    if (closed_) throw std::runtime_error("the batcher is closed already");
    closed_ = true;
    for (const auto& call : waiting_) call->answered.notify_one();
  }
  filled_.notify_all();
}

bool DynamicBatcher::is_closed() const {
  Lock lock(mutex_);
  return closed_;
}

int64_t DynamicBatcher::size() const {
  Lock lock(mutex_);
  return columns_;
}

void DynamicBatcher::wake() {
  Lock lock(mutex_);
  for (const auto& call : waiting_) call->answered.notify_one();
}

Batch::Batch(std::shared_ptr<DynamicBatcher> batcher, DynamicBatcher::Calls calls,
             Nest<Array> inputs)
    : batcher_(std::move(batcher)), calls_(std::move(calls)), inputs_(std::move(inputs)) {}

Batch::~Batch() {
  if (!answered_) {
    batcher_->fail(calls_, std::make_exception_ptr(
                               AsyncError("the batch was dropped before its outputs were set")));
  }
}

void Batch::set_outputs(const Nest<Array>& outputs) {
  if (answered_) throw std::runtime_error("the outputs of this batch are set already");
  const auto batch_dim = static_cast<size_t>(batcher_->options_.batch_dim);
  int64_t expected = 0;
  for (const auto& call : calls_) expected += call->columns;
  const int64_t columns = count_columns(outputs, batch_dim);
  if (columns != expected) {
    throw std::invalid_argument("the outputs have " + std::to_string(columns) +
                                " columns along dimension " + std::to_string(batch_dim) +
                                ", but the batch has " + std::to_string(expected));
  }
  std::vector<Nest<Array>> parts;
  int64_t begin = 0;
  for (const auto& call : calls_) {
    // Copied, since a caller may keep its part for long: it must not hold the others' memory.
    parts.push_back(
        join_columns({{outputs, begin, begin + call->columns}}, batch_dim, *batcher_->pool_));
    begin += call->columns;
  }
  if (answered_.exchange(true)) {
    throw std::runtime_error("the outputs of this batch are set already");
  }
  batcher_->answer(calls_, std::move(parts));
}

}  // namespace torchbeast
