// SPDX-License-Identifier: Apache-2.0
// What clang's thread-safety analysis must refuse; never built (see csrc/check_thread_safety.sh).
#include "mutex.h"

class Counter {
 public:
  void increment() { ++count_; }  // without the mutex

 private:
  torchbeast::Mutex mutex_;
  int count_ TB_GUARDED_BY(mutex_) = 0;
};

void increment(Counter& counter) { counter.increment(); }
