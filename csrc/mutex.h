// SPDX-License-Identifier: Apache-2.0
// Mutex, lock and condition variable for clang's thread-safety analysis, which does not understand
// those of the standard library. csrc/check_thread_safety.sh runs the analysis.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#ifdef __clang__
#define TB_THREAD_ANNOTATION(attribute) __attribute__((attribute))
#else
#define TB_THREAD_ANNOTATION(attribute)
#endif
// The prefix TB_ keeps these apart from absl's. For a member that is read and written only while
// the mutex is held:
#define TB_GUARDED_BY(mutex) TB_THREAD_ANNOTATION(guarded_by(mutex))
// For a function that is called only while the mutex is held:
#define TB_REQUIRES(mutex) TB_THREAD_ANNOTATION(requires_capability(mutex))

namespace torchbeast {

class TB_THREAD_ANNOTATION(capability("mutex")) Mutex {
 private:
  friend class Lock;
  std::mutex mutex_;
};

// Holds the mutex for as long as it lives.
class TB_THREAD_ANNOTATION(scoped_lockable) Lock {
 public:
  explicit Lock(Mutex& mutex) TB_THREAD_ANNOTATION(acquire_capability(mutex))
      : lock_(mutex.mutex_) {}
  ~Lock() TB_THREAD_ANNOTATION(release_capability()) {}
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  friend class Condition;
  std::unique_lock<std::mutex> lock_;
};

// Waits may end early: call them in a loop that checks the condition. (They take no predicate: the
// analysis does not know that a lambda is called with the mutex held.)
class Condition {
 public:
  void wait(Lock& lock) { variable_.wait(lock.lock_); }
  void wait_until(Lock& lock, std::chrono::steady_clock::time_point deadline) {
    variable_.wait_until(lock.lock_, deadline);
  }
  void notify_one() { variable_.notify_one(); }
  void notify_all() { variable_.notify_all(); }

 private:
  std::condition_variable variable_;
};

}  // namespace torchbeast
