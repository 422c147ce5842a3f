// SPDX-License-Identifier: Apache-2.0
// Code that runs without the GIL, which other Python threads can then take.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <thread>

namespace torchbeast {

// Gives up the GIL, and takes it back unless the interpreter is ending: then the thread that asks
// for it would be unwound through destructors that must not throw, so it rests instead.
class NoGil {
 public:
  NoGil() : state_(PyEval_SaveThread()) {}
  ~NoGil() {
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
