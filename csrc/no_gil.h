// SPDX-License-Identifier: Apache-2.0
// A scope without the GIL, for code that can wait.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <thread>

namespace torchbeast {

// Releases the GIL, and takes it again at the end of the scope. While the interpreter is
// finalizing, Python would unwind a thread that asks for the GIL, through destructors that must not
// throw: such a thread sleeps forever instead. The thread that finalizes, in a __del__, say, is the
// only one that has the GIL then, and keeps it.
class NoGil {
 public:
  NoGil() : state_(is_finalizing() ? nullptr : PyEval_SaveThread()) {}
  ~NoGil() {
    if (state_ == nullptr) return;
    while (is_finalizing()) std::this_thread::sleep_for(std::chrono::hours(1));
    PyEval_RestoreThread(state_);
  }
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;

 private:
  static bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
  }

  PyThreadState* const state_;
};

}  // namespace torchbeast
