// SPDX-License-Identifier: Apache-2.0
// Errors that callers distinguish; module.cc maps them to Python exceptions.
#pragma once

#include <chrono>
#include <stdexcept>
#include <string>

namespace torchbeast {

// The queue or batcher was closed, before or while the caller waited.
class ClosedError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A batch was dropped before it was answered.
class AsyncError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A message violates the protocol.
class WireError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A server cannot be used; another attempt may succeed.
class ServerError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A server did not answer in time.
class TimeoutError : public ServerError {
 public:
  using ServerError::ServerError;
};

// A server was lost, or violated the protocol.
class ConnectionError : public ServerError {
 public:
  using ServerError::ServerError;
};

// A server is not what was asked for, or disagrees with the others.
class RefusedError : public ConnectionError {
 public:
  using ConnectionError::ConnectionError;
};

// A server's environment failed; its traceback is in the message.
class EnvironmentError : public ConnectionError {
 public:
  using ConnectionError::ConnectionError;
};

// A duration for error messages, such as "0.5 s".
inline std::string seconds_text(std::chrono::duration<double> duration) {
  const std::string text = std::to_string(duration.count());
  return text.substr(0, text.find('.') + 2) + " s";
}

}  // namespace torchbeast
