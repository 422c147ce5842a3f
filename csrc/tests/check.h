// SPDX-License-Identifier: Apache-2.0
// Helpers of the core's tests. Each file is a program: TEST(promise) { ... }, no main.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "array.h"

// Unlike assert(), in optimized builds too.
#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                  \
    }                                                                                \
  } while (false)

#define CHECK_THROWS(Exception, expression)                                             \
  do {                                                                                  \
    bool thrown = false;                                                                \
    try {                                                                               \
      (void)(expression);                                                               \
    } catch (const Exception&) {                                                        \
      thrown = true;                                                                    \
    }                                                                                   \
    if (!thrown) {                                                                      \
      std::fprintf(stderr, "%s:%d: throws no %s: %s\n", __FILE__, __LINE__, #Exception, \
                   #expression);                                                        \
      std::abort();                                                                     \
    }                                                                                   \
  } while (false)

#define TEST(promise)                                                      \
  static void promise();                                                   \
  static const bool promise##_is_listed = list_test(#promise, &(promise)); \
  static void promise()

inline std::vector<std::pair<const char*, void (*)()>>& all_tests() {
  static std::vector<std::pair<const char*, void (*)()>> tests;
  return tests;
}

inline bool list_test(const char* promise, void (*test)()) {
  all_tests().emplace_back(promise, test);
  return true;
}

int main() {
  for (const auto& [promise, test] : all_tests()) {
    std::printf("%s\n", promise);
    std::fflush(stdout);  // shows which test hangs
    test();
  }
}

// A thread whose exception is thrown again by join().
class Thread {
 public:
  explicit Thread(std::function<void()> function)
      : thread_([this, function = std::move(function)] {
          try {
            function();
          } catch (...) {
            error_ = std::current_exception();
          }
          finished_ = true;
        }) {}
  ~Thread() {
    if (thread_.joinable()) thread_.join();
  }

  void join() {
    thread_.join();
    if (error_) std::rethrow_exception(error_);
  }

  bool is_finished() const { return finished_; }

  // Waits long enough for a thread that is not blocked to end.
  bool is_blocked() const {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    return !finished_;
  }

 private:
  std::atomic<bool> finished_{false};
  std::exception_ptr error_;
  std::thread thread_;  // last, since it uses the others
};

using Threads = std::vector<std::unique_ptr<Thread>>;

// Start threads that call `function` with their number.
inline void start(Threads* threads, size_t count, const std::function<void(size_t)>& function) {
  for (size_t i = 0; i < count; ++i) {
    threads->push_back(std::make_unique<Thread>([function, i] { function(i); }));
  }
}

inline void join(Threads* threads) {
  for (const auto& thread : *threads) thread->join();
  threads->clear();
}

inline void wait_until(const std::function<bool()>& condition) {
  while (!condition()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

using Values = std::vector<int64_t>;

inline std::shared_ptr<torchbeast::MemoryPool> new_pool() {
  return std::make_shared<torchbeast::MemoryPool>();
}

// In memory that ends where the values do, so that the address sanitizer sees reads beyond.
inline torchbeast::Array int64_array(torchbeast::Shape shape, const Values& values) {
  torchbeast::Array array{torchbeast::DType::kInt64, std::move(shape), nullptr};
  CHECK(array.num_bytes() == values.size() * sizeof(int64_t));
  std::shared_ptr<std::byte[]> memory(new std::byte[array.num_bytes()]);
  if (!values.empty()) std::memcpy(memory.get(), values.data(), array.num_bytes());
  array.data = torchbeast::MemoryPool::Block(memory, memory.get());
  return array;
}

// [1, number of values]
inline torchbeast::Array columns(const Values& values) {
  return int64_array({1, static_cast<int64_t>(values.size())}, values);
}

inline Values values_of(const torchbeast::ArrayView& array) {
  CHECK(array.dtype == torchbeast::DType::kInt64);
  Values values(array.num_bytes() / sizeof(int64_t));
  if (!values.empty()) std::memcpy(values.data(), array.data, array.num_bytes());
  return values;
}

inline Values values_of(const torchbeast::Array& array) { return values_of(array.view()); }
