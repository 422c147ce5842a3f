// SPDX-License-Identifier: Apache-2.0
#include "env_stream.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "errors.h"
#include "wire.h"

namespace torchbeast {

namespace {

constexpr size_t kMaxErrorBytes = 20'000;  // longer errors are shortened

}  // namespace

const rpcenv::Step& EnvStream::open(Seconds connect_timeout, Seconds answer_timeout) {
  begin(connect_timeout, answer_timeout);
  read();
  if (!step_.has_handshake()) throw ConnectionError(peer_ + " sent no handshake");
  const rpcenv::Handshake& handshake = step_.handshake();
  if (handshake.protocol_version() != kProtocolVersion) {
    const std::string reason = "refused: " + peer_ + " speaks protocol version " +
                               std::to_string(handshake.protocol_version()) +
                               ", but this learner speaks " + std::to_string(kProtocolVersion) +
                               ": update the older one";
    refuse(reason);
    throw RefusedError(reason);
  }
  if (handshake.num_envs() < 1 || handshake.num_envs() > kMaxMessageBytes) {
    throw RefusedError("refused: " + peer_ + " has " + std::to_string(handshake.num_envs()) +
                       " environments a stream");
  }
  return step_;
}

void EnvStream::write(const Nest<Array>& action, Seconds timeout) {
  // On the wire there is no time dimension.
  encode(action.map([](const Array& array) {
    return ArrayView{array.dtype, Shape(array.shape.begin() + 1, array.shape.end()),
                     array.data.get()};
  }),
         action_.mutable_action());
  begin_wait(timeout);
  if (!write_message(action_)) fail();
}

const rpcenv::Step& EnvStream::read() {
  if (!read_message(&step_)) fail();
  end_wait();
  if (!step_.error().empty()) {
    std::string error = step_.error();
    if (error.size() > kMaxErrorBytes) {  // the end of a traceback has the error
      error = "..." + error.substr(error.size() - kMaxErrorBytes);
    }
    throw EnvironmentError(peer_ + " says: " + error);
  }
  return step_;
}

void EnvStream::cancel() {
  cancelled_ = true;
  try_cancel();
}

void EnvStream::begin_wait(Seconds timeout) {
  timeout_ = timeout;
  const auto end =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::min(timeout, kLongest));
  deadline_ = end.time_since_epoch().count();
}

void EnvStream::cancel_if_late() {
  const Clock::rep deadline = deadline_;
  if (deadline != 0 && Clock::now().time_since_epoch().count() > deadline) {
    late_ = true;
    try_cancel();
  }
}

void EnvStream::extend(Clock::duration time) {
  Clock::rep deadline = deadline_;  // the stream's thread may change it meanwhile
  while (deadline != 0 && !deadline_.compare_exchange_weak(deadline, deadline + time.count())) {
  }
}

void EnvStream::fail() {
  const bool too_slow = late_;
  const double limit = timeout_.count();
  // A malformed message leaves the stream open, so that finish() could block for long.
  begin_wait(kGrace);
  const grpc::Status status = finish();
  end_wait();
  if (too_slow) {
    std::ostringstream text;
    text << peer_ << " hangs: it took more than " << limit << " s";
    throw ConnectionError(text.str());
  }
  if (late_) {
    throw ConnectionError(peer_ + " sent a malformed message, or did not end its stream");
  }
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    throw TimeoutError(peer_ + " did not answer in time");
  }
  if (status.error_code() == grpc::StatusCode::UNAUTHENTICATED) {
    throw RefusedError("refused by " + peer_ + ": " + status.error_message());
  }
  std::string reason = status.error_message();
  if (reason.empty()) reason = "it ended the stream";
  throw ConnectionError(peer_ + " was lost: " + reason);
}

}  // namespace torchbeast
