// SPDX-License-Identifier: Apache-2.0
// The learner's end of one stream to an environment server.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "array.h"
#include "nest.h"
#include "rpcenv.grpc.pb.h"

namespace torchbeast {

// A server did not answer in time.
class TimeoutError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A server was lost, or broke the protocol.
class ConnectionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
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

// Whom the learner believes, and what it shows to servers.
struct Credentials {
  struct Tls {  // PEM texts, not paths
    std::string ca;
    std::string certificate;
    std::string key;
  };
  std::optional<Tls> tls;  // else nothing is encrypted
  std::optional<std::string> auth_token;

  // Throws std::invalid_argument for what gRPC would not send.
  void check() const;
};

// What a stream asks of its server.
struct Wishes {
  std::optional<int64_t> num_envs;  // else as many as the server likes
  std::string seed;                 // ints separated by commas; else of the server's choice
  bool newest_frame_only = false;
  bool truncated_rows = false;
};

// One thread opens, reads and writes; any thread may cancel.
class EnvStream {
 public:
  using Clock = std::chrono::steady_clock;

  // Throws std::invalid_argument for credentials that make no sense.
  EnvStream(std::string address, const Wishes& wishes, const Credentials& credentials);
  ~EnvStream();
  EnvStream(const EnvStream&) = delete;
  EnvStream& operator=(const EnvStream&) = delete;

  // Connect and return the server's first message, which has a handshake of our protocol version
  // and comes once the environments are made. Throws TimeoutError, ConnectionError, of which
  // RefusedError where the server does not take our token.
  const rpcenv::Step& open(std::chrono::duration<double> connect_timeout,
                           std::chrono::duration<double> answer_timeout);

  // End the whole stream after this time. To be called before open().
  void limit(std::chrono::duration<double> timeout);

  // Send actions [1, N, ...]. Throws ConnectionError.
  void write(const Nest<Array>& action, std::chrono::duration<double> timeout);

  // The answer to what was written; valid until the next call. Throws ConnectionError.
  const rpcenv::Step& read();

  // Have open(), write() and read() fail soon.
  void cancel();

  // Cancel if what goes on has taken longer than its timeout. To be called now and then, since a
  // synchronous stream has no time limit of its own for a message.
  void cancel_if_late();

 private:
  void begin_wait(std::chrono::duration<double> timeout);
  std::string why_unreachable();
  [[noreturn]] void fail();

  const std::string address_;
  std::shared_ptr<grpc::Channel> channel_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<rpcenv::Action, rpcenv::Step>> stream_;
  // Used again for each message, since their memory is.
  rpcenv::Step step_;
  rpcenv::Action action_;

  std::atomic<bool> cancelled_{false};
  std::atomic<bool> late_{false};
  std::atomic<Clock::rep> deadline_{0};  // ticks of Clock; 0: none
};

}  // namespace torchbeast
